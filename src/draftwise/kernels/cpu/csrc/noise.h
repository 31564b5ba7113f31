// The counter-based noise of draftwise/sampling/noise.py: every draw is a function of its key. Integers are exact, so keys
// and uniforms have the bits they have there; the Gumbel noise of a row is made where it is used (sample_impl.h).
//
// For files of the platform's baseline only (see isa.h).
#pragma once

#include <cstdint>

namespace dw {

enum NoiseStream : int { SHARED_NOISE = 0, DRAFT_NOISE = 1, ACCEPT_NOISE = 2, RECOVER_NOISE = 3 };

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio, splitmix64's increment

inline uint64_t finalise(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// `node` -1: the root. The shared stream has neither node nor base.
inline uint64_t row_key(uint64_t seed, uint32_t sample_index, NoiseStream stream, int64_t position, int64_t node,
                        int64_t base) {
  if (stream == SHARED_NOISE) {
    node = -1;
    base = 0;
  }
  uint64_t h = finalise(seed + GOLDEN);
  h = finalise(h ^ ((uint64_t)position << 32 | (uint64_t)base));
  return finalise(h ^ ((uint64_t)sample_index << 24 | (uint64_t)(node + 1) << 8 | (uint64_t)stream));
}

// [0, 1), a multiple of 2^-53.
inline double uniform_of(uint64_t key) { return (double)(finalise(key + GOLDEN) >> 11) * 0x1p-53; }

}  // namespace dw
