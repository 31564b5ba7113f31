#define DW_TABLE attention_kernels_portable
#include "attention_vectors.h"
