// Reading op arguments on the stable ABI, and the checks that every op shares. All checks run before the first
// launch, so that a refused call leaves every tensor as it was.
//
// A Tensor[] argument is read by hand from its list handle: TORCH_BOX would make a shared_ptr for each element,
// which costs half as much again (0.24 against 0.16 us an element).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "buckets.h"
#include "check.h"
#include "launchers.h"
#include "layout.h"

// torch 2.10's headers have the macro by its older name only.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace fastamp {

using torch::stable::Tensor;

struct Device {
  bool cuda = false;
  int32_t index = 0;
  bool operator==(const Device& other) const { return cuda == other.cuda && index == other.index; }
  bool operator!=(const Device& other) const { return !(*this == other); }
  std::string name() const { return cuda ? "cuda:" + std::to_string(index) : "cpu"; }
};

// What the ops need to know of a tensor, without owning it.
struct TensorInfo {
  void* data;
  int64_t numel, dim;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dtype;  // torch's code
  bool strided_layout;
  Device device;
};

TensorInfo read_tensor(AtenTensorHandle handle);

// "torch.float32" and so on, for messages.
std::string dtype_name(int32_t code);

// The dtype a kernel sees: complex tensors are read as pairs of reals. Nothing where no kernel takes it.
struct KernelDType {
  DType dtype;
  bool complex;
};
std::optional<KernelDType> kernel_dtype(int32_t code);

// An op's Tensor[] argument. Owns the list, which keeps the tensors alive.
class TensorList {
 public:
  TensorList(const char* op, const char* name, StableIValue list);
  ~TensorList();
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  size_t size() const { return tensors_.size(); }
  std::string item(size_t i) const { return std::string(op_) + ": " + name_ + "[" + std::to_string(i) + "]"; }

 private:
  const char *op_, *name_;
  StableListHandle list_;
  std::vector<TensorInfo> tensors_;
};

// Checks every tensor of a list (floating or complex, strided layout, on `device`, not overlapping itself) and sorts
// them by dtype. With `sources`, pairs them element by element: the dtype is then the source's.
Buckets make_buckets(const TensorList& tensors, Device device, const TensorList* sources = nullptr);

// Checks a one-element tensor argument and returns its data. `dtype` is torch's code.
TensorInfo read_scalar(const char* op, const char* name, const Tensor& tensor, int32_t dtype, const char* dtype_text,
                       const Device* device = nullptr);
TensorInfo read_float_scalar(const char* op, const char* name, const Tensor& tensor, const Device* device = nullptr);

// The launchers, the stream and (for its lifetime) the current device for tensors on `device`.
class Backend {
 public:
  Backend(const char* op, Device device);
  const Launchers* operator->() const { return launchers_; }
  void* stream() const { return stream_; }

 private:
  const Launchers* launchers_;
  void* stream_ = nullptr;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// The ticket of one launch: see ticket.h.
Tensor make_ticket(const Backend& backend, const Device& device, const Tensor& like);

// New tensors on the device of `like`.
Tensor empty_on(const Tensor& like, int64_t numel, torch::headeronly::ScalarType dtype);

// Argument access for hand-boxed kernels.
template <class T>
T argument(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

}  // namespace fastamp
