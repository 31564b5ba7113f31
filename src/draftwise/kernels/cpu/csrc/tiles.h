// The tile instructions of AMX as plain functions: those of the processor, or, with DW_TILES_EMULATED, computed as its manual says. The
// emulation is for tests on machines without the unit: layout, tails and bits are the same, speed is not.
//
// Eight tiles. A tile has up to 16 rows of 64 bytes. `Shape` says how many rows each has; it is the thread's until released.
//
//   C0 C1    sums of the upper rows, outputs 0..15 and 16..31     A0   upper rows, 16 dwords of k
//   C2 C3    sums of the lower rows                               A1   lower rows
//   B0 B1    weights, 16 dwords of k times 16 outputs each
//
// The instructions are written in assembly: compilers have been seen to move or drop the configuration, and none knows that a thread
// has to ask the operating system for the tiles first.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

#if !DW_TILES_EMULATED && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dw {
namespace {

enum TileName : int { C0 = 0, C1 = 1, C2 = 2, C3 = 3, A0 = 4, A1 = 5, B0 = 6, B1 = 7 };
constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row

// What `ldtilecfg` reads.
struct alignas(64) Palette {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline int upper_rows(int height) { return height <= kTileRows ? height : (height + 1) / 2; }

inline Palette palette_for(int height) {
  const int upper = upper_rows(height), lower = height - upper;
  const int rows[kTiles] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
  Palette p;
  for (int i = 0; i < kTiles; ++i) {
    p.rows[i] = uint8_t(rows[i]);
    p.row_bytes[i] = rows[i] == 0 ? 0 : kTileBytes;
  }
  return p;
}

#if DW_TILES_EMULATED

struct Emulated {
  Palette palette;
  bool configured = false;
  alignas(64) uint8_t data[kTiles][kTileRows][kTileBytes];
};
thread_local Emulated t_unit;

inline void configure(const Palette& p) {
  t_unit.palette = p;
  t_unit.configured = true;
  memset(t_unit.data, 0, sizeof t_unit.data);
}
inline void unconfigure() { t_unit.configured = false; }

// Where the processor would fault, so does this.
inline int rows_of(int tile) {
  if (!t_unit.configured || t_unit.palette.rows[tile] == 0) __builtin_trap();
  return t_unit.palette.rows[tile];
}

template <int T>
inline void tile_zero() {
  rows_of(T);
  memset(t_unit.data[T], 0, sizeof t_unit.data[T]);
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  const int rows = rows_of(T);
  memset(t_unit.data[T], 0, sizeof t_unit.data[T]);
  for (int i = 0; i < rows; ++i) memcpy(t_unit.data[T][i], static_cast<const uint8_t*>(from) + i * stride, kTileBytes);
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  for (int i = 0; i < rows_of(T); ++i) memcpy(static_cast<uint8_t*>(to) + i * stride, t_unit.data[T][i], kTileBytes);
}

inline float flushed(float x) {  // numbers too small to be normal count as zero, going in and coming out
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  memcpy(&x, &bits, 4);
  return x;
}
inline float half_of(const uint8_t* pair, int which) {
  uint16_t half;
  memcpy(&half, pair + 2 * which, 2);
  uint32_t bits = uint32_t(half) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}

// TDPBF16PS: even and odd products are summed apart over the 16 pairs of k, fused, and then added to the sum. A product of two bfloat16 has 16
// bits, so that a double holds its sum with a float exactly, or the smaller of them is too small to matter: rounding that to a float
// is what a fused product and sum gives.
template <int C, int A, int B>
inline void tile_dot_bf16() {
  const int rows = rows_of(C);
  if (rows_of(A) != rows || rows_of(B) != kTileRows) __builtin_trap();
  float b[2][16][16];
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < 16; ++n)
      for (int odd = 0; odd < 2; ++odd) b[odd][k][n] = half_of(&t_unit.data[B][k][n * 4], odd);
  for (int m = 0; m < rows; ++m) {
    float sums[2][16] = {};
    for (int k = 0; k < 16; ++k)
      for (int odd = 0; odd < 2; ++odd) {
        const float x = half_of(&t_unit.data[A][m][k * 4], odd);
        for (int n = 0; n < 16; ++n) sums[odd][n] = flushed(float(double(x) * b[odd][k][n] + sums[odd][n]));
      }
    for (int n = 0; n < 16; ++n) {
      float total;
      memcpy(&total, &t_unit.data[C][m][n * 4], 4);
      total = flushed(flushed(total) + flushed(sums[0][n] + sums[1][n]));
      memcpy(&t_unit.data[C][m][n * 4], &total, 4);
    }
  }
}

// TDPBSUD, TDPBSSD: bytes with sign (A) times bytes without or with (B).
template <class Byte, int C, int A, int B>
inline void tile_dot_bytes_of() {
  const int rows = rows_of(C);
  if (rows_of(A) != rows || rows_of(B) != kTileRows) __builtin_trap();
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < 16; ++n) {
      int32_t total;
      memcpy(&total, &t_unit.data[C][m][n * 4], 4);
      for (int k = 0; k < 16; ++k)
        for (int i = 0; i < 4; ++i)
          total += int32_t(int8_t(t_unit.data[A][m][k * 4 + i])) * int32_t(Byte(t_unit.data[B][k][n * 4 + i]));
      memcpy(&t_unit.data[C][m][n * 4], &total, 4);
    }
}
template <int C, int A, int B>
inline void tile_dot_bytes() {
  tile_dot_bytes_of<uint8_t, C, A, B>();
}
template <int C, int A, int B>
inline void tile_dot_signed() {
  tile_dot_bytes_of<int8_t, C, A, B>();
}

#else

// Linux keeps a thread's tiles only if its process has asked for them. Asking again costs a system call and changes nothing; every thread
// asks once, so that none depends on who was first.
inline void ask_for_tiles() {
  static thread_local bool asked = false;
  if (asked) return;
  asked = true;
#if defined(__linux__)
  syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
#endif
}

inline void configure(const Palette& p) {
  ask_for_tiles();
  __asm__ volatile("ldtilecfg %0" ::"m"(p) : "memory");
}
inline void unconfigure() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int T>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dot_bytes() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dot_signed() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

// Makes the tiles of this thread fit `height` rows (1..32).
thread_local int t_height = 0;

inline void shape_tiles(int height) {
  if (t_height == height) return;
  configure(palette_for(height));
  t_height = height;
}

void release_tiles() {
  if (t_height == 0) return;
  unconfigure();
  t_height = 0;
}

}  // namespace
}  // namespace dw
