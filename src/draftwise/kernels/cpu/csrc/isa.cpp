#include "isa.h"

#include <atomic>

#include "boundary.h"

namespace dw {
namespace {
std::atomic<int> g_isa{-1};
}

Isa isa_best() {
#if DW_X86
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
                __builtin_cpu_supports("avx512bf16");
  return avx512 ? ISA_AVX512 : avx2 ? ISA_AVX2 : ISA_PORTABLE;
#else
  return ISA_PORTABLE;
#endif
}

Isa isa_current() {
  int isa = g_isa.load(std::memory_order_relaxed);
  if (isa < 0) g_isa.store(isa = isa_best(), std::memory_order_relaxed);
  return Isa(isa);
}

bool isa_set(Isa isa) {
  if (isa < ISA_PORTABLE || isa > isa_best()) return false;
  g_isa.store(isa, std::memory_order_relaxed);
  return true;
}

}  // namespace dw

DW_EXPORT int dw_isa_best() {
  return dw::guarded([] { return int(dw::isa_best()); });
}
DW_EXPORT int dw_isa_current() {
  return dw::guarded([] { return int(dw::isa_current()); });
}
DW_EXPORT int dw_isa_set(int isa) {
  return dw::guarded([&] { return dw::isa_set(dw::Isa(isa)) ? 1 : 0; });
}
