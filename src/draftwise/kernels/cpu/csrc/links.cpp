#include "links.h"

#include <cerrno>
#include <stdexcept>

#include "boundary.h"
#include "system.h"

#if !defined(_WIN32)
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#endif

#if !defined(MSG_NOSIGNAL)
#define MSG_NOSIGNAL 0  // Python ignores SIGPIPE
#endif

namespace dw {
namespace {

constexpr int LOOKS = 50;    // at sockets before the thread sleeps: some tens of microseconds
constexpr int NAP_MS = 100;  // until it looks whether somebody gave up

[[noreturn]] void missing() { throw std::runtime_error("a rank is missing"); }

}  // namespace

Links::Links(const int32_t* sockets, int64_t size, int64_t piece) {
  if (sockets == nullptr) return;
  of_.assign((size_t)size, -1);
  for (int64_t rank = 0; rank < size; rank++) {
    if (sockets[rank] < 0) continue;
    of_[rank] = (int64_t)links_.size();
    links_.push_back({sockets[rank], 0, 0, std::vector<char>((size_t)piece)});
  }
#if defined(_WIN32)
  require(links_.empty(), "ranks on other machines");
#endif
}

#if defined(_WIN32)

void Links::exchange(const char*, int64_t, int64_t, const std::atomic<uint64_t>&) {}

#else

void Links::exchange(const char* mine, int64_t bytes, int64_t patience, const std::atomic<uint64_t>& broken) {
  for (Link& link : links_) link.sent = link.received = 0;
  int64_t since = 0;
  int looks = 0;
  for (;;) {
    bool moved = false, done = true;
    for (Link& link : links_) {
      moved |= move(link, mine, bytes);
      done &= link.sent == bytes && link.received == bytes;
    }
    if (done) return;
    if (moved) {
      looks = 0;
    } else if (looks++ < LOOKS) {
      pause_briefly();
    } else {
      if (looks == LOOKS + 1) since = now_ns();
      if (now_ns() - since > patience || broken.load(std::memory_order_relaxed) != 0) missing();
      wait(bytes);
    }
  }
}

// Whether anything could be sent or read. Nobody waits to send before reading: two that send more than the system buffers would
// wait for each other.
bool Links::move(Link& link, const char* mine, int64_t bytes) {
  bool moved = false;
  auto check = [&](ssize_t n) -> int64_t {
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) missing();
    moved |= n > 0;
    return n > 0 ? (int64_t)n : 0;
  };
  if (link.sent < bytes)
    link.sent += check(send(link.fd, mine + link.sent, (size_t)(bytes - link.sent), MSG_DONTWAIT | MSG_NOSIGNAL));
  if (link.received < bytes) {
    const ssize_t n = recv(link.fd, link.piece.data() + link.received, (size_t)(bytes - link.received), MSG_DONTWAIT);
    if (n == 0) missing();
    link.received += check(n);
  }
  return moved;
}

void Links::wait(int64_t bytes) {
  std::vector<pollfd> wanted;
  for (const Link& link : links_) {
    const short events = (short)((link.sent < bytes ? POLLOUT : 0) | (link.received < bytes ? POLLIN : 0));
    if (events != 0) wanted.push_back({link.fd, events, 0});
  }
  poll(wanted.data(), (nfds_t)wanted.size(), NAP_MS);
}

#endif

}  // namespace dw
