#define DW_TABLE mix_kernels_avx2
#include "mix_impl.h"
