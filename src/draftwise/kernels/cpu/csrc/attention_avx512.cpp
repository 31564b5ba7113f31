#define DW_TABLE attention_kernels_avx512
#include "attention_vectors.h"
