#define DW_TABLE row_kernels_portable
#include "ops_impl.h"
