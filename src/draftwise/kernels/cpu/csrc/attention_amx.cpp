// The kernels of attention_tiles.h for AMX.
#define DW_TILES_EMULATED 0
#include "attention_tiles.h"

namespace dw {

extern const AttentionKernels attention_kernels_amx;
const AttentionKernels attention_kernels_amx = DW_ATTENTION(TileSteps);

}  // namespace dw
