// What the linear kernels of all levels of AVX-512 share: float32, rows quantised to int8, and the way out.
#pragma once

#include <immintrin.h>

#include "linear_kernels.h"

namespace dw {
namespace {

constexpr int64_t kAhead = 128;  // units (128 bytes each) that are prefetched ahead, of all panels together
// Into the second-level cache: measured in bfloat16, eight rows then cost what one row costs instead of 1.3 times as much; other
// formats gain little or nothing. Presumably the few miss buffers of the first level do not cover the latency of memory. From
// the second to the first level the processor's own prefetcher is enough.
constexpr auto kInto = _MM_HINT_T2;

// Where weights come from: read at `w`, with prefetches of what Tile::share says: of these weights, some units ahead, and in the end
// of the next ones; or of a part of the next ones alone, spread over the whole tile.
// Example: 128 units, the second of two tiles: `ahead` begins in the middle of the next panel's 128 units and goes half a unit
// with each unit of `w`.
template <int P>
struct Stream {
  static constexpr int64_t kDistance = kAhead / P * kUnitBytes;
  const uint8_t* w;
  const uint8_t* ahead;       // what is prefetched
  int64_t step, header_step;  // how far it goes with a unit, and with 64 bytes of a header
  const uint8_t* edge;        // from here on, it is `far` further: in what comes next
  int64_t far;
  int64_t left;  // units from `w` on

  explicit Stream(const Tile& t)
      : w(t.w), ahead(t.w + kDistance), step(kUnitBytes), header_step(kHeader), edge(t.w + t.bytes - kDistance),
        left(t.units) {
    far = (t.next_w != nullptr ? t.next_w : w) - (edge + kDistance);
    if (t.shares == 0) return;
    far = 0;
    ahead = t.next_w + t.bytes * t.share / t.shares;
    step = (kUnitBytes + t.shares - 1) / t.shares;
    header_step = (kHeader + t.shares - 1) / t.shares;
  }
  void prefetch(int64_t stride, int bytes = kUnitBytes) const {
    const uint8_t* at = ahead + (w < edge ? 0 : far);  // no branch: with one, GCC copies all accumulators in every turn
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(at + p * stride + i), kInto);
  }
  bool next_unit() {  // whether there is one
    w += kUnitBytes;
    ahead += step;
    return --left > 0;
  }
  void skip_header(int64_t stride, int bytes) {  // to the first unit of the group
    prefetch(stride, bytes);
    w += bytes;
    ahead += bytes / kHeader * header_step;
  }
};

inline __m512i load_w(const uint8_t* w) { return _mm512_loadu_si512(w); }

#if defined(__AVX512BF16__)
constexpr bool kHavePairs = true;
#else
constexpr bool kHavePairs = false;
#endif

// The intrinsic makes GCC 12 hold every accumulator twice, in two of its vector types.
inline __m512i dot_bytes(__m512i acc, __m512i w, __m512i x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}

// A step of float32 products; `kPairs`: of pairs of bfloat16, where there is an instruction for them.
template <bool kPairs>
inline __m512 step(__m512 acc, __m512i w, __m512i x) {
#if defined(__AVX512BF16__)
  if (kPairs) return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
#endif
  static_assert(!kPairs || kHavePairs, "this instruction set widens pairs");
  return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), acc);
}

// One step of all rows: a dword of each, broadcast once, times the vectors of weights.
template <int R, int P, bool kBf16>
inline void add_steps(__m512 (&acc)[R][2 * P], const __m512i (&w)[2 * P], const uint32_t* x) {
  for (int r = 0; r < R; ++r) {
    __m512i row = _mm512_set1_epi32(int(x[r]));
    for (int v = 0; v < 2 * P; ++v) acc[r][v] = step<kBf16>(acc[r][v], w[v], row);
  }
}
template <int R, int P>
inline void add_steps(__m512i (&acc)[R][2 * P], const __m512i (&w)[2 * P], const uint32_t* x) {
  for (int r = 0; r < R; ++r) {
    __m512i row = _mm512_set1_epi32(int(x[r]));
    for (int v = 0; v < 2 * P; ++v) acc[r][v] = dot_bytes(acc[r][v], w[v], row);
  }
}

// R rows times P panels: 2 * P * R accumulators stay in registers.
template <bool kBf16, int R, int P>
void tile(const Tile& t) {
  __m512 acc[R][2 * P];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v)
      acc[r][v] = t.load ? _mm512_loadu_ps(t.sums + (r * P * 2 + v) * 16) : _mm512_setzero_ps();
  Stream<P> s(t);
  const uint32_t* x = t.x;
  const int64_t stride = t.panel_stride;
  do {
    __m512i w[2 * P];
    for (int v = 0; v < 2 * P; ++v) w[v] = load_w(s.w + v / 2 * stride + v % 2 * 64);
    s.prefetch(stride);
    add_steps<R, P, kBf16>(acc, w, x);
    x += R;
  } while (s.next_unit());
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v) _mm512_storeu_ps(t.sums + (r * P * 2 + v) * 16, acc[r][v]);
}

