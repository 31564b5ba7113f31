#include "isa.h"

#include <atomic>

#include "boundary.h"

#if DW_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif DW_ARM
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

// Whether somebody else carries out the tile instructions that the processor refuses (scripts/trap_tiles).
#ifndef DW_TILES_TRAPPED
#define DW_TILES_TRAPPED 0
#endif

namespace dw {
namespace {

std::atomic<int> g_isa{-1};

#if DW_X86

// Whether the operating system lets this process use tiles: it keeps them for who has asked.
bool tiles_granted() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
#else
  return false;
#endif
}

// What the processor has and the operating system keeps for every thread. Asked of the processor itself: compilers differ in
// the names that their own question knows.
struct Features {
  bool avx2 = false, avxvnni = false, avx512vnni = false, avx512 = false, amx = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c >> 12 & 1, os = c >> 27 & 1, f16c = c >> 29 & 1;
    if (!os) return;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const bool ymm = (low & 0x6) == 0x6, zmm = (low & 0xe6) == 0xe6;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned leaves = a;
    avx2 = ymm && fma && f16c && (b >> 5 & 1);
    const bool base = avx2 && zmm && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);  // F, DQ, BW, VL
    avx512vnni = base && (c >> 11 & 1);
    const bool vbmi = c >> 1 & 1, tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // BF16, TILE, INT8
    if (leaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    avxvnni = avx2 && (a >> 4 & 1);
    avx512 = avx512vnni && vbmi && (a >> 5 & 1);  // BF16
    amx = avx512 && (DW_TILES_TRAPPED || (tiles && (low & 0x60000) == 0x60000 && tiles_granted()));
  }
};

#elif DW_ARM

#if defined(__APPLE__)
// Written after Apple's documentation, not tried.
bool system_says(const char* name) {
  int64_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

// What the operating system says that the processor has. Where nobody knows how to ask, nothing but NEON.
struct Features {
  bool dotprod = false, i8mm = false;

  Features() {
#if defined(__linux__)
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    dotprod = first >> 20 & 1;                                    // HWCAP_ASIMDDP
    i8mm = dotprod && (second >> 13 & 1) && (second >> 14 & 1);  // HWCAP2_I8MM, HWCAP2_BF16
#elif defined(__APPLE__)
    dotprod = system_says("hw.optional.arm.FEAT_DotProd");
    i8mm = dotprod && system_says("hw.optional.arm.FEAT_I8MM") && system_says("hw.optional.arm.FEAT_BF16");
#endif
  }
};

#endif

#if DW_X86 || DW_ARM
const Features& features() {
  static const Features found;
  return found;
}
#endif

}  // namespace

bool isa_supported(Isa isa) {
  switch (isa) {
    case ISA_PORTABLE: return true;
#if DW_HAVE_AVX2
    case ISA_AVX2: return features().avx2;
#endif
#if DW_HAVE_AVXVNNI
    case ISA_AVXVNNI: return features().avxvnni;
#endif
#if DW_HAVE_AVX512VNNI
    case ISA_AVX512VNNI: return features().avx512vnni;
#endif
#if DW_HAVE_AVX512
    case ISA_AVX512: return features().avx512;
#endif
#if DW_HAVE_AMX
    case ISA_AMX: return features().amx;
#endif
#if DW_HAVE_EMULATED
    case ISA_EMULATED: return true;
#endif
#if DW_HAVE_NEON
    case ISA_NEON: return true;
#endif
#if DW_HAVE_DOTPROD
    case ISA_DOTPROD: return features().dotprod;
#endif
#if DW_HAVE_I8MM
    case ISA_I8MM: return features().i8mm;
#endif
    default: return false;
  }
}

Isa isa_best() {
  for (int isa = ISA_I8MM; isa > ISA_PORTABLE; --isa)
    if (isa_supported(Isa(isa))) return Isa(isa);
  return ISA_PORTABLE;
}

Isa isa_current() {
  int isa = g_isa.load(std::memory_order_relaxed);
  if (isa < 0) g_isa.store(isa = isa_best(), std::memory_order_relaxed);
  return Isa(isa);
}

Isa isa_of_vectors() {
  switch (Isa isa = isa_current()) {
    case ISA_AVXVNNI: return ISA_AVX2;
    case ISA_AMX: return ISA_AVX512;
    case ISA_NEON:  // part of ARM's baseline: the portable copy uses it
    case ISA_DOTPROD:
    case ISA_I8MM:
    case ISA_EMULATED: return ISA_PORTABLE;
    default: return isa;
  }
}

bool isa_set(Isa isa) {
  if (!isa_supported(isa)) return false;
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
DW_EXPORT int dw_isa_supported(int isa) {
  return dw::guarded([&] { return dw::isa_supported(dw::Isa(isa)) ? 1 : 0; });
}
DW_EXPORT int dw_isa_set(int isa) {
  return dw::guarded([&] { return dw::isa_set(dw::Isa(isa)) ? 1 : 0; });
}
