#include "memory.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "system.h"

namespace dw {
namespace {

constexpr size_t kHuge = size_t(2) << 20;
// Blocks share slabs: one that had huge pages of its own would fill up its last one, 1 MiB of nothing on average, which in a layer
// of 4 MiB is a quarter. A slab's untouched end costs addresses and no memory.
constexpr size_t kSlab = size_t(64) << 20;
// Freed bytes wait for a block that fits there. A model is packed layer by layer in the place of what it was packed as before: the
// hole that q, k and v leave takes the three of them stacked, on the huge pages that are there. Pages given back in between would
// come again as small ones. So many bytes wait at least, and 1 / 16 of those in use.
constexpr size_t kWaiting = size_t(8) << 20;

struct Slab {
  uint8_t* mapped;
  size_t mapped_bytes;
  uint8_t* begin;
  size_t size;
  size_t used;
  size_t live;  // blocks not freed
};

std::mutex g_mutex;  // held across a fork, so that the child finds it free and what it guards whole

__attribute__((constructor)) void survive_forks() {
  around_forks([] { g_mutex.lock(); }, [] { g_mutex.unlock(); }, [] { g_mutex.unlock(); });
}

struct Block {
  Slab* slab;
  size_t bytes;
};

std::map<const void*, Block>& owners() {  // by their addresses; never destroyed: weights may outlive static objects
  static auto* map = new std::map<const void*, Block>;
  return *map;
}
Slab* g_open = nullptr;  // the slab that small blocks come from

struct Hole {
  Slab* slab;
  size_t bytes;
};
std::map<uint8_t*, Hole>& holes() {  // freed and not given back, by their addresses; no two of a slab touch
  static auto* map = new std::map<uint8_t*, Hole>;
  return *map;
}
size_t g_waiting = 0;  // bytes of the holes
size_t g_in_use = 0;   // bytes of the blocks

void give_back_holes() {
  for (auto& [begin, hole] : holes()) forget_pages(begin, hole.bytes);
  holes().clear();
  g_waiting = 0;
}

// Example: blocks A B C stand side by side; when A and C are holes, the end of B joins the three.
void add_hole(Slab* slab, uint8_t* begin, size_t bytes) {
  auto& all = holes();
  auto behind = all.lower_bound(begin);
  g_waiting += bytes;
  if (behind != all.end() && behind->second.slab == slab && begin + bytes == behind->first) {
    bytes += behind->second.bytes;
    behind = all.erase(behind);
  }
  if (behind != all.begin()) {
    auto before = std::prev(behind);
    if (before->second.slab == slab && before->first + before->second.bytes == begin) {
      before->second.bytes += bytes;
      return;
    }
  }
  all.emplace_hint(behind, begin, Hole{slab, bytes});
}

void drop_holes(const Slab* slab) {
  for (auto at = holes().begin(); at != holes().end();) {
    if (at->second.slab != slab) {
      ++at;
      continue;
    }
    g_waiting -= at->second.bytes;
    at = holes().erase(at);
  }
}

// The smallest hole that is large enough, cut to size and zeroed; null: there is none.
uint8_t* take_hole(size_t bytes, Slab*& slab) {
  auto& all = holes();
  auto best = all.end();
  for (auto at = all.begin(); at != all.end(); ++at) {
    if (at->second.bytes >= bytes && (best == all.end() || at->second.bytes < best->second.bytes)) best = at;
  }
  if (best == all.end()) return nullptr;
  auto [begin, hole] = *best;
  if (hole.bytes > bytes) all.emplace_hint(std::next(best), begin + bytes, Hole{hole.slab, hole.bytes - bytes});
  all.erase(best);
  g_waiting -= bytes;
  slab = hole.slab;
  std::memset(begin, 0, bytes);
  return begin;
}

Slab* map_slab(size_t bytes) {
  size_t size = (bytes + kHuge - 1) / kHuge * kHuge, mapped = size + kHuge;
  auto slab = std::make_unique<Slab>();
  void* raw = map_pages(mapped);
  if (raw == nullptr) throw std::bad_alloc();
  auto address = reinterpret_cast<uintptr_t>(raw);
  auto* begin = reinterpret_cast<uint8_t*>((address + kHuge - 1) / kHuge * kHuge);
  wish_huge_pages(begin, size);
  *slab = Slab{static_cast<uint8_t*>(raw), mapped, begin, size, 0, 0};
  return slab.release();
}

void unmap(Slab* slab) {
  drop_holes(slab);
  unmap_pages(slab->mapped, slab->mapped_bytes);
  delete slab;
}

}  // namespace

void* big_alloc(size_t bytes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  bytes = (bytes + 63) / 64 * 64 + 64;  // vector loads and prefetches may look past the end
  Slab* slab = nullptr;
  uint8_t* block = take_hole(bytes, slab);
  if (block != nullptr) {
    // as it is
  } else if (bytes > kSlab / 2) {
    slab = map_slab(bytes);
  } else {
    if (g_open == nullptr || g_open->size - g_open->used < bytes) {
      Slab* fresh = map_slab(kSlab);
      if (g_open != nullptr && g_open->live == 0) unmap(g_open);
      g_open = fresh;
    }
    slab = g_open;
  }
  bool fresh = block == nullptr;
  if (fresh) block = slab->begin + slab->used;
  try {
    owners()[block] = Block{slab, bytes};
  } catch (...) {
    if (slab->live == 0 && slab != g_open) unmap(slab);
    throw;
  }
  if (fresh) slab->used += bytes;
  slab->live += 1;
  g_in_use += bytes;
  return block;
}

void big_free(void* block) {
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = owners().find(block);
  if (found == owners().end()) return;
  auto [slab, bytes] = found->second;
  owners().erase(found);
  g_in_use -= bytes;
  if (--slab->live == 0 && slab != g_open) {
    unmap(slab);
  } else {  // other blocks of the slab live on
    add_hole(slab, static_cast<uint8_t*>(block), bytes);
    if (g_waiting > std::max(kWaiting, g_in_use / 16)) give_back_holes();
  }
}

void big_release() {
  std::lock_guard<std::mutex> lock(g_mutex);
  give_back_holes();
}

namespace {
// Large ones lie on huge pages: packed rows of a long prompt are read once for each panel, and would not be found by small ones' addresses
// without a walk through tables each time.
std::align_val_t alignment_of(size_t bytes) { return std::align_val_t{bytes >= 2 * kHuge ? kHuge : 64}; }
}  // namespace

Scratch::~Scratch() { ::operator delete(data_, alignment_of(size_)); }

void* Scratch::reserve(size_t bytes) {
  if (bytes <= size_) return data_;
  ::operator delete(data_, alignment_of(size_));
  data_ = nullptr;
  size_ = 0;
  size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
  data_ = ::operator new(size, alignment_of(size));
  if (size >= 2 * kHuge) wish_huge_pages(data_, size / kHuge * kHuge);
  size_ = size;
  return data_;
}

}  // namespace dw
