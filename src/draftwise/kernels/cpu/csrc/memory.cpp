#include "memory.h"

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
  unmap_pages(slab->mapped, slab->mapped_bytes);
  delete slab;
}

}  // namespace

void* big_alloc(size_t bytes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  bytes = (bytes + 63) / 64 * 64 + 64;  // vector loads and prefetches may look past the end
  Slab* slab;
  if (bytes > kSlab / 2) {
    slab = map_slab(bytes);
  } else {
    if (g_open == nullptr || g_open->size - g_open->used < bytes) {
      Slab* fresh = map_slab(kSlab);
      if (g_open != nullptr && g_open->live == 0) unmap(g_open);
      g_open = fresh;
    }
    slab = g_open;
  }
  void* block = slab->begin + slab->used;
  try {
    owners()[block] = Block{slab, bytes};
  } catch (...) {
    if (slab != g_open) unmap(slab);
    throw;
  }
  slab->used += bytes;
  slab->live += 1;
  return block;
}

void big_free(void* block) {
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = owners().find(block);
  if (found == owners().end()) return;
  auto [slab, bytes] = found->second;
  owners().erase(found);
  if (--slab->live == 0 && slab != g_open) {
    unmap(slab);
  } else {
    forget_pages(static_cast<uint8_t*>(block), bytes);  // of a slab whose other blocks live on
  }
}

constexpr std::align_val_t kLine{64};

Scratch::~Scratch() { ::operator delete(data_, kLine); }

void* Scratch::reserve(size_t bytes) {
  if (bytes <= size_) return data_;
  ::operator delete(data_, kLine);
  data_ = nullptr;
  size_ = 0;
  size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
  data_ = ::operator new(size, kLine);
  size_ = size;
  return data_;
}

}  // namespace dw
