// Linear kernels for ARM with products of matrices of bytes, and of pairs of bfloat16.
#define DW_LINEAR_TABLE linear_i8mm
#include "linear_arm.h"
