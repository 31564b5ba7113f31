// Linear kernels for ARM with products of four bytes.
#define DW_LINEAR_TABLE linear_dotprod
#include "linear_arm.h"
