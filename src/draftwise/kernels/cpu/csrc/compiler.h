// What GCC (11 and later) and Clang (14 and later) spell in different ways, and what libraries of different systems want.
#pragma once

// Before a function that Python calls.
#if defined(_WIN32)
#define DW_EXPORT extern "C" __declspec(dllexport)
#else
#define DW_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The lanes of two vectors, numbered through, in another order. `a` and `b` are of one type, and so is the result.
// Example: DW_SHUFFLE(a, b, 0, 4, 1, 5) of vectors of four lanes is a[0], b[0], a[1], b[1].
#if __has_builtin(__builtin_shufflevector)
#define DW_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC 11; a comparison has lanes of integers as wide as those that it compares
#define DW_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype((a) == (b)){__VA_ARGS__})
#endif

// Before a loop of a constant number of turns: what is indexed with its counter then stands in registers, not in memory.
#if defined(__clang__)
#define DW_UNROLLED _Pragma("clang loop unroll(full)")
#else
#define DW_UNROLLED _Pragma("GCC unroll 16")
#endif