template <int R, int P>
void tile_i8_dynamic(const Tile& t) {
  __m512i acc[R][2 * P];
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v)
      // weights are stored plus 128: 128 times the sum of the row comes off, which is what x_sums hold
      acc[r][v] = t.load ? _mm512_loadu_si512(t.sums + (r * P * 2 + v) * 16) : _mm512_set1_epi32(x_sums[r]);
  Stream<P> s(t);
  const uint32_t* x = t.x;
  do {  // at least once: a loop that may not run makes the compiler spill
    __m512i w[2 * P];
    for (int v = 0; v < 2 * P; ++v) w[v] = load_w(s.w + v / 2 * t.panel_stride + v % 2 * 64);
    s.prefetch(t.panel_stride);
    add_steps<R, P>(acc, w, x);
    x += R;
  } while (s.next_unit());
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v) _mm512_storeu_si512(t.sums + (r * P * 2 + v) * 16, acc[r][v]);
}

// Ends a group: total += scale * group (+ shift * sum of the row's values), for all rows and vectors of 16 outputs. `header`
// points at the first panel's scales; value(r, v) is the group's sum; `x_sums` are read only where groups have zero points, where
// shift = -scale * zero point.
template <bool kZeros, int R, int P, class Value>
inline void end_group(float* sums, const uint8_t* header, int64_t stride, const Value& value, const float (&x_sums)[R]) {
  __m512 scale[2 * P], shift[2 * P];
  for (int v = 0; v < 2 * P; ++v) {
    const uint8_t* at = header + v / 2 * stride;
    scale[v] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + v % 2 * 32)));
    if (!kZeros) continue;
    __m128i z = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + kHeader + v % 2 * 16));
    shift[v] = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), scale[v]), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(z)));
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)  // unrolled, or all accumulators go through memory
#pragma GCC unroll 4
    for (int v = 0; v < 2 * P; ++v) {
      float* to = sums + (r * P * 2 + v) * 16;
      __m512 total = _mm512_fmadd_ps(value(r, v), scale[v], _mm512_loadu_ps(to));
      if (kZeros) total = _mm512_fmadd_ps(shift[v], _mm512_set1_ps(x_sums[r]), total);
      _mm512_storeu_ps(to, total);
    }
  // The totals stay in memory: GCC would keep as many as it can in registers from group to group, and spill what the loop over
  // units needs. Measured with eight rows: a fifth slower.
  __asm__ volatile("" ::: "memory");
}

// Totals of a tile that does not go on from earlier ones.
template <int R, int P>
inline void start_totals(const Tile& t) {
  if (t.load) return;
  for (int i = 0; i < R * 2 * P; ++i) _mm512_storeu_ps(t.sums + i * 16, _mm512_setzero_ps());
}

// The integers of 64 bytes of W_I4_DYN, those of the low and those of the high halves: the codes themselves, or what a table says.
struct PlainCodes {
  const __m512i mask = _mm512_set1_epi8(15);
  explicit PlainCodes(const Nibbles&) {}
  __m512i low(__m512i w) const { return _mm512_and_si512(w, mask); }
  __m512i high(__m512i w) const { return _mm512_and_si512(_mm512_srli_epi16(w, 4), mask); }
};
struct IntegerTable : PlainCodes {
  __m512i table;
  explicit IntegerTable(const Nibbles& n)
      : PlainCodes(n), table(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(n.integers)))) {}
  __m512i low(__m512i w) const { return _mm512_shuffle_epi8(table, PlainCodes::low(w)); }
  __m512i high(__m512i w) const { return _mm512_shuffle_epi8(table, PlainCodes::high(w)); }
};

