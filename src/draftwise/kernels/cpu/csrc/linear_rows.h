// Rows as linear kernels want them: cut into tiles, quantised or widened where the format asks for it, and packed.
#pragma once

#include <algorithm>
#include <cstring>

#include "compiler.h"
#include "linear_weights.h"
#include "memory.h"

namespace dw {
namespace {

// Rows are cut into tiles of nearly equal height: 9 rows in tiles of at most 8 are 5 + 4.
struct Tiles {
  int count;
  int64_t rows;
  Tiles(int64_t rows, int limit) : count(int((rows + limit - 1) / limit)), rows(rows) {}
  int64_t begin(int tile) const { return rows * tile / count; }
  int64_t tallest() const { return (rows + count - 1) / count; }
};

// Chunks of a group; not grouped: of a row.
int64_t group_chunks(const Linear& w) {
  return (w.group_units * steps_per_unit(w.format) + kChunkDwords - 1) / kChunkDwords;
}
// In which chunk unit u begins, where one does. Example: groups of 12 units of one step; unit 24 begins group 2, and chunk 2.
int64_t chunk_at(const Linear& w, int64_t u) {
  return is_grouped(w.format) ? u / w.group_units * group_chunks(w) : u * steps_per_unit(w.format) / kChunkDwords;
}

// Dwords of a packed row, or the room for them if some tiles have wide rows.
int64_t row_steps(const LinearKernels& kernels, const Linear& w) {
  if (kernels.in_chunks[w.format]) return w.groups() * group_chunks(w) * kChunkDwords;
  return w.steps() * (kernels.wide_from[w.format] != 0 ? 2 : 1);
}

// Rows as kernels want them, in one buffer: per tile [steps][R] dwords (wide: [steps][2][R]; in chunks: [chunks][R][16]), then per tile sums of the rows' values
// [groups][R], then the rows' scales [rows].
struct PackedRows {
  uint32_t* steps;
  uint32_t* sums;    // int32, or float32 for W_I4
  float* scale;

