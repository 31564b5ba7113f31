// Where kernels on tiles (linear_tiles.h) take chunks of weights from, and what is fetched meanwhile. `next()` of a source gives the next
// chunk: 16 steps of 128 bytes.
#pragma once

#include "linear_kernels.h"
#include "vec.h"

namespace dw {
namespace {

constexpr int64_t kAheadBytes = 16 << 10;  // of a panel that are prefetched

// A chunk of weights in L1.
struct Chunk {
  alignas(64) uint8_t steps[kChunkDwords][kUnitBytes];
};

// Fetches what `Tile::share` says, a little with every chunk.
// Example: 64 chunks of 2 KB, the second of four tiles: it fetches the second quarter of the next panel's 128 KB, 512 bytes with a chunk.
class Fetch {
 public:
  explicit Fetch(const Tile& t)
      : at_(t.w + kAheadBytes), edge_(t.w + t.bytes), next_(t.next_w), shares_(t.shares > 0 ? t.shares : 1) {
    if (t.shares == 0) return;
    edge_ = nullptr;
    at_ = t.next_w + t.bytes * t.share / t.shares / 64 * 64;
  }
  // While so many bytes of weights are multiplied.
  DW_INLINE void with(int64_t bytes) {
    if (edge_ != nullptr && at_ >= edge_) {
      at_ = next_ != nullptr ? next_ + (at_ - edge_) : nullptr;
      edge_ = nullptr;
    }
    if (at_ == nullptr) return;
    owed_ += bytes;
    for (; owed_ >= 64 * shares_; owed_ -= 64 * shares_, at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const uint8_t *at_, *edge_, *next_;
  int64_t owed_ = 0;
  const int64_t shares_;
};

// The chunk of `count` units at `units`, widened or not, with zeros where units are missing.
template <Format F, class Expand>
inline void put_together(const Tile& t, const uint8_t* units, int64_t count, uint8_t* to) {
  constexpr int steps = steps_per_unit(F);
  for (int64_t u = 0; u < count; ++u, to += steps * kUnitBytes) {
    const uint8_t* unit = units + u * kUnitBytes;
    if constexpr (F == W_I4_DYN)
      Expand::bytes(unit, to, *t.nibbles);
    else if constexpr (steps == 1)
      memcpy(to, unit, kUnitBytes);
    else
      Expand::template pairs<F>(unit, to, t.nibbles);
  }
  if (count * steps < kChunkDwords) memset(to, 0, size_t(kChunkDwords - count * steps) * kUnitBytes);
}

// As they are stored; only a last one that is not whole is put together.
template <Format F, class Expand>
class Stored {
 public:
  explicit Stored(const Tile& t) : t_(t), at_(t.w), left_(t.units) {}
  DW_INLINE const uint8_t* next() {
    const uint8_t* chunk = at_;
    at_ += kChunkBytes;
    left_ -= kChunkDwords;
    if (left_ >= 0) return chunk;
    put_together<F, Expand>(t_, chunk, left_ + kChunkDwords, last_.steps[0]);
    return last_.steps[0];
  }

 private:
  const Tile& t_;
  const uint8_t* at_;
  int64_t left_;
  Chunk last_;
};

// Widened one by one, some chunks before they are multiplied: a tile cannot be loaded from what a store has not yet written to the cache.
template <Format F, class Expand>
class Widened {
 public:
  // `group_units`, `header`: of each group; without groups, all units and 0.
  Widened(const Tile& t, int64_t group_units, int64_t header)
      : t_(t), group_units_(group_units), header_(header), at_(t.w + header), left_(group_units), end_(t.w + t.bytes) {}
  DW_INLINE const uint8_t* next() {
    while (made_ < kAhead) widen(chunks_[made_++].steps[0]);
    widen(chunks_[made_++ % kChunks].steps[0]);
    return chunks_[taken_++ % kChunks].steps[0];
  }
  // Puts the next chunk there; false: there is none.
  DW_INLINE bool widen(uint8_t* to) {
    if (at_ >= end_) return false;
    const int64_t count = left_ < kUnits ? left_ : kUnits;
    put_together<F, Expand>(t_, at_, count, to);
    at_ += count * kUnitBytes;
    left_ -= count;
    if (left_ == 0) {
      at_ += header_;
      left_ = group_units_;
    }
    return true;
  }

 private:
  static constexpr int64_t kUnits = kChunkDwords / steps_per_unit(F);
  static constexpr int kAhead = 2, kChunks = 4;  // kAhead < kChunks
  const Tile& t_;
  const int64_t group_units_, header_;
  const uint8_t* at_;
  int64_t left_;
  const uint8_t* const end_;
  unsigned made_ = 0, taken_ = 0;
  Chunk chunks_[kChunks];
};

// Widened before, for all tiles that read them.
template <Format F, class Expand>
class Shared {
 public:
  Shared(const Tile& t, int64_t group_units, int64_t header) : at_(t.widened) {
    if (!t.widen) return;
    Widened<F, Expand> weights(t, group_units, header);
    for (uint8_t* to = t.widened; weights.widen(to); to += kChunkBytes) {}
  }
  DW_INLINE const uint8_t* next() {
    const uint8_t* chunk = at_;
    at_ += kChunkBytes;
    return chunk;
  }

 private:
  const uint8_t* at_;
};

}  // namespace
}  // namespace dw
