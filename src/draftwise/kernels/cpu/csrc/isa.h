// Which instruction set the kernels run on. One source file per set and family: `*_avx512.cpp`, `*_avx2.cpp` and so on are
// compiled with that set's flags, everything else for the baseline of the platform (build.py).
//
// Rule for files with their own flags: every function they define is in an anonymous namespace or has a name of its
// own (no inline functions, no templates of the standard library). The linker keeps one copy of an inline function,
// and it must not be the one that needs AVX-512.
#pragma once

#include <cstdint>

#include "compiler.h"

#if defined(__x86_64__) || defined(_M_X64)
#define DW_X86 1
#else
#define DW_X86 0
#endif

#if defined(__aarch64__) || defined(_M_ARM64)
#define DW_ARM 1
#else
#define DW_ARM 0
#endif

namespace dw {

enum Isa : int {
  ISA_PORTABLE = 0,
  ISA_AVX2 = 1,        // with FMA and F16C
  ISA_AVXVNNI = 2,     // AVX2 and the byte products of AVX-VNNI (Intel's client processors from Alder Lake on)
  ISA_AVX512VNNI = 3,  // AVX-512 F, BW, DQ, VL and VNNI (Cascade Lake, Ice Lake)
  ISA_AVX512 = 4,      // with BF16 and VBMI besides (Zen 4, Sapphire Rapids and newer)
  ISA_AMX = 5,         // tiles of bfloat16 and int8 besides (Sapphire Rapids and newer)
  ISA_NEON = 6,        // what every ARM processor of 64 bits has
  ISA_DOTPROD = 7,     // and products of four bytes (FEAT_DotProd; Cortex-A76, Neoverse N1 and newer)
  ISA_I8MM = 8,        // and products of small matrices of bytes, and of pairs of bfloat16 (FEAT_I8MM, FEAT_BF16; Neoverse V1, N2)
  ISA_EMULATED = 9,    // the kernels of AMX on tiles that are computed, the others portable: for tests, on any x86 machine
};

Isa isa_best();            // the best that this processor and operating system offer
Isa isa_current();         // what kernels use; isa_best() until set
bool isa_supported(Isa);   // by the processor, the operating system and the compiler that made this library
bool isa_set(Isa);         // false, and no change, if it is not supported

// Of the families of kernels that do nothing with bytes: the set whose copy serves the current one.
Isa isa_of_vectors();

}  // namespace dw
