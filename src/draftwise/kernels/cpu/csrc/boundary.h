// The C boundary: what Python calls. No exception crosses it. Every exported function runs in `guarded`, which says in errno how
// it went: 0; ENOMEM, there was no memory; EINVAL, the arguments make no sense; EIO, something else failed. After an error the
// result is zero and means nothing, nothing is leaked, and what was to be written may be half written. library.py raises.
#pragma once

#include <cerrno>
#include <exception>
#include <new>
#include <stdexcept>
#include <type_traits>

namespace dw {

template <class Body>
auto guarded(const Body& body) -> decltype(body()) {
  int error = 0;
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      errno = 0;
      return;
    } else {
      auto result = body();
      errno = 0;  // what calls of the system left there, madvise's refusal for one, is no error
      return result;
    }
  } catch (const std::bad_alloc&) {
    error = ENOMEM;
  } catch (const std::length_error&) {  // a vector of more than there can be
    error = ENOMEM;
  } catch (const std::logic_error&) {
    error = EINVAL;
  } catch (const std::exception&) {
    error = EIO;
  }
  errno = error;
  if constexpr (!std::is_void_v<decltype(body())>) return decltype(body())();
}

// For arguments that would make a kernel read or write what is not there.
inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace dw
