// The kernels of attention_tiles.h on tiles that are computed: for tests, on any machine.
#define DW_TILES_EMULATED 1
#include "attention_tiles.h"

namespace dw {

extern const AttentionKernels attention_kernels_emulated;
const AttentionKernels attention_kernels_emulated = DW_ATTENTION(TileSteps);

}  // namespace dw
