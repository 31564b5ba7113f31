#define DW_TABLE attention_kernels_avx2
#include "attention_vectors.h"
