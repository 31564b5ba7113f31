#define DW_TABLE row_kernels_avx512
#include "ops_impl.h"
