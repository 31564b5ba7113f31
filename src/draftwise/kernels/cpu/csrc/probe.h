// What the machine can do, measured with loops that do nothing else: the rooflines of `draftwise bench kernels`.
#pragma once

#include <cstdint>

namespace dw {

struct ProbeKernels {
  uint64_t (*read)(const uint8_t* from, int64_t bytes);  // reads it all, returns a sum of it; bytes % 256 == 0
  // Run one arithmetic instruction as fast as it goes, on registers; each returns operations done (a product with a sum is two).
  int64_t (*f32)(int64_t rounds);
  int64_t (*bf16)(int64_t rounds);
  int64_t (*int8)(int64_t rounds);
};

extern const ProbeKernels probe_portable;
#if DW_HAVE_AMX
extern const ProbeKernels probe_amx;
#endif
#if DW_HAVE_AVX512
extern const ProbeKernels probe_avx512;
#endif
#if DW_HAVE_AVX512VNNI
extern const ProbeKernels probe_avx512vnni;
#endif
#if DW_HAVE_AVXVNNI
extern const ProbeKernels probe_avxvnni;
#endif
#if DW_HAVE_AVX2
extern const ProbeKernels probe_avx2;
#endif
#if DW_HAVE_NEON
extern const ProbeKernels probe_neon;
#endif
#if DW_HAVE_DOTPROD
extern const ProbeKernels probe_dotprod;
#endif
#if DW_HAVE_I8MM
extern const ProbeKernels probe_i8mm;
#endif

}  // namespace dw
