// Reads sizes and strides: is a tensor dense, strided with gaps, or does it overlap itself? Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor_ref.h"

namespace fastamp {

constexpr int kMaxTensorDims = 64;  // torch's own limit; a complex tensor has one more here

enum class Layout { kDense, kStrided, kOverlapping, kTooManyDims };

// Classifies a tensor and, where it has gaps, fills ref's dim, sizes and strides. With source_strides given, the
// two operands share sizes, and kDense means that both are dense in the same order.
inline Layout classify_layout(int64_t dim, const int64_t* sizes, const int64_t* strides, const int64_t* source_strides,
                              StridedRef* ref) {
  // Contiguous is the common case and needs no sorting.
  int64_t expected = 1;
  bool contiguous = true;
  for (int64_t d = dim - 1; d >= 0; --d) {
    if (sizes[d] == 0) return Layout::kDense;
    if (sizes[d] == 1) continue;
    contiguous &= strides[d] == expected && (!source_strides || source_strides[d] == expected);
    expected *= sizes[d];
  }
  if (contiguous) return Layout::kDense;

  int64_t order[kMaxTensorDims + 1];
  int kept = 0;
  for (int64_t d = 0; d < dim; ++d)
    if (sizes[d] != 1) order[kept++] = d;
  std::sort(order, order + kept, [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });

  ref->dim = 0;
  int64_t reach = 0;  // the largest offset that the dimensions read so far can form
  bool same_order = true;
  for (int i = 0; i < kept; ++i) {
    const int64_t d = order[i], stride = strides[d];
    const int64_t source_stride = source_strides ? source_strides[d] : 0;
    // Each dimension has to step over everything inside it. Layouts that interleave without meeting
    // (sizes 3x2, strides 2 and 3) are refused too: nothing makes them in practice.
    if (stride <= reach) return Layout::kOverlapping;
    reach += stride * (sizes[d] - 1);
    same_order &= !source_strides || source_stride == stride;
    const int last = ref->dim - 1;
    const bool merges = last >= 0 && stride == ref->strides[last] * ref->sizes[last] &&
                        (!source_strides || source_stride == ref->source_strides[last] * ref->sizes[last]);
    if (merges) {
      ref->sizes[last] *= sizes[d];
    } else {
      if (ref->dim == kMaxDims) return Layout::kTooManyDims;
      ref->sizes[ref->dim] = sizes[d];
      ref->strides[ref->dim] = stride;
      ref->source_strides[ref->dim] = source_stride;
      ++ref->dim;
    }
  }
  const bool dense = ref->dim == 1 && ref->strides[0] == 1 && same_order;
  return dense ? Layout::kDense : Layout::kStrided;
}

}  // namespace fastamp
