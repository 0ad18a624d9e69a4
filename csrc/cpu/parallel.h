// torch's thread pool, and the cutting of a tensor list into chunks for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "../unscale.h"

namespace fastamp::cpu {

using torch::stable::parallel_for;

// The list is read as one long array and cut into equal chunks, whatever the sizes of its tensors: threads get
// equal work. A chunk's part of one tensor is a segment. Boundaries depend on sizes alone, so sums that follow
// them are the same for any number of threads.
class Chunks {
 public:
  explicit Chunks(const TensorSpan& span) : span_(span) {
    int64_t total = 0;
    for (int64_t t = 0; t < span.num_dense; ++t) total += span.dense[t].numel;
    elements_ = std::max(kMinChunkElements, (total + kMaxNormBlocks - 1) / kMaxNormBlocks);
    count_ = (total + elements_ - 1) / elements_;
    if (count_ <= 1) return;
    begin_.reserve(span.num_dense + 1);
    begin_.push_back(0);
    for (int64_t t = 0; t < span.num_dense; ++t) begin_.push_back(begin_.back() + span.dense[t].numel);
  }

  int64_t first_chunk(int64_t tensor) const { return count_ <= 1 ? 0 : begin_[tensor] / elements_; }
  int64_t last_chunk(int64_t tensor) const { return count_ <= 1 ? 0 : (begin_[tensor + 1] - 1) / elements_; }

  // fn(tensor, begin, end, chunk) for each segment of all chunks, on torch's threads.
  template <class Fn>
  void for_each_segment(const Fn& fn) const {
    if (count_ <= 1) {
      for (int64_t t = 0; t < span_.num_dense; ++t)
        if (span_.dense[t].numel) fn(t, 0, span_.dense[t].numel, 0);
      return;
    }
    auto run = [&](int64_t chunk_begin, int64_t chunk_end) {
      int64_t tensor = std::upper_bound(begin_.begin(), begin_.end(), chunk_begin * elements_) - begin_.begin() - 1;
      for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
        const int64_t end = std::min((chunk + 1) * elements_, begin_.back());
        for (int64_t at = chunk * elements_; at < end;) {
          while (begin_[tensor + 1] <= at) ++tensor;  // steps over empty tensors too
          const int64_t stop = std::min(end, begin_[tensor + 1]);
          fn(tensor, at - begin_[tensor], stop - begin_[tensor], chunk);
          at = stop;
        }
      }
    };
    parallel_for(0, count_, 1, run);
  }

 private:
  const TensorSpan& span_;
  std::vector<int64_t> begin_;  // each tensor's first element in the long array, and the end; empty for one chunk
  int64_t elements_ = 0, count_ = 0;
};

// fn(offset, source_offset) for every element of a strided tensor, in a fixed order.
template <class Fn>
void for_each_element(const StridedRef& ref, const Fn& fn) {
  int64_t index[kMaxDims] = {};
  int64_t offset = 0, source_offset = 0;
  for (int64_t i = 0; i < ref.numel; ++i) {
    fn(offset, source_offset);
    for (int d = 0; d < ref.dim; ++d) {
      offset += ref.strides[d];
      source_offset += ref.source_strides[d];
      if (++index[d] < ref.sizes[d]) break;
      offset -= ref.strides[d] * ref.sizes[d];
      source_offset -= ref.source_strides[d] * ref.sizes[d];
      index[d] = 0;
    }
  }
}

}  // namespace fastamp::cpu