  PackedRows(void* buffer, const LinearKernels& kernels, const Linear& w, int64_t rows)
      : steps(static_cast<uint32_t*>(buffer)), sums(steps + rows * row_steps(kernels, w)),
        scale(reinterpret_cast<float*>(sums + rows * w.groups())) {}
  static size_t bytes(const LinearKernels& kernels, const Linear& w, int64_t rows) {
    return size_t(rows * (row_steps(kernels, w) + w.groups() + 1)) * 4;
  }
};

// One row's dwords into column r of a tile of `height` rows; what is missing to `steps` is zero.
void scatter(const uint8_t* row, int64_t bytes, int64_t steps, int64_t height, uint32_t* packed) {
  int64_t whole = bytes / 4;
  for (int64_t u = 0; u < whole; ++u) std::memcpy(&packed[u * height], row + u * 4, 4);
  for (int64_t u = whole; u < steps; ++u) {
    uint32_t last = 0;
    if (u == whole) std::memcpy(&last, row + whole * 4, size_t(bytes - whole * 4));
    packed[u * height] = last;
  }
}

typedef uint32_t Four __attribute__((vector_size(16)));

inline Four load_four(const uint8_t* from) {
  Four v;
  std::memcpy(&v, from, 16);
  return v;
}

// As `scatter`, every pair of bfloat16 as two float32: dword u goes to places 2 u (the lower half) and 2 u + 1 of its column.
void scatter_wide(const uint8_t* row, int64_t bytes, int64_t steps, int64_t height, uint32_t* packed) {
  for (int64_t u = 0; u < steps; ++u) {
    uint32_t pair = 0;
    if (u * 4 < bytes) std::memcpy(&pair, row + u * 4, size_t(std::min<int64_t>(4, bytes - u * 4)));
    packed[2 * u * height] = pair << 16;
    packed[(2 * u + 1) * height] = pair & 0xffff0000u;
  }
}

// As `scatter` (or `scatter_wide`) of kCount rows, for columns r .. r + kCount - 1: blocks of four by four are transposed in registers.
template <bool kWide, int kCount>
void scatter_rows(const uint8_t* const (&rows)[4], int64_t bytes, int64_t steps, int64_t height, uint32_t* packed) {
  constexpr size_t kStored = kCount * sizeof(uint32_t);
  int64_t blocks = bytes / 16;
  for (int64_t b = 0; b < blocks; ++b) {
    Four r[4];
    for (int i = 0; i < 4; ++i) r[i] = load_four(rows[i < kCount ? i : 0] + b * 16);
    Four low01 = DW_SHUFFLE(r[0], r[1], 0, 4, 1, 5), high01 = DW_SHUFFLE(r[0], r[1], 2, 6, 3, 7);
    Four low23 = DW_SHUFFLE(r[2], r[3], 0, 4, 1, 5), high23 = DW_SHUFFLE(r[2], r[3], 2, 6, 3, 7);
    Four columns[4] = {DW_SHUFFLE(low01, low23, 0, 1, 4, 5), DW_SHUFFLE(low01, low23, 2, 3, 6, 7),
                       DW_SHUFFLE(high01, high23, 0, 1, 4, 5),
                       DW_SHUFFLE(high01, high23, 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i) {
      if (kWide) {
        Four even = columns[i] << 16, odd = columns[i] & 0xffff0000u;
        std::memcpy(&packed[2 * (b * 4 + i) * height], &even, kStored);
        std::memcpy(&packed[(2 * (b * 4 + i) + 1) * height], &odd, kStored);
      } else {
        std::memcpy(&packed[(b * 4 + i) * height], &columns[i], kStored);
      }
    }
  }
  constexpr int kDwords = kWide ? 2 : 1;
  for (int i = 0; i < kCount; ++i)
    (kWide ? scatter_wide : scatter)(rows[i] + blocks * 16, bytes - blocks * 16, steps - blocks * 4, height,
                                     packed + blocks * 4 * kDwords * height + i);
}

template <bool kWide>
void scatter_some(int count, const uint8_t* const (&rows)[4], int64_t bytes, int64_t steps, int64_t height, uint32_t* packed) {
  constexpr decltype(&scatter_rows<kWide, 1>) kBy[] = {scatter_rows<kWide, 1>, scatter_rows<kWide, 2>, scatter_rows<kWide, 3>, scatter_rows<kWide, 4>};
  kBy[count - 1](rows, bytes, steps, height, packed);
}

// One row's dwords into row r of the chunks of a tile.
void scatter_chunks(const Linear& w, const uint8_t* row, int64_t bytes, int64_t height, uint32_t* packed) {
  constexpr int64_t kBytes = kChunkDwords * 4;
  const int64_t chunks = group_chunks(w), group = int64_t(w.group_units) * steps_per_unit(w.format) * 4;
  for (int64_t g = 0; g < w.groups(); ++g) {
    const uint8_t* from = row + g * group;
    int64_t left = std::max<int64_t>(std::min(group, bytes - g * group), 0);
    for (int64_t c = 0; c < chunks; ++c, left -= kBytes, from += kBytes, packed += height * kChunkDwords) {
      if (left >= kBytes) {
        std::memcpy(packed, from, kBytes);
        continue;
      }
      std::memset(packed, 0, kBytes);
      if (left > 0) std::memcpy(packed, from, size_t(left));
    }
  }
}

float sum_bf16(const uint8_t* values, int64_t count) {
  float sums[8] = {};
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, values + i * 2, 2);
    uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    sums[i % 8] += value;
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

thread_local Scratch t_quantized;

// The sums of a row's values by group (integers times what takes the offset of the weights off), at `sums` with the stride of a tile.
void sum_groups(const LinearKernels& kernels, const Linear& w, const uint8_t* values, int64_t height, uint32_t* sums) {
  int64_t group = int64_t(w.group_units) * k_per_unit(w.format);
  for (int64_t g = 0; g < w.groups(); ++g) {
    int64_t begin = g * group, count = std::min(group, w.inputs - begin);
    if (w.format == W_I4) {
      float sum = w.zeros ? sum_bf16(values + begin * 2, count) : 0.0f;
      std::memcpy(&sums[g * height], &sum, 4);
    } else {
      const int32_t sum = kernels.sum(reinterpret_cast<const int8_t*>(values) + begin, count);
      sums[g * height] = uint32_t(sum * -w.integers_offset());
    }
  }
}

void pack_tile(const LinearCall& c, const LinearKernels& kernels, int64_t begin, int64_t end, const PackedRows& packed) {
  const Linear& w = *c.weights;
  const int64_t height = end - begin, room = row_steps(kernels, w), element = element_bytes(w.input);
  const bool wide = has_wide_rows(kernels, w.format, height);
  const int64_t steps = w.steps();
  const bool dynamic = is_dynamic(w.format);
  const int64_t bytes = w.inputs * (dynamic ? 1 : element);
  auto* q = dynamic ? static_cast<int8_t*>(t_quantized.reserve(size_t(4 * w.inputs))) : nullptr;
  for (int64_t first = 0; first < height; first += 4) {
    const uint8_t* rows[4] = {};
    const int count = int(std::min<int64_t>(4, height - first));
    for (int i = 0; i < count; ++i) {
      int64_t r = first + i;
      rows[i] = static_cast<const uint8_t*>(c.x) + (begin + r) * c.ldx * element;
      if (dynamic) {
        packed.scale[begin + r] = kernels.quantize(rows[i], w.input, w.inputs, q + i * w.inputs);
        rows[i] = reinterpret_cast<const uint8_t*>(q + i * w.inputs);
      }
      if (dynamic || is_grouped(w.format)) sum_groups(kernels, w, rows[i], height, packed.sums + begin * w.groups() + r);
    }
    if (kernels.in_chunks[w.format]) {
      for (int i = 0; i < count; ++i)
        scatter_chunks(w, rows[i], bytes, height, packed.steps + begin * room + (first + i) * kChunkDwords);
      continue;
    }
    (wide ? scatter_some<true> : scatter_some<false>)(count, rows, bytes, steps, height, packed.steps + begin * room + first);
  }
}

}  // namespace
}  // namespace dw
