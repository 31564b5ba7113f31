// A unit of tiles in software: loaded in front of a program (LD_PRELOAD), it carries out the tile instructions that a processor without
// the unit refuses. So the machine code of level `amx` runs on any processor with AVX-512 (scripts/trap_tiles): its assembly, its
// operands, its configuration. Slow, and written from Intel's manual alone, apart from csrc/tiles.h, so that one checks the other.
//
// An instruction is C4 [not R, not X, not B, map 2] [W, not vvvv, L, pp] opcode ModRM [SIB] [displacement]:
//   49 pp 0  memory: ldtilecfg; register: tilerelease     4B pp 1, 3  tileloadd      5C pp 2  tdpbf16ps
//   49 pp 3  tilezero                                     4B pp 2     tilestored     5E pp 2  tdpbsud, pp 3  tdpbssd
#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kTiles = 8, kRows = 16, kBytes = 64;

struct Unit {
  bool configured = false;
  int rows[kTiles], bytes[kTiles];
  uint8_t data[kTiles][kRows][kBytes];
};
thread_local Unit unit;

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "tile unit: %s\n", what);
  abort();
}

void need(bool holds, const char* what) {
  if (!holds) fail(what);
}
void need_tile(int t) { need(unit.configured && unit.rows[t] > 0 && unit.bytes[t] > 0, "a tile without rows"); }

void configure(const uint8_t* from) {
  need(from[0] == 1 && from[1] == 0, "palette 1 from row 0");
  for (int i = 2; i < 16; ++i) need(from[i] == 0, "zeros where nothing is said");
  for (int t = 0; t < 16; ++t) {
    uint16_t bytes;
    memcpy(&bytes, from + 16 + 2 * t, 2);
    const int rows = from[48 + t];
    need(t < kTiles ? bytes <= kBytes && rows <= kRows && (bytes == 0) == (rows == 0) : bytes == 0 && rows == 0,
         "sizes that there are");
    if (t < kTiles) unit.rows[t] = rows, unit.bytes[t] = bytes;
  }
  unit.configured = true;
  memset(unit.data, 0, sizeof unit.data);
}

template <class T>
T at(int t, int row, int byte) {
  T value;
  memcpy(&value, &unit.data[t][row][byte], sizeof value);
  return value;
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
float half(int t, int row, int byte) {
  const uint32_t bits = uint32_t(at<uint16_t>(t, row, byte)) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

float dot_halves(float total, int a, int m, int b, int n) {
  float even = 0, odd = 0;
  for (int k = 0; k < unit.bytes[a] / 4; ++k) {
    even = flushed(std::fma(half(a, m, 4 * k), half(b, k, 4 * n), even));
    odd = flushed(std::fma(half(a, m, 4 * k + 2), half(b, k, 4 * n + 2), odd));
  }
  return flushed(flushed(total) + flushed(even + odd));
}
template <class Byte>
int32_t dot_bytes(int32_t total, int a, int m, int b, int n) {
  for (int k = 0; k < unit.bytes[a]; ++k)
    total += at<int8_t>(a, m, k) * at<Byte>(b, k / 4, 4 * n + k % 4);
  return total;
}

template <class T>
void dot(int c, int a, int b, T (*sum)(T, int, int, int, int)) {
  need_tile(c), need_tile(a), need_tile(b);
  need(a != b && b != c && c != a, "three tiles");
  need(unit.rows[c] == unit.rows[a] && unit.bytes[a] / 4 == unit.rows[b] && unit.bytes[c] == unit.bytes[b], "shapes that fit");
  for (int m = 0; m < unit.rows[c]; ++m)
    for (int n = 0; n < unit.bytes[c] / 4; ++n) {
      const T total = sum(at<T>(c, m, 4 * n), a, m, b, n);
      memcpy(&unit.data[c][m][4 * n], &total, sizeof total);
    }
}

int64_t general_register(const ucontext_t* context, int number) {
  static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[places[number]];
}

struct Operand {
  int64_t base = 0, index = 0;  // where rows begin, and bytes from one to the next
  bool has_index = false;
};

// Of a ModRM byte that names memory; `code` moves behind it.
Operand memory_operand(const ucontext_t* context, const uint8_t*& code, int mode, int rm, int x, int b) {
  Operand operand;
  bool based = true, relative = false;
  if (rm == 4) {
    const int sib = *code++;
    const int index = (sib >> 3 & 7) | x << 3;
    operand.has_index = index != 4;
    if (operand.has_index) operand.index = general_register(context, index) << (sib >> 6);
    rm = sib & 7;
    based = rm != 5 || mode != 0;
  } else if (rm == 5 && mode == 0) {
    based = false;
    relative = true;
  }
  if (based) operand.base = general_register(context, rm | b << 3);
  if (mode == 1) operand.base += int8_t(*code++);
  if (mode == 2 || !based) {
    int32_t distance;
    memcpy(&distance, code, 4);
    code += 4;
    operand.base += distance;
  }
  if (relative) operand.base += int64_t(code);
  return operand;
}

void carry_out(int, siginfo_t*, void* raw) {
  auto* context = static_cast<ucontext_t*>(raw);
  const auto* code = reinterpret_cast<const uint8_t*>(context->uc_mcontext.gregs[REG_RIP]);
  need(code[0] == 0xC4 && (code[1] & 31) == 2 && (code[2] & 0x84) == 0, "another illegal instruction");
  const int x = (code[1] >> 6 & 1) ^ 1, b = (code[1] >> 5 & 1) ^ 1;
  const int third = ~(code[2] >> 3) & 15, prefix = code[2] & 3, opcode = code[3];
  const int mode = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7;
  code += 5;
  if (mode != 3) {
    const Operand operand = memory_operand(context, code, mode, rm, x, b);
    auto* rows = reinterpret_cast<uint8_t*>(operand.base);
    if (opcode == 0x49 && prefix == 0 && reg == 0) {
      configure(rows + operand.index);
    } else {
      need(opcode == 0x4B && prefix != 0 && operand.has_index, "an instruction of tiles");
      need_tile(reg);
      if (prefix != 2) memset(unit.data[reg], 0, sizeof unit.data[reg]);
      for (int i = 0; i < unit.rows[reg]; ++i) {
        uint8_t* row = rows + i * operand.index;
        if (prefix == 2)
          memcpy(row, unit.data[reg][i], size_t(unit.bytes[reg]));
        else
          memcpy(unit.data[reg][i], row, size_t(unit.bytes[reg]));
      }
    }
  } else if (opcode == 0x49 && prefix == 0 && reg == 0 && rm == 0) {
    unit.configured = false;
  } else if (opcode == 0x49 && prefix == 3 && rm == 0) {
    need_tile(reg);
    memset(unit.data[reg], 0, sizeof unit.data[reg]);
  } else if (opcode == 0x5C && prefix == 2) {
    dot<float>(reg, rm, third, dot_halves);
  } else if (opcode == 0x5E && prefix == 2) {
    dot<int32_t>(reg, rm, third, dot_bytes<uint8_t>);
  } else if (opcode == 0x5E && prefix == 3) {
    dot<int32_t>(reg, rm, third, dot_bytes<int8_t>);
  } else {
    fail("an instruction of tiles that is not known here");
  }
  context->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(code);
}

__attribute__((constructor)) void take_over() {
  struct sigaction action = {};
  action.sa_sigaction = carry_out;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace
