#define DW_TABLE sample_kernels_avx512
#include "sample_impl.h"
