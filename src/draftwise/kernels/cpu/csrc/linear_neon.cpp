// Linear kernels for ARM processors that have nothing but NEON.
#define DW_LINEAR_TABLE linear_neon
#include "linear_arm.h"
