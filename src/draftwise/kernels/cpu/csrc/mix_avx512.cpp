#define DW_TABLE mix_kernels_avx512
#include "mix_impl.h"
