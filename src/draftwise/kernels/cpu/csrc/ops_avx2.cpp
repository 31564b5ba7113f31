#define DW_TABLE row_kernels_avx2
#include "ops_impl.h"
