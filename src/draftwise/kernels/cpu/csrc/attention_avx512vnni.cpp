#define DW_TABLE attention_kernels_avx512vnni
#include "attention_vectors.h"