template <bool kZeros, int R, int P, class Codes>
void tile_i4_dynamic_groups(const Tile& t) {
  constexpr int header = kZeros ? 2 * kHeader : kHeader;
  const Codes codes(*t.nibbles);
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  start_totals<R, P>(t);
  Stream<P> s(t);
  const uint32_t* x = t.x;
  const int64_t stride = t.panel_stride;
  const int group_units = t.group_units;
  int64_t groups = t.units / group_units;
  float* sums = t.sums;
  do {
    const uint8_t* group = s.w;
    __m512i acc[R][2 * P];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2 * P; ++v) acc[r][v] = _mm512_setzero_si512();
    s.skip_header(stride, header);
    int u = group_units;
    do {
      s.prefetch(stride);
      __m512i first[2 * P], second[2 * P];
      for (int v = 0; v < 2 * P; ++v) {
        __m512i w = load_w(s.w + v / 2 * stride + v % 2 * 64);
        first[v] = codes.low(w);
        second[v] = codes.high(w);
      }
      add_steps<R, P>(acc, first, x);
      add_steps<R, P>(acc, second, x + R);
      s.next_unit();
      x += 2 * R;
    } while (--u > 0);
    float x_sum[R];
    if (kZeros)
      for (int r = 0; r < R; ++r) x_sum[r] = float(x_sums[r]) * -0.125f;
    // Of -8..7, 0..15 are multiplied: eight times the sum of the row comes off, which is what x_sums hold. Here rather than at the
    // beginning, where these vectors would have to be made for nothing else.
    const auto value = [&](int r, int v) {
      return _mm512_cvtepi32_ps(_mm512_add_epi32(acc[r][v], _mm512_set1_epi32(x_sums[r])));
    };
    end_group<kZeros, R, P>(sums, group, stride, value, x_sum);
    x_sums += R;
  } while (--groups > 0);
}

template <int R, int P>
void tile_i4_dynamic(const Tile& t) {
  if (!t.nibbles->plain) return tile_i4_dynamic_groups<false, R, P, IntegerTable>(t);
  t.zeros ? tile_i4_dynamic_groups<true, R, P, PlainCodes>(t) : tile_i4_dynamic_groups<false, R, P, PlainCodes>(t);
}

#define DW_ROWS(kernel)                                                                                               \
  [](const Tile& t) {                                                                                                 \
    using Fn = void (*)(const Tile&);                                                                                 \
    static constexpr Fn one[] = {nullptr,      kernel(1, 1), kernel(2, 1), kernel(3, 1),  kernel(4, 1),               \
                                 kernel(5, 1), kernel(6, 1), kernel(7, 1), kernel(8, 1),  kernel(9, 1),               \
                                 kernel(10, 1), kernel(11, 1), kernel(12, 1)};                                        \
    static constexpr Fn two[] = {nullptr,      kernel(1, 2), kernel(2, 2), kernel(3, 2),                              \
                                 kernel(4, 2), kernel(5, 2), kernel(6, 2)};                                           \
    (t.panels == 2 ? two : one)[t.rows](t);                                                                           \
  }
// ------------------------------------------------------------------------------------------------- the way out

namespace way_out {  // names that vec.h has, too

// e^x for x <= 0: 2^n * p(f), x = (n + f) ln 2 with f in [-1/2, 1/2]; about one unit in the last place.
inline __m512 exp_negative(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(f, f), p, _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// x / (1 + e^-x), with e of a negative number in both branches so that nothing overflows.
inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  __m512 e = exp_negative(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));  // e^-|x|
  __m512 d = _mm512_add_ps(one, e);
  __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
  __m512 top = _mm512_mask_mul_ps(x, negative, x, e);
  return _mm512_div_ps(top, d);
}

inline __m256i to_bf16_by_hand(__m512 v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(rounded);
}

// To the nearest, ties to even; a NaN stays one. The instruction makes zeros of denormals: where there are some, it is done by hand.
inline __m256i to_bf16(__m512 v) {
#if defined(__AVX512BF16__)
  if (__builtin_expect(_mm512_testn_epi32_mask(_mm512_castps_si512(v), _mm512_set1_epi32(0x7f800000)) == 0, 1))
    return (__m256i)_mm512_cvtneps_pbh(v);
#endif
  return to_bf16_by_hand(v);
}

inline __m512 from_bf16(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

template <DType D>
inline __m512 rounded(__m512 v) {
  return D == F32 ? v : from_bf16(to_bf16(v));
}

template <DType D>
inline void store(void* out, int64_t at, __mmask16 mask, __m512 v) {
  if (D == F32)
    _mm512_mask_storeu_ps(static_cast<float*>(out) + at, mask, v);
  else
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out) + at, mask, to_bf16(v));
}

template <DType D>
inline __m512 load(const void* out, int64_t at, __mmask16 mask) {
  if (D == F32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(out) + at);
  return from_bf16(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(out) + at));
}

inline __mmask16 first_lanes(int64_t count) { return count < 16 ? __mmask16((1u << count) - 1) : __mmask16(0xffff); }

