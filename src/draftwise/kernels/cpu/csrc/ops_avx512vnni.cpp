#define DW_TABLE row_kernels_avx512vnni
#include "ops_impl.h"
