// Linear kernels for AMX: everything but float32 in tiles, the way out as on AVX-512.
#define DW_TILES_EMULATED 0
#include "linear_512.h"
#include "linear_bytes_to_pairs.h"
#include "linear_tiles.h"

namespace dw {
namespace {

struct Expand {
  static void bytes(const uint8_t* unit, uint8_t* steps, const Nibbles& nibbles) {
    if (!nibbles.plain) return looked_up(unit, steps, nibbles);
    const __m512i mask = _mm512_set1_epi8(char(0xf0)), sign = _mm512_set1_epi8(char(0x80));
    const auto signed_codes = [&](__m512i w) { return _mm512_ternarylogic_epi32(w, mask, sign, 0x6a); };  // (w & mask) ^ sign
    for (int v = 0; v < 2; ++v) {
      __m512i w = load_w(unit + v * 64);
      _mm512_store_si512(steps + v * 64, signed_codes(_mm512_slli_epi16(w, 4)));
      _mm512_store_si512(steps + kUnitBytes + v * 64, signed_codes(w));
    }
  }
  static void looked_up(const uint8_t* unit, uint8_t* steps, const Nibbles& nibbles) {
    const IntegerTable table(nibbles);
    const __m512i offset = _mm512_set1_epi8(char(nibbles.offset));
    for (int v = 0; v < 2; ++v) {
      __m512i w = load_w(unit + v * 64);
      _mm512_store_si512(steps + v * 64, _mm512_sub_epi8(table.low(w), offset));
      _mm512_store_si512(steps + kUnitBytes + v * 64, _mm512_sub_epi8(table.high(w), offset));
    }
  }
  template <Format F>
  static void pairs(const uint8_t* unit, uint8_t* steps, const Nibbles* nibbles) {
    for (int v = 0; v < 2; ++v) {
      __m512i w = load_w(unit + v * 64), first, second;
      if constexpr (F == W_I8) {
        widen_bytes(w, first, second);
        _mm512_store_si512(steps + v * 64, first);
        _mm512_store_si512(steps + kUnitBytes + v * 64, second);
      } else {
        const NibbleTables tables(*nibbles);
        for (int half = 0; half < 2; ++half) {
          widen_nibbles(tables, w, half, first, second);
          _mm512_store_si512(steps + 2 * half * kUnitBytes + v * 64, first);
          _mm512_store_si512(steps + (2 * half + 1) * kUnitBytes + v * 64, second);
        }
      }
    }
  }
};

#define DW_F32_TILE(r, p) tile<false, r, p>

}  // namespace

extern const LinearKernels linear_amx;
const LinearKernels linear_amx = {
    {DW_ROWS(DW_F32_TILE), tiles_plain<W_BF16, Expand>, tiles_plain<W_I8, Expand>, tiles_plain<W_I8_DYN, Expand>,
     tiles_grouped<W_I4, Expand>, tiles_grouped<W_I4_DYN, Expand>},
    finish,
    quantize,
    sum,
    {12, 32, 32, 32, 32, 32},
    {6, 0, 0, 0, 0, 0},
    {false, true, true, true, true, true},
    release_tiles,
    {},
    {}};

}  // namespace dw
