#include "ranks.h"

#include <atomic>
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "boundary.h"
#include "compiler.h"
#include "links.h"
#include "system.h"

namespace dw {
namespace {

constexpr int64_t LINE = 64;
constexpr int SPINS = 2000;             // some tens of microseconds
constexpr int64_t YIELDING = 1000000;  // nanoseconds before a waiting rank sleeps between looks
static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters in shared memory");

struct alignas(LINE) Counter {
  std::atomic<uint64_t> value;
};

float widen(float x) { return x; }
float widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void narrow(float x, float* out) { *out = x; }
void narrow(float x, uint16_t* out) {  // to the nearest bfloat16, ties to even
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *out = (uint16_t)(x != x ? (bits >> 16) | 64 : rounded);
}

}  // namespace

struct Ranks {
  Counter* posted;  // [size] exchanges that each rank has written
  Counter* broken;  // not 0: somebody gave up
  char* slots;      // [2, size, piece]
  int64_t size, rank, piece;
  int64_t patience;  // nanoseconds
  uint64_t count = 0;
  Links links;

  // Of a rank on another machine: a buffer of this process, into which links read.
  char* slot(int64_t of) {
    char* theirs = links.theirs(of);
    return theirs != nullptr ? theirs : slots + ((int64_t)(count & 1) * size + of) * piece;
  }

  // Behind it the first `bytes` of all slots of this exchange are written.
  void meet(int64_t bytes) {
    posted[rank].value.store(count + 1, std::memory_order_release);
    try {
      links.exchange(slot(rank), bytes, patience, broken->value);
    } catch (const std::runtime_error&) {
      broken->value.store(1, std::memory_order_relaxed);
      throw;
    }
    for (int64_t other = 0; other < size; other++)
      if (other != rank && links.theirs(other) == nullptr) wait_for(posted[other].value);
  }

