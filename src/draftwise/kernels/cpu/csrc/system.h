// What operating systems spell in different ways: pages, forks, signals. Clocks and threads are those of the standard library.
#pragma once

#include <cstddef>

#include "isa.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#endif

#include <chrono>
#include <cstdint>
#include <initializer_list>

namespace dw {

inline void pause_briefly() {
#if DW_X86
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Zeroed, at the beginning of a page; null: there is no memory.
inline void* map_pages(size_t bytes) {
#if defined(_WIN32)
  return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
#else
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
#endif
}

inline void unmap_pages(void* pages, size_t bytes) {
#if defined(_WIN32)
  (void)bytes;
  VirtualFree(pages, 0, MEM_RELEASE);
#else
  munmap(pages, bytes);
#endif
}

// The pages that lie wholly in [begin, begin + bytes) go back to the system; read again, they are zeros. Where a system has no such
// call, they stay until they are unmapped.
inline void forget_pages(uint8_t* begin, size_t bytes) {
#if defined(MADV_DONTNEED)
  constexpr uintptr_t kPage = 65536;  // the largest that there are: a length is rounded up to whole ones
  auto first = (reinterpret_cast<uintptr_t>(begin) + kPage - 1) / kPage * kPage;
  auto last = (reinterpret_cast<uintptr_t>(begin) + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
  (void)begin, (void)bytes;
#endif
}

// A wish; a refusal costs speed only.
inline void wish_huge_pages(void* begin, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(begin, bytes, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}

// The processor that the calling thread runs on; -1: the system does not say.
inline int current_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Lets `thread` run wherever the calling thread may, but for one processor. A wish: where the system has no such call, or no
// other processor is left, nothing happens.
template <typename Thread>
inline void keep_off(Thread thread, int processor) {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return;
  CPU_CLR(processor, &set);
  if (CPU_COUNT(&set) > 0) pthread_setaffinity_np(thread, sizeof set, &set);
#else
  (void)thread, (void)processor;
#endif
}

// Called around every fork, where there are forks.
inline void around_forks(void (*before)(), void (*in_parent)(), void (*in_child)()) {
#if defined(_WIN32)
  (void)before, (void)in_parent, (void)in_child;
#else
  pthread_atfork(before, in_parent, in_child);
#endif
}

// Threads that are started while this lives get no signals: those belong to the program's own threads.
class NoSignals {
 public:
#if defined(_WIN32)
  NoSignals() {}
#else
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    // But for those that a thread brings on itself: with them blocked the system ends the process before a handler (Python's
    // faulthandler) can say where.
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&all, own);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
#endif
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

#if !defined(_WIN32)
 private:
  sigset_t before_;
#endif
};

}  // namespace dw
