// Memory for weights (huge pages, aligned to 64 bytes) and for scratch that grows and stays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dw {

// Zeroed, aligned to 64 bytes. Blocks share slabs, so that small ones too lie on huge pages, and large ones fill none up. Throws
// std::bad_alloc.
void* big_alloc(size_t bytes);
void big_free(void*);
// Some of what was freed waits for blocks that fit in its places: gives that back to the system now.
void big_release();

// A buffer that only grows; its content is lost when it does. Aligned to 64 bytes.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();
  void* reserve(size_t bytes);  // throws std::bad_alloc, and holds nothing then

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace dw
