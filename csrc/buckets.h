// The tensors of one call on one device, sorted by dtype as launchers take them; and turns for memory that is listed
// more than once. Torch-free.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensor_ref.h"

namespace fastamp {

struct Bucket {
  std::vector<TensorRef> dense;
  std::vector<StridedRef> strided;
  bool empty() const { return dense.empty() && strided.empty(); }
};

struct Buckets {
  std::array<Bucket, 4> by_dtype;  // indexed by DType
  int64_t count = 0;               // tensors in the list

  // fn(span, last) for each dtype that has tensors; last is true in the last call.
  template <class Fn>
  void for_each(const Fn& fn) const {
    int last = -1;
    for (int d = 0; d < 4; ++d)
      if (!by_dtype[d].empty()) last = d;
    for (int d = 0; d <= last; ++d) {
      const Bucket& b = by_dtype[d];
      if (b.empty()) continue;
      const TensorSpan span{static_cast<DType>(d), b.dense.data(), static_cast<int64_t>(b.dense.size()),
                            b.strided.data(), static_cast<int64_t>(b.strided.size())};
      fn(span, d == last);
    }
  }

  // for_each for launchers that write. A launch works on all its tensors at once, so memory that is listed twice (a
  // parameter that two groups share, one gradient of two parameters) would be written by two threads at a time: its
  // second mention waits for a launch of its own, its third for another. The results are those of one after the other.
  // one_thread_elements: of the launchers' table; 0 where the order among dtypes matters too.
  template <class Fn>
  void for_each_in_turn(int64_t one_thread_elements, const Fn& fn) const {
    const bool one_thread = std::all_of(by_dtype.begin(), by_dtype.end(), [&](const Bucket& b) {
      return one_thread_elements && dense_elements(b) <= one_thread_elements;
    });
    if (one_thread || !repeats()) return for_each(fn);
    for (const Buckets& turn : turns()) turn.for_each(fn);
  }

  // Whether the tensors have no gaps and at most this many elements in all.
  bool within(int64_t elements) const {
    return std::all_of(by_dtype.begin(), by_dtype.end(), [&](const Bucket& b) {
      elements -= dense_elements(b);
      return elements >= 0 && b.strided.empty();
    });
  }

  // Whether any memory is listed twice, told by where it begins.
  bool repeats() const {
    if (count < 2) return false;
    int bits = 2;
    while ((int64_t{1} << bits) < 2 * count) ++bits;
    std::vector<const void*> table(size_t{1} << bits);  // open addressing, at most half full
    auto seen = [&](const void* data, int64_t numel) {
      if (numel == 0) return false;
      auto at = (reinterpret_cast<uintptr_t>(data) * 0x9E3779B97F4A7C15u) >> (64 - bits);
      for (; table[at]; at = (at + 1) & (table.size() - 1))
        if (table[at] == data) return true;
      table[at] = data;
      return false;
    };
    for (const Bucket& b : by_dtype) {
      for (const TensorRef& ref : b.dense)
        if (seen(ref.data, ref.numel)) return true;
      for (const StridedRef& ref : b.strided)
        if (seen(ref.data, ref.numel)) return true;
    }
    return false;
  }

 private:
  static int64_t dense_elements(const Bucket& bucket) {
    int64_t total = 0;
    for (const TensorRef& ref : bucket.dense) total += ref.numel;
    return total;
  }

  // First mentions, second mentions and so on, in the order of the list.
  std::vector<Buckets> turns() const {
    std::vector<std::pair<int32_t, size_t>> order;  // index in the list; dtype
    for (size_t d = 0; d < by_dtype.size(); ++d) {
      for (const TensorRef& ref : by_dtype[d].dense) order.emplace_back(ref.index, d);
      for (const StridedRef& ref : by_dtype[d].strided) order.emplace_back(ref.index, d);
    }
    std::sort(order.begin(), order.end());
    std::array<size_t, 4> dense{}, strided{};  // how many were taken of each; a bucket keeps the order of the list
    std::unordered_map<const void*, size_t> mentions;
    std::vector<Buckets> found;
    auto turn_of = [&](const void* data, int64_t numel) -> Buckets& {
      const size_t turn = numel ? mentions[data]++ : 0;
      if (turn >= found.size()) found.resize(turn + 1);
      return found[turn];
    };
    for (const auto& [index, d] : order) {
      const Bucket& b = by_dtype[d];
      if (dense[d] < b.dense.size() && b.dense[dense[d]].index == index) {
        const TensorRef& ref = b.dense[dense[d]++];
        turn_of(ref.data, ref.numel).by_dtype[d].dense.push_back(ref);
      } else {
        const StridedRef& ref = b.strided[strided[d]++];
        turn_of(ref.data, ref.numel).by_dtype[d].strided.push_back(ref);
      }
    }
    return found;
  }
};

}  // namespace fastamp