// Sums of floats without a bias, or any: what is the same in all rows is read once, since the compiler cannot know that the stores do
// not change it.
template <bool BARE, DType D, Epilogue E>
void finish_rows(const Finish& f) {
  const bool integers = f.integers;
  const float *const scale = f.scale, *const row_scale = f.row_scale, *const bias = f.bias, *sums = f.sums;
  const int64_t sums_stride = f.sums_stride, ldo = f.ldo, column[2] = {f.column[0], f.column[1]};
  const __mmask16 mask[2] = {first_lanes(f.count[0]), first_lanes(f.count[1])};
  const int rows = f.rows;
  void* const out = f.out;
  for (int r = 0; r < rows; ++r, sums += sums_stride) {
    __m512 y[2] = {_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + 16)};
    if (!BARE) {
      for (int half = 0; half < 2; ++half) {
        if (integers) y[half] = _mm512_cvtepi32_ps(_mm512_castps_si512(y[half]));
        if (scale != nullptr) y[half] = _mm512_mul_ps(y[half], _mm512_loadu_ps(scale + half * 16));
        if (row_scale != nullptr) y[half] = _mm512_mul_ps(y[half], _mm512_set1_ps(row_scale[r]));
        if (bias != nullptr) y[half] = _mm512_add_ps(y[half], _mm512_loadu_ps(bias + half * 16));
      }
    }
    if (E == EP_SILU_MUL) {
      __m512 gate = rounded<D>(silu(rounded<D>(y[0])));
      store<D>(out, r * ldo + column[0], mask[0], _mm512_mul_ps(gate, rounded<D>(y[1])));
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      if (mask[half] == 0) continue;
      const int64_t at = r * ldo + column[half];
      if (E == EP_ADD) y[half] = _mm512_add_ps(load<D>(out, at, mask[half]), rounded<D>(y[half]));
      store<D>(out, at, mask[half], y[half]);
    }
  }
}

template <bool BARE, DType D>
void finish_to(const Finish& f) {
  if (f.epilogue == EP_SILU_MUL) return finish_rows<BARE, D, EP_SILU_MUL>(f);
  if (f.epilogue == EP_ADD) return finish_rows<BARE, D, EP_ADD>(f);
  finish_rows<BARE, D, EP_STORE>(f);
}

void finish(const Finish& f) {
  const bool bare = !f.integers && f.scale == nullptr && f.row_scale == nullptr && f.bias == nullptr;
  if (f.dtype == F32) return bare ? finish_to<true, F32>(f) : finish_to<false, F32>(f);
  bare ? finish_to<true, BF16>(f) : finish_to<false, BF16>(f);
}

// The bits without sign of the largest: infinity and NaN stand above all numbers.
template <DType D>
__m512i largest_bits(const void* x, int64_t count) {
  __m512i largest = _mm512_setzero_si512();
  int64_t i = 0;
  if (D == BF16) {  // 32 at once
    for (; i + 32 <= count; i += 32) {
      const __m512i bits = _mm512_loadu_si512(static_cast<const uint16_t*>(x) + i);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
    }
    largest = _mm512_max_epi32(_mm512_slli_epi32(largest, 16), _mm512_and_si512(largest, _mm512_set1_epi32(0x7fff0000)));
  }
  for (; i < count; i += 16) {
    const __m512i bits = _mm512_castps_si512(load<D>(x, i, first_lanes(count - i)));
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  return largest;
}

template <DType D>
float quantize_row(const void* x, int64_t count, int8_t* q) {
  __m512 whole = _mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epi32(largest_bits<D>(x, count))));
  float top = _mm512_cvtss_f32(whole), inverse = 127.0f / top;
  bool finite = top < __builtin_inff();
  if (!finite || !(inverse < 0x1p127f)) {  // or nothing but zeros and the smallest numbers
    for (int64_t i = 0; i < count; ++i) q[i] = 0;
    return finite ? 0.0f : __builtin_nanf("");
  }
  const auto rounded = [&](int64_t i, __mmask16 lanes) {
    return _mm512_cvtepi32_epi8(_mm512_cvt_roundps_epi32(_mm512_mul_ps(load<D>(x, i, lanes), _mm512_set1_ps(inverse)),
                                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  };
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) _mm_storeu_si128(reinterpret_cast<__m128i*>(q + i), rounded(i, 0xffff));
  if (i < count) _mm_mask_storeu_epi8(q + i, first_lanes(count - i), rounded(i, first_lanes(count - i)));
  return top / 127.0f;
}

float quantize(const void* x, DType dtype, int64_t count, int8_t* q) {
  return dtype == F32 ? quantize_row<F32>(x, count, q) : quantize_row<BF16>(x, count, q);
}

int32_t sum(const int8_t* q, int64_t count) {
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 bytes = count - i < 64 ? (uint64_t(1) << (count - i)) - 1 : ~uint64_t(0);
    sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(bytes, q + i));
  }
  return _mm512_reduce_add_epi32(sums);
}

}  // namespace way_out

using way_out::finish;
using way_out::quantize;
using way_out::sum;

}  // namespace
}  // namespace dw
