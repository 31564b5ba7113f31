// The kernels of linear_tiles.h on tiles that are computed: for tests, on any machine.
#define DW_TILES_EMULATED 1
#include "linear_impl.h"
#include "linear_tiles.h"

namespace dw {
namespace {

struct Expand {
  static void bytes(const uint8_t* unit, uint8_t* steps, const Nibbles& nibbles) {
    const int times = nibbles.plain ? 16 : 1;
    for (int i = 0; i < kUnitBytes; ++i) {
      steps[i] = uint8_t((nibbles.integers[unit[i] & 15] - nibbles.offset) * times);
      steps[kUnitBytes + i] = uint8_t((nibbles.integers[unit[i] >> 4] - nibbles.offset) * times);
    }
  }
  template <Format F>
  static void pairs(const uint8_t* unit, uint8_t* steps, const Nibbles* nibbles) {
    float w[8][kPanel];
    decode<F>(unit, w, nibbles);
    for (int k = 0; k < (F == W_I8 ? 4 : 8); ++k)
      for (int j = 0; j < kPanel; ++j) {
        uint16_t half = to_bf16(w[k][j]);
        memcpy(steps + k / 2 * kUnitBytes + j * 4 + k % 2 * 2, &half, 2);
      }
  }
};

}  // namespace

extern const LinearKernels linear_emulated;
const LinearKernels linear_emulated = {
    {tile_plain<W_F32>, tiles_plain<W_BF16, Expand>, tiles_plain<W_I8, Expand>, tiles_plain<W_I8_DYN, Expand>,
     tiles_grouped<W_I4, Expand>, tiles_grouped<W_I4_DYN, Expand>},
    finish_plain,
    quantize_plain,
    sum_bytes,
    {8, 32, 32, 32, 32, 32},
    {},
    {false, true, true, true, true, true},
    release_tiles,
    {},
    {}};

}  // namespace dw
