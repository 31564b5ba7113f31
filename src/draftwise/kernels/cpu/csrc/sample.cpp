#include "sample.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "noise.h"
#include "ops.h"

namespace dw {

const SampleKernels& sample_kernels() {
  switch (isa_current()) {
#if DW_HAVE_AVX512
    case ISA_AVX512: return sample_kernels_avx512;
#endif
#if DW_HAVE_AVX2
    case ISA_AVX2: return sample_kernels_avx2;
#endif
    default: return sample_kernels_portable;
  }
}

int64_t block_of(const double* sums, int64_t blocks, double target) {
  const int64_t block = std::upper_bound(sums, sums + blocks, target) - sums;
  return std::min(block, blocks - 1);
}

int64_t within(const float* weights, int64_t count, double before, double target) {
  double running = before;
  int64_t last = -1;
  for (int64_t i = 0; i < count; i++) {
    if (!(weights[i] > 0.0f)) continue;
    running += (double)weights[i];
    last = i;
    if (running > target) return i;
  }
  return last;  // the block's own sum was larger by rounding
}

int64_t pick(const float* weights, const double* sums, int64_t n, double u) {
  const int64_t blocks = num_blocks(n);
  const double total = sums[blocks - 1];
  if (!(total > 0.0)) return -1;
  const double target = std::min(u, BELOW_ONE) * total;
  const int64_t block = block_of(sums, blocks, target), start = block * SUM_BLOCK;
  const int64_t token =
      within(weights + start, std::min(SUM_BLOCK, n - start), block > 0 ? sums[block - 1] : 0.0, target);
  return token < 0 ? -1 : start + token;
}

int64_t draw_draft(const float* logits, const ChainKey& key, int stream, int64_t step, const int64_t* target_ids,
                   float* q, int64_t vocab) {
  const SampleKernels& kernels = sample_kernels();
  const int64_t node = key.node + step;
  const uint64_t bits =
      row_key(key.seed, key.sample_index, (NoiseStream)stream, key.base + node, node, key.base);
  int64_t token;
  if (stream == SHARED_NOISE) {
    token = kernels.argmax_gumbel(logits, key.scale, -std::numeric_limits<float>::infinity(), bits, target_ids, vocab);
  } else {
    std::vector<double> sums((size_t)num_blocks(vocab));
    softmax(logits, key.scale, q, vocab);
    kernels.residual(q, 1.0f, q, 0.0f, nullptr, sums.data(), vocab);
    token = pick(q, sums.data(), vocab, uniform_of(bits));
  }
  return token < 0 ? 0 : token;  // a draft may be anything: the target decides
}

}  // namespace dw

DW_EXPORT void dw_gumbel(const uint64_t* keys, int64_t rows, const int64_t* ids, float* out, int64_t n) {
  for (int64_t r = 0; r < rows; r++) dw::sample_kernels().gumbel(keys[r], ids, out + r * n, n);
}
