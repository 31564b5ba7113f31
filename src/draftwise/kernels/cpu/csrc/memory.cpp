#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace dw {
namespace {

constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kSlab = size_t(16) << 20;

struct Slab {
  uint8_t* mapped;
  size_t mapped_bytes;
  uint8_t* begin;
  size_t size;
  size_t used;
  size_t live;  // blocks not freed
};

std::mutex g_mutex;
std::map<const void*, Slab*>& owners() {  // block -> slab; never destroyed: weights may outlive static objects
  static auto* map = new std::map<const void*, Slab*>;
  return *map;
}
Slab* g_open = nullptr;  // the slab that small blocks come from

Slab* map_slab(size_t bytes) {
  size_t size = (bytes + kHuge - 1) / kHuge * kHuge, mapped = size + kHuge;
  void* raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto address = reinterpret_cast<uintptr_t>(raw);
  auto* begin = reinterpret_cast<uint8_t*>((address + kHuge - 1) / kHuge * kHuge);
#ifdef MADV_HUGEPAGE
  madvise(begin, size, MADV_HUGEPAGE);  // a wish; a refusal costs speed only
#endif
  return new Slab{static_cast<uint8_t*>(raw), mapped, begin, size, 0, 0};
}

void unmap(Slab* slab) {
  munmap(slab->mapped, slab->mapped_bytes);
  delete slab;
}

}  // namespace

void* big_alloc(size_t bytes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  bytes = (bytes + 63) / 64 * 64 + 64;  // vector loads and prefetches may look past the end
  Slab* slab;
  if (bytes > kSlab / 4) {
    slab = map_slab(bytes);
  } else {
    if (g_open == nullptr || g_open->size - g_open->used < bytes) {
      Slab* fresh = map_slab(kSlab);
      if (fresh == nullptr) return nullptr;
      if (g_open != nullptr && g_open->live == 0) unmap(g_open);
      g_open = fresh;
    }
    slab = g_open;
  }
  if (slab == nullptr) return nullptr;
  void* block = slab->begin + slab->used;
  slab->used += bytes;
  slab->live += 1;
  owners()[block] = slab;
  return block;
}

void big_free(void* block) {
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = owners().find(block);
  if (found == owners().end()) return;
  Slab* slab = found->second;
  owners().erase(found);
  if (--slab->live == 0 && slab != g_open) unmap(slab);
}

Scratch::~Scratch() { std::free(data_); }

void* Scratch::reserve(size_t bytes) {
  if (bytes <= size_) return data_;
  size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
  void* fresh = nullptr;
  if (posix_memalign(&fresh, 64, size) != 0) throw std::bad_alloc();
  std::free(data_);
  data_ = fresh;
  size_ = size;
  return data_;
}

}  // namespace dw
