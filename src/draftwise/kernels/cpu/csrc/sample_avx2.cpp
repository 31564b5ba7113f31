#define DW_TABLE sample_kernels_avx2
#include "sample_impl.h"
