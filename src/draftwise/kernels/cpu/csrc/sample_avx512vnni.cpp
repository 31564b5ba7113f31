#define DW_TABLE sample_kernels_avx512vnni
#include "sample_impl.h"
