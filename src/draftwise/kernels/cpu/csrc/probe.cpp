#include "probe.h"

#include <algorithm>
#include <atomic>

#include "boundary.h"
#include "isa.h"
#include "pool.h"

namespace dw {
namespace {

uint64_t read_portable(const uint8_t* from, int64_t bytes) {
  auto* words = reinterpret_cast<const uint64_t*>(from);
  uint64_t sum[8] = {};
  for (int64_t i = 0; i < bytes / 8; i += 8)
    for (int j = 0; j < 8; ++j) sum[j] += words[i + j];
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

constexpr int kLanes = 64;

int64_t float_portable(int64_t rounds) {
  float acc[kLanes], factor[kLanes];
  for (int j = 0; j < kLanes; ++j) acc[j] = float(j), factor[j] = 1.0f + float(j) * 1e-9f;
  for (int64_t i = 0; i < rounds; ++i)
    for (int j = 0; j < kLanes; ++j) acc[j] = acc[j] * factor[j] + 0.5f;
  volatile float keep = 0;
  for (int j = 0; j < kLanes; ++j) keep = keep + acc[j];
  return rounds * kLanes * 2;
}

const ProbeKernels& kernels() {
  switch (isa_current()) {
#if DW_HAVE_AMX
    case ISA_AMX: return probe_amx;
#endif
#if DW_HAVE_AVX512
    case ISA_AVX512: return probe_avx512;
#endif
#if DW_HAVE_AVX512VNNI
    case ISA_AVX512VNNI: return probe_avx512vnni;
#endif
#if DW_HAVE_AVXVNNI
    case ISA_AVXVNNI: return probe_avxvnni;
#endif
#if DW_HAVE_AVX2
    case ISA_AVX2: return probe_avx2;
#endif
#if DW_HAVE_NEON
    case ISA_NEON: return probe_neon;
#endif
#if DW_HAVE_DOTPROD
    case ISA_DOTPROD: return probe_dotprod;
#endif
#if DW_HAVE_I8MM
    case ISA_I8MM: return probe_i8mm;
#endif
    default: return probe_portable;
  }
}

struct ReadJob {
  const uint8_t* from;
  int64_t bytes;
  std::atomic<uint64_t> sum;
};

constexpr int64_t kPiece = 1 << 20;

void read_task(void* raw, int task, int) {
  auto& job = *static_cast<ReadJob*>(raw);
  int64_t begin = int64_t(task) * kPiece, end = std::min(begin + kPiece, job.bytes);
  job.sum.fetch_add(kernels().read(job.from + begin, end - begin), std::memory_order_relaxed);
}

struct PeakJob {
  int64_t (*kernel)(int64_t);
  int64_t rounds;
  std::atomic<int64_t> operations;
};

void peak_task(void* raw, int, int) {
  auto& job = *static_cast<PeakJob*>(raw);
  job.operations.fetch_add(job.kernel(job.rounds), std::memory_order_relaxed);
}

}  // namespace

extern const ProbeKernels probe_portable;
const ProbeKernels probe_portable = {read_portable, float_portable, float_portable, float_portable};

}  // namespace dw

// Reads `bytes` (rounded down to 256) with all threads of the pool, in the order in which weights are read.
DW_EXPORT uint64_t dw_probe_read(dw::Pool* pool, const void* from, int64_t bytes) {
  return dw::guarded([&] {
    dw::ReadJob job{static_cast<const uint8_t*>(from), bytes / 256 * 256, {0}};
    dw::parallel_for(pool, int((job.bytes + dw::kPiece - 1) / dw::kPiece), dw::read_task, &job);
    return job.sum.load();
  });
}

// Runs the arithmetic of a dtype (0: float32, 1: bfloat16, 2: int8) on every thread; returns the number of operations.
DW_EXPORT int64_t dw_probe_arithmetic(dw::Pool* pool, int kind, int64_t rounds) {
  return dw::guarded([&] {
    const dw::ProbeKernels& kernels = dw::kernels();
    dw::PeakJob job{kind == 0 ? kernels.f32 : kind == 1 ? kernels.bf16 : kernels.int8, rounds, {0}};
    dw::parallel_for(pool, dw::pool_threads(pool), dw::peak_task, &job);
    return job.operations.load();
  });
}
