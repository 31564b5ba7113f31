// The steps of a kernel on tiles: chunks of rows and weights, and sums, into the unit and out of it. Part of linear_tiles.h.
#pragma once

#include "linear_kernels.h"
#include "tiles.h"
#include "vec.h"

namespace dw {
namespace {

enum class Product { kPairs, kBytes, kSigned };  // of bfloat16; of bytes, those of weights without a sign, or with one

constexpr Product product_of(Format f) {
  return f == W_I8_DYN ? Product::kBytes : f == W_I4_DYN ? Product::kSigned : Product::kPairs;
}

template <Product kProduct, int C, int A, int B>
inline void dot() {
  if (kProduct == Product::kBytes)
    tile_dot_bytes<C, A, B>();
  else if (kProduct == Product::kSigned)
    tile_dot_signed<C, A, B>();
  else
    tile_dot_bf16<C, A, B>();
}

// One chunk: rows at `x` times weights at `w`. kTwo: rows are in two tiles, the first one of `upper` rows.
template <Product kProduct, bool kTwo>
DW_INLINE void add_chunk(int upper, const uint8_t* x, const uint8_t* w) {
  tile_load<A0>(x, kTileBytes);
  tile_load<B0>(w, kUnitBytes);
  if (kTwo) tile_load<A1>(x + upper * kTileBytes, kTileBytes);
  dot<kProduct, C0, A0, B0>();
  if (kTwo) dot<kProduct, C2, A1, B0>();
  tile_load<B1>(w + kTileBytes, kUnitBytes);
  dot<kProduct, C1, A0, B1>();
  if (kTwo) dot<kProduct, C3, A1, B1>();
}

// Sums in memory are [rows][32].
constexpr int64_t kSumStride = kPanel * 4;

template <bool kTwo>
DW_INLINE void load_sums(int upper, const float* sums) {
  tile_load<C0>(sums, kSumStride);
  tile_load<C1>(sums + 16, kSumStride);
  if (!kTwo) return;
  tile_load<C2>(sums + upper * kPanel, kSumStride);
  tile_load<C3>(sums + upper * kPanel + 16, kSumStride);
}
// One half of a panel's sums: outputs 0..15 are C0 and C2, outputs 16..31 C1 and C3.
template <bool kTwo, int kUpper, int kLower>
DW_INLINE void zero_half() {
  tile_zero<kUpper>();
  if (kTwo) tile_zero<kLower>();
}
template <bool kTwo, int kUpper, int kLower>
DW_INLINE void store_half(int upper, float* sums) {
  tile_store<kUpper>(sums, kSumStride);
  if (kTwo) tile_store<kLower>(sums + upper * kPanel, kSumStride);
}
template <bool kTwo>
DW_INLINE void zero_sums() {
  zero_half<kTwo, C0, C2>();
  zero_half<kTwo, C1, C3>();
}
template <bool kTwo>
DW_INLINE void store_sums(int upper, float* sums) {
  store_half<kTwo, C0, C2>(upper, sums);
  store_half<kTwo, C1, C3>(upper, sums + 16);
}

}  // namespace
}  // namespace dw
