// How a tensor is described to a launcher: torch-free, so that launchers can be called from the ops, from the
// Python host module and from C++ programs alike.
#pragma once

#include <cstdint>

namespace fastamp {

enum class DType : int32_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// A tensor whose elements fill `numel` consecutive places in memory, in any order (channels_last is dense too:
// the ops are element-wise or order-free).
struct TensorRef {
  void* data;
  const void* source;  // the second operand of accumulate and scale_losses, in the same order; else nullptr
  int64_t numel;
  int32_t index;  // the tensor's place in the caller's list
};

// A tensor with gaps, its dimensions merged where possible, the innermost (smallest stride) first.
constexpr int kMaxDims = 16;
struct StridedRef {
  void* data;
  const void* source;
  int64_t numel;
  int32_t index;
  int32_t dim;
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];         // of data, in elements
  int64_t source_strides[kMaxDims];  // of source, in elements
};

// Tensors of one dtype on one device.
struct TensorSpan {
  DType dtype;
  const TensorRef* dense;
  int64_t num_dense;
  const StridedRef* strided;
  int64_t num_strided;
};

}  // namespace fastamp
