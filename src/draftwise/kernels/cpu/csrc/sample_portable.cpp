#define DW_TABLE sample_kernels_portable
#include "sample_impl.h"
