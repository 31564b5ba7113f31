// Which instruction set the kernels run on. One source file per set and family: `*_avx512.cpp` and `*_avx2.cpp` are
// compiled with that set's flags, everything else for the baseline of the platform (build.py).
//
// Rule for files with their own flags: every function they define is in an anonymous namespace or has a name of its
// own (no inline functions, no templates of the standard library). The linker keeps one copy of an inline function,
// and it must not be the one that needs AVX-512.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define DW_X86 1
#else
#define DW_X86 0
#endif

#define DW_EXPORT extern "C" __attribute__((visibility("default")))

namespace dw {

// AVX2: with FMA and F16C. AVX512: F, BW, DQ, VL, VBMI with BF16 and VNNI (Zen 4, Sapphire Rapids and newer).
enum Isa : int { ISA_PORTABLE = 0, ISA_AVX2 = 1, ISA_AVX512 = 2 };

Isa isa_best();      // the best that this processor and operating system offer
Isa isa_current();   // what kernels use; isa_best() until set
bool isa_set(Isa);   // false, and no change, if the processor lacks it

}  // namespace dw
