#include "sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "boundary.h"
#include "noise.h"
#include "ops.h"

namespace dw {

const SampleKernels& sample_kernels() {
  switch (isa_of_vectors()) {
#if DW_HAVE_AVX512
    case ISA_AVX512: return sample_kernels_avx512;
#endif
#if DW_HAVE_AVX512VNNI
    case ISA_AVX512VNNI: return sample_kernels_avx512vnni;
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

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();

}  // namespace

float Floor::find(const float* x, float top, const Shape& shape, int64_t n) {
  float floor = NONE;
  if (shape.log_min_p > NONE) floor = top + shape.log_min_p / shape.scale;
  if ((shape.top_k > 0 || shape.top_p < 1.0) && std::isfinite(top)) floor = of_head(x, top, floor, shape, n);
  return floor;
}

// Of the largest top_k, the head that holds top_p of their weight.
float Floor::of_head(const float* x, float top, float floor, const Shape& shape, int64_t n) {
  const SampleKernels& kernels = sample_kernels();
  const bool by_weight = shape.top_k == 0;
  sums_.resize((size_t)num_blocks(n));
  double all = 0.0;
  if (by_weight) all = kernels.weights(x, top, shape.scale, floor, nullptr, sums_.data(), n);
  head_.resize((size_t)n);
  // Tokens within a factor exp(width) of the best one, more and more of them: mostly the first try has the head.
  for (float width = 4.0f;; width *= 2.0f) {
    const float reach = top - width / shape.scale;
    const bool whole = !(reach > floor) || width > 1e6f;
    const float limit = whole ? std::max(floor, -std::numeric_limits<float>::max()) : reach;
    int64_t count = kernels.collect(x, limit, head_.data(), n);
    const bool last_try = whole || count == n;
    if (!by_weight && count < shape.top_k && !last_try) continue;
    float* end = head_.data() + count;
    if (!by_weight && count > shape.top_k) {
      std::nth_element(head_.data(), head_.data() + shape.top_k - 1, end, std::greater<float>());
      end = head_.data() + shape.top_k;
      count = shape.top_k;
    }
    if (shape.top_p >= 1.0) return std::max(floor, *std::min_element(head_.data(), end));
    weights_.resize((size_t)n);
    auto weigh = [&] {
      return kernels.weights(head_.data(), top, shape.scale, NONE, weights_.data(), sums_.data(), count);
    };
    if (by_weight && !last_try && weigh() < shape.top_p * all) continue;
    std::sort(head_.data(), end, std::greater<float>());
    const double limit_weight = shape.top_p * (by_weight ? (weigh(), all) : weigh());
    double running = 0.0;
    for (int64_t i = 0; i < count; i++) {
      running += (double)weights_[(size_t)i];
      if (running >= limit_weight) return head_[(size_t)i];
    }
    if (last_try || !by_weight) return head_[(size_t)count - 1];
  }
}

int64_t draw_draft(const float* logits, const ChainKey& key, int stream, int64_t step, const int64_t* target_ids,
                   float* q, int64_t vocab) {
  const SampleKernels& kernels = sample_kernels();
  const int64_t node = key.node + step;
  const uint64_t bits =
      row_key(key.seed, key.sample_index, (NoiseStream)stream, key.base + node, node, key.base);
  const Shape shape{key.top_p, key.scale, key.log_min_p, key.top_k};
  float top = 0.0f, floor = NONE;
  if (shape.cuts()) {
    top = kernels.max(logits, vocab);
    floor = Floor().find(logits, top, shape, vocab);
  }
  int64_t token;
  if (stream == SHARED_NOISE) {
    token = kernels.argmax_gumbel(logits, key.scale, floor, bits, target_ids, vocab);
  } else {
    std::vector<double> sums((size_t)num_blocks(vocab));
    if (shape.cuts()) {
      const double total = kernels.weights(logits, top, key.scale, floor, q, sums.data(), vocab);
      kernels.residual(q, (float)(1.0 / total), q, 0.0f, q, sums.data(), vocab);
    } else {
      softmax(logits, key.scale, q, vocab);
      kernels.residual(q, 1.0f, q, 0.0f, nullptr, sums.data(), vocab);
    }
    token = pick(q, sums.data(), vocab, uniform_of(bits));
  }
  return token < 0 ? 0 : token;  // a draft may be anything: the target decides
}

}  // namespace dw

DW_EXPORT void dw_gumbel(const uint64_t* keys, int64_t rows, const int64_t* ids, float* out, int64_t n) {
  dw::guarded([&] {
    for (int64_t r = 0; r < rows; r++) dw::sample_kernels().gumbel(keys[r], ids, out + r * n, n);
  });
}
