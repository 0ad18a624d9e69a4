#include "tensor_list.h"

#include <utility>

#include "ticket.h"

namespace fastamp {

namespace {

// Fills *strided where the tensor has gaps; complex tensors get an innermost dimension of two reals.
Layout read_layout(const TensorInfo& t, bool complex, const TensorInfo* source, StridedRef* strided) {
  const int64_t* source_strides = source ? source->strides : nullptr;
  if (!complex) return classify_layout(t.dim, t.sizes, t.strides, source_strides, strided);
  int64_t sizes[kMaxTensorDims + 1], strides[kMaxTensorDims + 1], other[kMaxTensorDims + 1];
  for (int64_t d = 0; d < t.dim; ++d) {
    sizes[d] = t.sizes[d];
    strides[d] = 2 * t.strides[d];
    other[d] = source ? 2 * source_strides[d] : 0;
  }
  sizes[t.dim] = 2;
  strides[t.dim] = other[t.dim] = 1;
  return classify_layout(t.dim + 1, sizes, strides, source ? other : nullptr, strided);
}

}  // namespace

TensorInfo read_tensor(AtenTensorHandle handle) {
  TensorInfo t{};
  int32_t layout, device_type;
  int64_t *sizes, *strides;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &t.dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &t.device.index));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &t.numel));
  t.device.cuda = device_type == aoti_torch_device_type_cuda();
  if (!t.device.cuda) t.device.index = 0;
  t.strided_layout = layout == aoti_torch_layout_strided();
  if (!t.strided_layout) return t;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &t.dim));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &t.data));
  t.sizes = sizes;
  t.strides = strides;
  return t;
}

std::string dtype_name(int32_t code) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"},
  };
  for (const auto& [value, name] : names)
    if (value == code) return std::string("torch.") + name;
  return "a dtype with code " + std::to_string(code);
}

std::optional<KernelDType> kernel_dtype(int32_t code) {
  if (code == aoti_torch_dtype_float32()) return KernelDType{DType::kFloat32, false};
  if (code == aoti_torch_dtype_float16()) return KernelDType{DType::kFloat16, false};
  if (code == aoti_torch_dtype_bfloat16()) return KernelDType{DType::kBFloat16, false};
  if (code == aoti_torch_dtype_float64()) return KernelDType{DType::kFloat64, false};
  if (code == aoti_torch_dtype_complex64()) return KernelDType{DType::kFloat32, true};
  if (code == aoti_torch_dtype_complex128()) return KernelDType{DType::kFloat64, true};
  return std::nullopt;
}

TensorList::TensorList(const char* op, const char* name, StableIValue list)
    : op_(op), name_(name), list_(torch::stable::detail::to<StableListHandle>(list)) {
  size_t size = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(list_, &size));
  tensors_.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue element;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(list_, i, &element));
    const auto handle = torch::stable::detail::to<AtenTensorHandle>(element);
    // The list holds its own reference, so what is read here outlives this handle.
    TensorInfo info{};
    try {
      info = read_tensor(handle);
    } catch (...) {
      aoti_torch_delete_tensor_object(handle);
      torch_delete_list(list_);
      throw;
    }
    aoti_torch_delete_tensor_object(handle);
    tensors_.push_back(info);
  }
}

TensorList::~TensorList() { torch_delete_list(list_); }

Buckets make_buckets(const TensorList& tensors, Device device, const TensorList* sources) {
  Buckets buckets;
  buckets.count = static_cast<int64_t>(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& t = tensors.tensors()[i];
    const TensorInfo* source = sources ? &sources->tensors()[i] : nullptr;
    const std::optional<KernelDType> own = kernel_dtype(t.dtype);
    FASTAMP_CHECK(t.strided_layout && own, tensors.item(i), " must be a strided floating-point or complex tensor, got ",
                  dtype_name(t.dtype),
                  t.strided_layout ? "" : " with a sparse layout (pass its values() after coalesce())");
    FASTAMP_CHECK(t.device == device, tensors.item(i), " must be on ", device.name(),
                  " like the scalar arguments, got ", t.device.name(), ": call the op once for each device");
    std::optional<KernelDType> dtype = own;
    if (source) {
      dtype = kernel_dtype(source->dtype);
      FASTAMP_CHECK(source->strided_layout && dtype, sources->item(i),
                    " must be a strided floating-point or complex tensor, got ", dtype_name(source->dtype));
      FASTAMP_CHECK(source->device == device, sources->item(i), " must be on ", device.name(), " like ",
                    tensors.item(i), ", got ", source->device.name());
    }
    Bucket& bucket = buckets.by_dtype[static_cast<int>(dtype->dtype)];
    StridedRef strided;
    const Layout layout = read_layout(t, own->complex, source, &strided);
    FASTAMP_CHECK(layout != Layout::kOverlapping, tensors.item(i),
                  " overlaps itself in memory (an expanded tensor?): pass .contiguous() instead");
    FASTAMP_CHECK(layout != Layout::kTooManyDims, tensors.item(i), " has gaps in more than ", kMaxDims,
                  " dimensions: pass .contiguous() instead");
    const int64_t numel = own->complex ? 2 * t.numel : t.numel;
    const auto index = static_cast<int32_t>(i);
    const void* source_data = source ? source->data : nullptr;
    if (layout == Layout::kDense || numel == 0) {
      bucket.dense.push_back({t.data, source_data, numel, index});
    } else {
      strided.data = t.data;
      strided.source = source_data;
      strided.numel = numel;
      strided.index = index;
      bucket.strided.push_back(strided);
    }
  }
  return buckets;
}

TensorInfo read_scalar(const char* op, const char* name, const Tensor& tensor, int32_t dtype, const char* dtype_text,
                       const Device* device) {
  const TensorInfo info = read_tensor(tensor.get());
  FASTAMP_CHECK(info.strided_layout && info.dtype == dtype && info.numel == 1, op, ": ", name, " must hold one ",
                dtype_text, " element, got ", info.numel, " of ", dtype_name(info.dtype));
  FASTAMP_CHECK(!device || info.device == *device, op, ": ", name, " must be on ", device ? device->name() : "",
                ", got ", info.device.name());
  return info;
}

TensorInfo read_float_scalar(const char* op, const char* name, const Tensor& tensor, const Device* device) {
  return read_scalar(op, name, tensor, aoti_torch_dtype_float32(), "torch.float32", device);
}

Backend::Backend(const char* op, Device device) : launchers_(fastamp_launchers(device.cuda)) {
  FASTAMP_CHECK(launchers_, op,
                ": this build of fastamp has no CUDA kernels; `python -m fastamp` says how to build them");
  if (device.cuda) guard_.emplace(device.index);
  stream_ = launchers_->current_stream(device.index);
}

Tensor empty_on(const Tensor& like, int64_t numel, torch::headeronly::ScalarType dtype) {
  return torch::stable::new_empty(like, {&numel, 1}, dtype);
}

Tensor make_ticket(const Backend& backend, const Device& device, const Tensor& like) {
  const int64_t one = 1;
  auto zeros = [&] { return torch::stable::new_zeros(like, {&one, 1}, torch::headeronly::ScalarType::Int); };
  if (backend->is_capturing(backend.stream())) return zeros();
  // Never destroyed: at interpreter exit the CUDA context may be gone before static destructors run.
  static auto& cache = *new TicketCache<Tensor>;
  return cache.get(device.cuda ? device.index : -1, backend.stream(), zeros);
}

}  // namespace fastamp
