// The sum of a row's bytes, for the instruction sets that leave it to the compiler.
#pragma once

#include <cstdint>

namespace dw {
namespace {

int32_t sum_bytes(const int8_t* q, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += q[i];
  return sum;
}

}  // namespace
}  // namespace dw
