// Sockets to ranks on other machines. Of every exchange a rank sends the same piece to all of them and reads as much of each.
//
// A stream keeps its order and an exchange has one size on all ranks, so that nothing needs a header: who reads exactly so many
// bytes has read this exchange, and what a faster rank has sent of the next one waits in the system's buffers.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace dw {

class Links {
 public:
  // sockets [size]: connected stream sockets by rank, -1 where there is none; null: none at all. They stay the caller's.
  Links(const int32_t* sockets, int64_t size, int64_t piece);

  // What `rank` sent in the last exchange; null: there is no link to it.
  const char* theirs(int64_t rank) const { return of_.empty() || of_[rank] < 0 ? nullptr : links_[of_[rank]].piece.data(); }
  char* theirs(int64_t rank) { return const_cast<char*>(static_cast<const Links*>(this)->theirs(rank)); }

  // Send `mine` [bytes] to all and read as much from each. Throws std::runtime_error when one has gone, when nothing came for
  // `patience` nanoseconds, or when somebody set `broken`.
  void exchange(const char* mine, int64_t bytes, int64_t patience, const std::atomic<uint64_t>& broken);

 private:
  struct Link {
    int fd;
    int64_t sent, received;
    std::vector<char> piece;
  };
  bool move(Link& link, const char* mine, int64_t bytes);
  void wait(int64_t bytes);

  std::vector<Link> links_;
  std::vector<int64_t> of_;  // rank -> its link, or -1
};

}  // namespace dw
