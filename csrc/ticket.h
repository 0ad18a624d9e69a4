// Where unscale_norm's ticket comes from: a counter in the device's memory that is 0 between launches. Torch-free.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace fastamp {

// One ticket for each device and stream, made at first use and kept: launches on one stream follow each other, so they
// can share it. Tensor is whichever tensor class the caller works with.
//
// While a CUDA graph is captured the cache must not be used: a replay may run beside other work on any stream. A
// capturing caller makes a ticket for that one launch, zeroed inside the graph.
template <class Tensor>
class TicketCache {
 public:
  template <class MakeZeros>
  const Tensor& get(int32_t device, void* stream, const MakeZeros& make_zeros) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::pair<int32_t, void*> key(device, stream);
    auto found = tickets_.find(key);
    if (found == tickets_.end()) found = tickets_.emplace(key, make_zeros()).first;
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int32_t, void*>, Tensor> tickets_;
};

}  // namespace fastamp