  void wait_for(const std::atomic<uint64_t>& other) {
    const uint64_t wanted = count + 1;
    for (int i = 0; i < SPINS; i++) {
      if (other.load(std::memory_order_acquire) >= wanted) return;
      pause_briefly();
    }
    const int64_t start = now_ns();
    while (other.load(std::memory_order_acquire) < wanted) {
      const int64_t waited = now_ns() - start;
      if (waited > patience) broken->value.store(1, std::memory_order_relaxed);
      if (broken->value.load(std::memory_order_relaxed) != 0) throw std::runtime_error("a rank is missing");
      if (waited < YIELDING)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
};

namespace {

template <class T>
void sum(Ranks* ranks, T* x, int64_t count) {
  const int64_t most = ranks->piece / (int64_t)sizeof(T);
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t n = std::min(most, count - begin);
    memcpy(ranks->slot(ranks->rank), x + begin, (size_t)n * sizeof(T));
    ranks->meet(n * (int64_t)sizeof(T));
    const T* first = (const T*)ranks->slot(0);
    if (ranks->size == 2) {
      const T* second = (const T*)ranks->slot(1);
      for (int64_t i = 0; i < n; i++) narrow(widen(first[i]) + widen(second[i]), x + begin + i);
    } else {
      constexpr int64_t TILE = 1024;
      float total[TILE];
      for (int64_t at = 0; at < n; at += TILE) {
        const int64_t m = std::min(TILE, n - at);
        for (int64_t i = 0; i < m; i++) total[i] = widen(first[at + i]);
        for (int64_t r = 1; r < ranks->size; r++) {
          const T* other = (const T*)ranks->slot(r) + at;
          for (int64_t i = 0; i < m; i++) total[i] += widen(other[i]);
        }
        for (int64_t i = 0; i < m; i++) narrow(total[i], x + begin + at + i);
      }
    }
    ranks->count++;
  }
}

int64_t width_of(int64_t rank, int64_t step, int64_t total) {
  return std::clamp<int64_t>(total - rank * step, 0, step);
}

}  // namespace

Ranks* ranks_create(void* memory, int64_t size, int64_t rank, int64_t piece, double seconds, const int32_t* sockets) {
  require(size >= 1 && rank >= 0 && rank < size && piece >= LINE && piece % LINE == 0 && seconds > 0, "ranks");
  require((uintptr_t)memory % LINE == 0 && memory != nullptr, "aligned memory");
  require(sockets == nullptr || sockets[rank] < 0, "no link to itself");
  Counter* counters = (Counter*)memory;
  const int64_t patience = (int64_t)(std::min(seconds, 1e6) * 1e9);
  return new Ranks{counters, counters + size, (char*)(counters + size + 1), size, rank, piece, patience, 0,
                   Links(sockets, size, piece)};
}

void ranks_free(Ranks* ranks) { delete ranks; }

void ranks_sum(Ranks* ranks, DType dtype, void* x, int64_t count) {
  if (dtype == F32)
    sum(ranks, (float*)x, count);
  else
    sum(ranks, (uint16_t*)x, count);
}

void ranks_gather(Ranks* ranks, const float* part, int64_t step, int64_t total, float* out, int64_t rows) {
  const int64_t most = ranks->piece / (int64_t)sizeof(float);
  const int64_t columns = std::min(step, most), together = std::max<int64_t>(1, most / columns);
  const int64_t own = width_of(ranks->rank, step, total);
  for (int64_t row = 0; row < rows; row += together) {
    const int64_t n = std::min(together, rows - row);
    for (int64_t begin = 0; begin < step; begin += columns) {
      const int64_t width = std::min(columns, step - begin);
      auto some = [&](int64_t of) { return std::clamp<int64_t>(of - begin, 0, width); };
      float* slot = (float*)ranks->slot(ranks->rank);
      for (int64_t r = 0; r < n; r++)
        memcpy(slot + r * width, part + (row + r) * own + begin, (size_t)some(own) * sizeof(float));
      ranks->meet(n * width * (int64_t)sizeof(float));
      for (int64_t other = 0; other < ranks->size; other++) {
        const float* theirs = (const float*)ranks->slot(other);
        const size_t size = (size_t)some(width_of(other, step, total)) * sizeof(float);
        for (int64_t r = 0; r < n && size > 0; r++)
          memcpy(out + (row + r) * total + other * step + begin, theirs + r * width, size);
      }
      ranks->count++;
    }
  }
}

void ranks_share(Ranks* ranks, const void* mine, int64_t bytes, void* all) {
  for (int64_t begin = 0; begin < bytes; begin += ranks->piece) {
    const size_t n = (size_t)std::min(ranks->piece, bytes - begin);
    memcpy(ranks->slot(ranks->rank), (const char*)mine + begin, n);
    ranks->meet((int64_t)n);
    for (int64_t other = 0; other < ranks->size; other++)
      memcpy((char*)all + other * bytes + begin, ranks->slot(other), n);
    ranks->count++;
  }
}

void gather_part_rows(const void* table, int64_t first, int64_t table_rows, const int64_t* ids, void* out, int64_t rows,
                      int64_t bytes) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t row = ids[r] - first;
    if (row >= 0 && row < table_rows)
      memcpy((char*)out + r * bytes, (const char*)table + row * bytes, (size_t)bytes);
    else
      memset((char*)out + r * bytes, 0, (size_t)bytes);
  }
}

}  // namespace dw

DW_EXPORT dw::Ranks* dw_ranks_create(void* memory, int64_t size, int64_t rank, int64_t piece, double seconds, const int32_t* sockets) {
  return dw::guarded([&] { return dw::ranks_create(memory, size, rank, piece, seconds, sockets); });
}

DW_EXPORT void dw_ranks_free(dw::Ranks* ranks) {
  dw::guarded([&] { dw::ranks_free(ranks); });
}

DW_EXPORT void dw_ranks_sum(dw::Ranks* ranks, int dtype, void* x, int64_t count) {
  dw::guarded([&] { dw::ranks_sum(ranks, (dw::DType)dtype, x, count); });
}

DW_EXPORT void dw_ranks_gather(dw::Ranks* ranks, const float* part, int64_t step, int64_t total, float* out, int64_t rows) {
  dw::guarded([&] { dw::ranks_gather(ranks, part, step, total, out, rows); });
}

DW_EXPORT void dw_ranks_share(dw::Ranks* ranks, const void* mine, int64_t bytes, void* all) {
  dw::guarded([&] { dw::ranks_share(ranks, mine, bytes, all); });
}
