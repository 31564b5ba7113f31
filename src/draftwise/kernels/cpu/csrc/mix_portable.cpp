#define DW_TABLE mix_kernels_portable
#include "mix_impl.h"
