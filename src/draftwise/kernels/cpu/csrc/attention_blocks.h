// Which partitions of attention are merged with which. Block (level, index) is partitions [index << level, (index + 1) << level);
// it is made of blocks (level - 1, 2 index) and (level - 1, 2 index + 1), wherever a tile, a window or a piece begins: merging with
// what nobody sees changes nothing. A row's result is the block that holds all of its partitions.
//
// Example: partitions 3 .. 8, nothing before them is seen:
//   3 alone is (0, 3), and, as there is nothing before it, also (1, 1) and (2, 0);
//   4 and 5 make (1, 2), 6 and 7 make (1, 3), these make (2, 1), and with (2, 0) that makes (3, 0);  8 is (0, 8);
//   at the end, (3, 0) and what there is of (3, 1) are merged.
// A piece that begins at 3 but is not the item's first keeps (0, 3) until the pieces are put together: it leaves (0, 3), (2, 1), (0, 8).
#pragma once

#include <cstdint>

namespace dw {
namespace {

constexpr int MAX_BLOCKS = 64;  // on a stack; partitions are fewer than 2^23

// Blocks on a stack, each left of the next one.
struct BlockStack {
  bool from_start;  // nothing is seen before the first block
  int depth = 0;
  int32_t level[MAX_BLOCKS] = {}, index[MAX_BLOCKS] = {};

  explicit BlockStack(bool start) : from_start(start) {}

  // Puts a block on top; calls merge(i), entry i + 1 into entry i, for those that become one.
  template <class Merge>
  inline __attribute__((always_inline)) void push(int new_level, int new_index, const Merge& merge) {
    int at = depth;
    while (new_index % 2 == 1) {
      if (at > 0 && level[at - 1] == new_level && index[at - 1] == new_index - 1) {
        merge(--at);
      } else if (at > 0 || !from_start) {
        break;
      }
      new_level++;
      new_index /= 2;
    }
    level[at] = new_level;
    index[at] = new_index;
    depth = at + 1;
  }

  // The blocks that partitions [begin, end) leave.
  inline __attribute__((always_inline)) void push_all(int begin, int end) {
    for (int part = begin; part < end; part++) push(0, part, [](int) {});
  }
};

// More than the entries of any stack over `partitions` partitions, the one that is being computed included.
inline __attribute__((always_inline)) int most_blocks(int partitions) {
  int bits = 0;
  for (; partitions > 0; partitions /= 2) bits++;
  return 2 * bits;
}

}  // namespace
}  // namespace dw
