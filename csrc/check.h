// Argument checks. STD_TORCH_CHECK puts a function name and a source path before the message; a user should read the
// op's name first.
#pragma once

#include <sstream>
#include <stdexcept>

namespace fastamp {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace fastamp

// The parts of the message are evaluated only where the condition does not hold.
#define FASTAMP_CHECK(condition, ...)               \
  do {                                              \
    if (!(condition)) ::fastamp::fail(__VA_ARGS__); \
  } while (false)
