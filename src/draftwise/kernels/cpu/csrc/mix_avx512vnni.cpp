#define DW_TABLE mix_kernels_avx512vnni
#include "mix_impl.h"
