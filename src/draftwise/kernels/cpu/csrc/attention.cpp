#include "attention.h"

#include "attention_plan.h"
#include "boundary.h"

namespace dw {
namespace {

constexpr int64_t SERIAL = 1 << 16;  // products of a pass below which one thread does it alone

}  // namespace

const AttentionKernels& attention_kernels(DType rows, int kv_dtype) {
  if (rows == BF16 && kv_dtype == BF16) {
#if DW_HAVE_EMULATED
    if (isa_current() == ISA_EMULATED) return attention_kernels_emulated;
#endif
#if DW_HAVE_AMX
    if (isa_current() == ISA_AMX) return attention_kernels_amx;
#endif
  }
  const int i = rows == BF16 ? 1 : 0;
  switch (isa_of_vectors()) {
#if DW_HAVE_AVX512
    case ISA_AVX512: return attention_kernels_avx512[i][kv_dtype];
#endif
#if DW_HAVE_AVX512VNNI
    case ISA_AVX512VNNI: return attention_kernels_avx512vnni[i][kv_dtype];
#endif
#if DW_HAVE_AVX2
    case ISA_AVX2: return attention_kernels_avx2[i][kv_dtype];
#endif
    default: return attention_kernels_portable[i][kv_dtype];
  }
}

void attention(Pool* pool, DType dtype, const AttentionCall* call, const BatchView* batch) {
  AttentionRun run = attention_plan(dtype, call, batch, pool_threads(pool), ATTENTION_TASKS, SERIAL);
  Pool* workers = run.one_thread ? nullptr : pool;
  for (int phase = 0; phase < 2; phase++) {
    struct Phase {
      const AttentionRun* run;
      int number;
    } work{&run, phase};
    parallel_for(
        workers, run.tasks[phase],
        [](void* arg, int task, int) { attention_task(((Phase*)arg)->run, ((Phase*)arg)->number, task); }, &work);
  }
}

}  // namespace dw

DW_EXPORT void dw_attention(dw::Pool* pool, int dtype, const dw::AttentionCall* call, const dw::BatchView* batch) {
  dw::guarded([&] { dw::attention(pool, (dw::DType)dtype, call, batch); });
}
