// Linear kernels for AVX2 with AVX-VNNI.
#define DW_LINEAR_TABLE linear_avxvnni
#include "linear_256.h"
