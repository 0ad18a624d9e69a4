// fastamp::quantize_blockwise and dequantize_blockwise, each with a form that writes into given memory,
// quantize_blockwise_stats_, pack_bits, pack_scaled_mask, unpack_bits: checks and the call of the launcher.
#include "storage.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "ops.h"
#include "tensor_list.h"

namespace fastamp {

using torch::headeronly::ScalarType;

namespace {

constexpr struct {
  const char* name;
  StorageFormat format;
  ScalarType payload;
} kFormats[] = {
    {"int8", StorageFormat::kInt8, ScalarType::Char},
    {"int4", StorageFormat::kInt4, ScalarType::Byte},
    {"fp8_e4m3", StorageFormat::kFp8E4M3, ScalarType::Float8_e4m3fn},
    {"fp8_e5m2", StorageFormat::kFp8E5M2, ScalarType::Float8_e5m2},
};

bool is_contiguous(const TensorInfo& t) {
  int64_t expected = 1;
  for (int64_t d = t.dim - 1; d >= 0; --d) {
    if (t.sizes[d] == 1) continue;
    if (t.strides[d] != expected) return t.numel == 0;
    expected *= t.sizes[d];
  }
  return true;
}

// A tensor argument in row-major order: the tensor itself where it is contiguous, else a copy.
struct Flat {
  Flat(const char* op, const char* name, const Tensor& given) : tensor(given), info(read_tensor(given.get())) {
    FASTAMP_CHECK(info.strided_layout, op, ": ", name, " must be a strided tensor, got a sparse one");
    if (is_contiguous(info)) return;
    tensor = torch::stable::contiguous(given);
    info = read_tensor(tensor.get());
  }
  Tensor tensor;
  TensorInfo info;
};

void check_device(const char* op, const char* name, const TensorInfo& t, const char* other, const Device& device) {
  FASTAMP_CHECK(t.device == device, op, ": ", name, " must be on ", device.name(), " like ", other, ", got ",
                t.device.name());
}

// The dtypes that the codecs take and give.
DType codec_dtype(const char* op, const char* name, int32_t code) {
  const auto dtype = kernel_dtype(code);
  FASTAMP_CHECK(dtype && !dtype->complex && dtype->dtype != DType::kFloat64, op, ": ", name,
                " must be torch.float32, torch.float16 or torch.bfloat16, got ", dtype_name(code));
  return dtype->dtype;
}

// A base has the shape and dtype of what it is the base of; `like` describes that.
Flat read_base(const char* op, const Tensor& base, int32_t dtype, const int64_t* sizes, int64_t dim,
               const Device& device, const char* like) {
  const TensorInfo given = read_tensor(base.get());
  bool same = given.strided_layout && given.dim == dim;
  for (int64_t d = 0; same && d < dim; ++d) same = given.sizes[d] == sizes[d];
  FASTAMP_CHECK(same, op, ": base must have the shape of ", like);
  FASTAMP_CHECK(given.dtype == dtype, op, ": base must be ", dtype_name(dtype), " like ", like, ", got ",
                dtype_name(given.dtype));
  check_device(op, "base", given, like, device);
  return Flat(op, "base", base);
}

// Large CPU allocations are fresh memory, of which each small page costs a fault when it is first written: more than
// the kernels themselves. Where the system leaves the choice to programs (transparent_hugepage/enabled: madvise), the
// result is given large pages.
void prefer_huge_pages([[maybe_unused]] const Tensor& fresh, [[maybe_unused]] const Device& device,
                       [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kLargestHeapChunk = int64_t{32} << 20;  // glibc maps what is larger, always
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  if (device.cuda || bytes < kLargestHeapChunk) return;
  const auto begin = reinterpret_cast<uintptr_t>(fresh.data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t last = (begin + static_cast<uintptr_t>(bytes)) & ~(kHugePage - 1);
  // A hint: a refusal changes nothing.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Memory for a result: the caller's, where it is given and fits, else new.
Tensor result(const char* op, const char* name, const Tensor* given, const Tensor& like, const Device& device,
              const int64_t* sizes, size_t dim, ScalarType dtype) {
  if (!given) {
    Tensor fresh = torch::stable::new_empty(like, {sizes, dim}, dtype);
    const TensorInfo info = read_tensor(fresh.get());
    prefer_huge_pages(fresh, device, info.numel * fresh.element_size());
    return fresh;
  }
  const TensorInfo info = read_tensor(given->get());
  bool fits = info.strided_layout && info.dim == static_cast<int64_t>(dim) && is_contiguous(info);
  for (size_t d = 0; fits && d < dim; ++d) fits = info.sizes[d] == sizes[d];
  const auto wanted = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  FASTAMP_CHECK(fits && info.dtype == wanted, op, ": ", name, " must be contiguous, of the result's shape and ",
                dtype_name(wanted), ", got ", info.numel, " elements of ", dtype_name(info.dtype));
  check_device(op, name, info, "the input", device);
  return *given;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t numel_of(const char* op, const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) {
    FASTAMP_CHECK(size >= 0, op, ": shape must hold no negative size, got ", size);
    FASTAMP_CHECK(!__builtin_mul_overflow(numel, size, &numel), op, ": shape has too many elements");
  }
  return numel;
}

// What a caller may bring along: null where it does not.
struct Given {
  const Tensor *found_inf = nullptr, *amax = nullptr, *payload = nullptr, *scales = nullptr;
};

std::tuple<Tensor, Tensor> quantize(const char* op, const Tensor& x, const Given& by_caller, const std::string& format,
                                    int64_t block_size, bool stochastic, std::optional<int64_t> seed, int64_t offset,
                                    const std::optional<Tensor>& base) {
  const TensorInfo given = read_tensor(x.get());
  Quantize args{};
  args.dtype = codec_dtype(op, "x", given.dtype);
  const auto* const entry =
      std::find_if(std::begin(kFormats), std::end(kFormats), [&](const auto& known) { return format == known.name; });
  FASTAMP_CHECK(entry != std::end(kFormats), op, ": format must be one of int8, int4, fp8_e4m3, fp8_e5m2, got ",
                format);
  FASTAMP_CHECK(block_size >= kMinBlockSize && block_size <= kMaxBlockSize && (block_size & (block_size - 1)) == 0, op,
                ": block_size must be a power of two from ", kMinBlockSize, " to ", kMaxBlockSize, ", got ",
                block_size);
  FASTAMP_CHECK(!stochastic || seed, op, ": stochastic rounding needs a seed");
  FASTAMP_CHECK(offset >= 0, op, ": offset must not be negative, got ", offset);
  auto scalar_data = [&](const char* name, const Tensor* scalar) {
    return scalar ? static_cast<float*>(read_float_scalar(op, name, *scalar, &given.device).data) : nullptr;
  };
  args.found_inf = scalar_data("found_inf", by_caller.found_inf);
  args.amax = scalar_data("amax", by_caller.amax);
  std::optional<Flat> flat_base;
  if (base) flat_base = read_base(op, *base, given.dtype, given.sizes, given.dim, given.device, "x");
  const Flat flat(op, "x", x);

  args.x = flat.info.data;
  args.base = flat_base ? flat_base->info.data : nullptr;
  args.numel = given.numel;
  args.format = entry->format;
  args.block_size = static_cast<int32_t>(block_size);
  args.stochastic = stochastic;
  args.seed = static_cast<uint64_t>(seed.value_or(0));
  args.offset = static_cast<uint64_t>(offset);
  const Backend backend(op, given.device);
  const int64_t bytes = payload_bytes(args.format, args.numel), blocks = ceil_div(args.numel, block_size);
  Tensor payload = result(op, "out[0]", by_caller.payload, x, given.device, &bytes, 1, entry->payload);
  Tensor scales = result(op, "out[1]", by_caller.scales, x, given.device, &blocks, 1, ScalarType::Float);
  args.payload = static_cast<uint8_t*>(payload.data_ptr());
  args.scales = static_cast<float*>(scales.data_ptr());
  if (args.numel) backend->quantize(args, backend.stream());
  return {payload, scales};
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_blockwise(Tensor x, std::string format, int64_t block_size, bool stochastic,
                                              std::optional<int64_t> seed, int64_t offset, std::optional<Tensor> base) {
  return quantize("quantize_blockwise", x, {}, format, block_size, stochastic, seed, offset, base);
}

std::tuple<Tensor, Tensor> quantize_blockwise_stats(Tensor x, Tensor found_inf, Tensor amax, std::string format,
                                                    int64_t block_size, bool stochastic, std::optional<int64_t> seed,
                                                    int64_t offset, std::optional<Tensor> base) {
  return quantize("quantize_blockwise_stats_", x, {&found_inf, &amax}, format, block_size, stochastic, seed, offset,
                  base);
}

void quantize_blockwise_out(Tensor x, std::string format, int64_t block_size, bool stochastic,
                            std::optional<int64_t> seed, int64_t offset, std::optional<Tensor> base, Tensor payload,
                            Tensor scales) {
  quantize("quantize_blockwise", x, {nullptr, nullptr, &payload, &scales}, format, block_size, stochastic, seed, offset,
           base);
}

namespace {

Tensor dequantize(const Tensor& payload, const Tensor& scales, const std::vector<int64_t>& shape, ScalarType dtype,
                  const std::optional<Tensor>& base, const Tensor* given) {
  const char* op = "dequantize_blockwise";
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  Dequantize args{};
  args.dtype = codec_dtype(op, "dtype", code);
  args.numel = numel_of(op, shape);
  const TensorInfo codes = read_tensor(payload.get()), blocks = read_tensor(scales.get());
  const auto* const entry = std::find_if(std::begin(kFormats), std::end(kFormats), [&](const auto& known) {
    return codes.dtype == torch::stable::detail::to<int32_t>(torch::stable::detail::from(known.payload));
  });
  FASTAMP_CHECK(entry != std::end(kFormats), op,
                ": payload must be torch.int8, torch.uint8 (int4), torch.float8_e4m3fn or torch.float8_e5m2, got ",
                dtype_name(codes.dtype));
  args.format = entry->format;
  const int64_t bytes = payload_bytes(args.format, args.numel);
  FASTAMP_CHECK(codes.numel == bytes, op, ": payload must hold ", bytes, " elements for a shape of ", args.numel,
                " elements in ", entry->name, ", got ", codes.numel);
  FASTAMP_CHECK(blocks.dtype == aoti_torch_dtype_float32(), op, ": scales must be torch.float32, got ",
                dtype_name(blocks.dtype));
  check_device(op, "scales", blocks, "payload", codes.device);
  // Any number of scales above one belongs to at most one power of two; one scale is one block, however large.
  int64_t block_size = kMinBlockSize;
  while (block_size < kMaxBlockSize && ceil_div(args.numel, block_size) > blocks.numel) block_size *= 2;
  FASTAMP_CHECK(ceil_div(args.numel, block_size) == blocks.numel, op,
                ": scales must hold one element for each block of ", kMinBlockSize, " to ", kMaxBlockSize,
                " (a power of two) of ", args.numel, " elements, got ", blocks.numel);
  args.block_size = static_cast<int32_t>(block_size);
  std::optional<Flat> flat_base;
  if (base)
    flat_base =
        read_base(op, *base, code, shape.data(), static_cast<int64_t>(shape.size()), codes.device, "the output");
  const Flat flat_codes(op, "payload", payload), flat_scales(op, "scales", scales);

  args.payload = static_cast<const uint8_t*>(flat_codes.info.data);
  args.scales = static_cast<const float*>(flat_scales.info.data);
  args.base = flat_base ? flat_base->info.data : nullptr;
  const Backend backend(op, codes.device);
  Tensor out = result(op, "out", given, payload, codes.device, shape.data(), shape.size(), dtype);
  args.out = out.data_ptr();
  if (args.numel) backend->dequantize(args, backend.stream());
  return out;
}

}  // namespace

Tensor dequantize_blockwise(Tensor payload, Tensor scales, std::vector<int64_t> shape, ScalarType dtype,
                            std::optional<Tensor> base) {
  return dequantize(payload, scales, shape, dtype, base, nullptr);
}

void dequantize_blockwise_out(Tensor payload, Tensor scales, std::vector<int64_t> shape, ScalarType dtype,
                              std::optional<Tensor> base, Tensor out) {
  dequantize(payload, scales, shape, dtype, base, &out);
}

Tensor pack_bits(Tensor mask) {
  const char* op = "pack_bits";
  const TensorInfo given = read_tensor(mask.get());
  FASTAMP_CHECK(given.dtype == aoti_torch_dtype_bool(), op, ": mask must be torch.bool, got ", dtype_name(given.dtype),
                "; pack_scaled_mask takes floating masks");
  const Flat flat(op, "mask", mask);
  const Backend backend(op, given.device);
  Tensor payload = empty_on(mask, ceil_div(given.numel, 8), ScalarType::Byte);
  if (given.numel)
    backend->pack_bits(static_cast<const uint8_t*>(flat.info.data), given.numel,
                       static_cast<uint8_t*>(payload.data_ptr()), backend.stream());
  return payload;
}

std::tuple<Tensor, Tensor> pack_scaled_mask(Tensor x) {
  const char* op = "pack_scaled_mask";
  const TensorInfo given = read_tensor(x.get());
  const auto dtype = kernel_dtype(given.dtype);
  FASTAMP_CHECK(dtype && !dtype->complex, op, ": x must be a floating-point tensor, got ", dtype_name(given.dtype));
  const Flat flat(op, "x", x);
  const Backend backend(op, given.device);
  Tensor payload = empty_on(x, ceil_div(given.numel, 8), ScalarType::Byte);
  const torch::headeronly::IntHeaderOnlyArrayRef scalar_shape(nullptr, size_t{0});
  Tensor value = given.numel ? torch::stable::new_empty(x, scalar_shape) : torch::stable::new_zeros(x, scalar_shape);
  if (given.numel) {
    const int64_t words = 2;
    const Tensor seen = torch::stable::new_zeros(x, {&words, 1}, ScalarType::Long);
    backend->pack_scaled_mask({dtype->dtype, flat.info.data, given.numel, static_cast<uint8_t*>(payload.data_ptr()),
                               value.data_ptr(), static_cast<uint64_t*>(seen.data_ptr())},
                              backend.stream());
  }
  return {payload, value};
}

Tensor unpack_bits(Tensor payload, std::vector<int64_t> shape, std::optional<Tensor> value) {
  const char* op = "unpack_bits";
  UnpackBits args{};
  args.numel = numel_of(op, shape);
  const TensorInfo given = read_tensor(payload.get());
  const int64_t bytes = ceil_div(args.numel, 8);
  FASTAMP_CHECK(given.dtype == aoti_torch_dtype_uint8(), op, ": payload must be torch.uint8, got ",
                dtype_name(given.dtype));
  FASTAMP_CHECK(given.numel == bytes, op, ": payload must hold ", bytes, " bytes for a shape of ", args.numel,
                " elements, got ", given.numel);
  if (value) {
    const TensorInfo scalar = read_tensor(value->get());
    const auto dtype = kernel_dtype(scalar.dtype);
    FASTAMP_CHECK(dtype && !dtype->complex && scalar.strided_layout && scalar.numel == 1, op,
                  ": value must hold one floating-point element, got ", scalar.numel, " of ", dtype_name(scalar.dtype));
    check_device(op, "value", scalar, "payload", given.device);
    args.dtype = dtype->dtype;
    args.value = scalar.data;
  }
  const Flat flat(op, "payload", payload);
  const Backend backend(op, given.device);
  Tensor out = value ? torch::stable::new_empty(*value, {shape.data(), shape.size()})
                     : torch::stable::new_empty(payload, {shape.data(), shape.size()}, ScalarType::Bool);
  args.payload = static_cast<const uint8_t*>(flat.info.data);
  args.out = out.data_ptr();
  if (args.numel) backend->unpack_bits(args, backend.stream());
  return out;
}

}  // namespace fastamp
