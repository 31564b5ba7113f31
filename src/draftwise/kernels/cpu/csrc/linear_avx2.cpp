// Linear kernels for AVX2 with FMA.
#define DW_LINEAR_TABLE linear_avx2
#include "linear_256.h"
