// Products of tiles; the rest as with AVX-512.
#define DW_TILES_EMULATED 0
#include "probe_512.h"
#include "tiles.h"

namespace dw {
namespace {

template <bool kBytes>
int64_t tile_products(int64_t rounds) {
  alignas(64) uint16_t numbers[kTileRows * 32];  // of changing ones: products of zeros take less time
  for (int i = 0; i < kTileRows * 32; ++i) numbers[i] = uint16_t(0x3c00 | (i * 40503 & 0x83ff));
  shape_tiles(2 * kTileRows);
  tile_load<A0>(numbers, kTileBytes);
  tile_load<A1>(numbers, kTileBytes);
  tile_load<B0>(numbers, kTileBytes);
  tile_load<B1>(numbers, kTileBytes);
  tile_zero<C0>();
  tile_zero<C1>();
  tile_zero<C2>();
  tile_zero<C3>();
  for (int64_t i = 0; i < rounds; i += 4) {
    if (kBytes) {
      tile_dot_bytes<C0, A0, B0>();
      tile_dot_bytes<C1, A0, B1>();
      tile_dot_bytes<C2, A1, B0>();
      tile_dot_bytes<C3, A1, B1>();
    } else {
      tile_dot_bf16<C0, A0, B0>();
      tile_dot_bf16<C1, A0, B1>();
      tile_dot_bf16<C2, A1, B0>();
      tile_dot_bf16<C3, A1, B1>();
    }
  }
  release_tiles();
  return (rounds + 3) / 4 * 4 * kTileRows * 16 * (kBytes ? 64 : 32) * 2;
}

}  // namespace

extern const ProbeKernels probe_amx;
const ProbeKernels probe_amx = {read, arithmetic<0>, tile_products<false>, tile_products<true>};

}  // namespace dw
