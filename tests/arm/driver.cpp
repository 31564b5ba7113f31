// Runs the functions of a library for another processor, under qemu, on the memory of the process that calls them.
//
//   driver LIBRARY MEMORY_FD
//
// Requests come in on stdin and are answered on stdout (tests/arm/remote.py). Pointers in arguments, and whatever they lead to, are
// those of the calling process: its memory is opened as MEMORY_FD (its /proc/self/mem). A page that is touched for the first time in a
// call is not there; the handler of the fault fetches a copy and puts it at the same address. After the call, bytes that
// changed are written back, and the copies go. So the library's functions take what the tests have in their hands, with nobody
// having to say what is read and what is written.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

namespace {

constexpr uint64_t kPage = 4096, kChunk = 64 << 10;
constexpr int kMost = 1 << 16;

struct Copy {
  uint8_t* at;      // here and there
  uint8_t* before;  // as fetched
  uint64_t bytes;
};
Copy g_copies[kMost];
int g_count = 0;
int g_memory = -1;
std::atomic_flag g_busy = ATOMIC_FLAG_INIT;  // threads may fault at once

[[noreturn]] void give_up(const char* what, uint64_t at) {
  char line[160];
  int n = snprintf(line, sizeof line, "driver: %s at 0x%llx\n", what, (unsigned long long)at);
  if (write(2, line, size_t(n)) < 0) _exit(4);
  _exit(3);
}

uint8_t* pages(uint64_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<uint8_t*>(p);
}

bool fetch(uint64_t at, uint64_t bytes) {
  uint8_t *before = pages(bytes), *copy = pages(bytes);
  if (before == nullptr || copy == nullptr) give_up("no memory for a copy", at);
  if (pread(g_memory, before, bytes, off_t(at)) != ssize_t(bytes)) {
    munmap(before, bytes);
    munmap(copy, bytes);
    return false;
  }
  memcpy(copy, before, bytes);
  // In place whole or not at all: another thread must not see it half filled.
  if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, reinterpret_cast<void*>(at)) == MAP_FAILED)
    give_up("no place for a copy", at);
  if (g_count == kMost) give_up("too many copies", at);
  g_copies[g_count++] = Copy{reinterpret_cast<uint8_t*>(at), before, bytes};
  return true;
}

bool overlaps(uint64_t at, uint64_t bytes) {
  for (int i = 0; i < g_count; i++) {
    uint64_t begin = reinterpret_cast<uint64_t>(g_copies[i].at);
    if (at < begin + g_copies[i].bytes && begin < at + bytes) return true;
  }
  return false;
}

void fault(int, siginfo_t* info, void*) {
  const int kept = errno;
  const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr), page = address / kPage * kPage;
  while (g_busy.test_and_set(std::memory_order_acquire)) {
  }
  if (!overlaps(page, kPage)) {  // else another thread was quicker
    const uint64_t chunk = address / kChunk * kChunk;
    if (address < kChunk || ((overlaps(chunk, kChunk) || !fetch(chunk, kChunk)) && !fetch(page, kPage)))
      give_up("the call touched memory that is not there,", address);
  }
  g_busy.clear(std::memory_order_release);
  errno = kept;
}

// What the call changed goes back, byte for byte: the caller's other threads own the rest.
void write_back() {
  for (int i = 0; i < g_count; i++) {
    const Copy& copy = g_copies[i];
    for (uint64_t a = 0; a < copy.bytes;) {
      if (copy.at[a] == copy.before[a]) {
        a++;
        continue;
      }
      uint64_t b = a;
      while (b < copy.bytes && copy.at[b] != copy.before[b]) b++;
      if (pwrite(g_memory, copy.at + a, b - a, off_t(reinterpret_cast<uint64_t>(copy.at) + a)) != ssize_t(b - a))
        give_up("the call wrote where nobody may write,", reinterpret_cast<uint64_t>(copy.at) + a);
      a = b;
    }
    munmap(copy.at, copy.bytes);
    munmap(copy.before, copy.bytes);
  }
  g_count = 0;
}

enum Kind : uint64_t { CALL = 0, SYMBOL = 1, STRING = 2 };

struct Request {
  uint64_t kind;
  uint64_t what;           // CALL: the function. SYMBOL: its name, there. STRING: a string here
  uint64_t integers[16];   // arguments that are no floating-point numbers, in order. STRING: [0] where it goes, [1] room for it
  double floats[8];        // those that are: a float in the lower half
};
struct Answer {
  uint64_t result;
  int64_t error;  // errno
};

// The procedure call standard takes the first eight of each kind from registers, and what is left of the integers from the stack.
using Function = uint64_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, double, double,
                              double, double, double, double, double, double, uint64_t, uint64_t, uint64_t, uint64_t,
                              uint64_t, uint64_t, uint64_t, uint64_t);

uint64_t carry_out(void* library, const Request& r) {
  if (r.kind == SYMBOL) return reinterpret_cast<uint64_t>(dlsym(library, reinterpret_cast<const char*>(r.what)));
  if (r.kind == STRING) {
    const char* text = reinterpret_cast<const char*>(r.what);
    if (strlen(text) >= r.integers[1]) give_up("a string is too long", r.what);
    strcpy(reinterpret_cast<char*>(r.integers[0]), text);
    return 0;
  }
  const uint64_t* i = r.integers;
  const double* f = r.floats;
  errno = 0;
  return reinterpret_cast<Function>(r.what)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], f[0], f[1], f[2], f[3], f[4], f[5],
                                            f[6], f[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15]);
}

bool transfer(bool out, void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    char* at = static_cast<char*>(data) + done;
    const ssize_t n = out ? write(1, at, bytes - done) : read(0, at, bytes - done);
    if (n <= 0) return false;
    done += size_t(n);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  g_memory = atoi(argv[2]);
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) {
    fprintf(stderr, "driver: %s\n", dlerror());
    return 1;
  }
  struct sigaction action = {};
  action.sa_sigaction = fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  Answer ready = {};  // the caller waits for it: every mapping that comes at the start is there now
  if (!transfer(true, &ready, sizeof ready)) return 1;
  Request request;
  while (transfer(false, &request, sizeof request)) {
    Answer answer = {};
    answer.result = carry_out(library, request);
    answer.error = errno;
    write_back();
    if (!transfer(true, &answer, sizeof answer)) return 1;
  }
  return 0;
}
