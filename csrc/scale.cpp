// fastamp::update_scale_, clip_coefficient, scale_losses: checks and the call of the launcher.
#include "scale.h"

#include <cmath>
#include <limits>

#include "ops.h"
#include "tensor_list.h"

namespace fastamp {

using torch::headeronly::ScalarType;

void update_scale_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "update_scale_";
  const auto scale = argument<Tensor>(stack[0]), tracker = argument<Tensor>(stack[1]);
  const TensorList found_infs(op, "found_infs", stack[2]);
  ScaleUpdate update{};
  update.growth_factor = argument<double>(stack[3]);
  update.backoff_factor = argument<double>(stack[4]);
  update.growth_interval = argument<int64_t>(stack[5]);
  const auto min_scale = argument<std::optional<double>>(stack[6]);
  const auto max_scale = argument<std::optional<double>>(stack[7]);
  const auto hysteresis = argument<int64_t>(stack[8]);
  const auto hysteresis_tracker = argument<std::optional<Tensor>>(stack[9]);

  const TensorInfo scale_info = read_float_scalar(op, "scale", scale);
  const Device device = scale_info.device;
  const TensorInfo tracker_info =
      read_scalar(op, "growth_tracker", tracker, aoti_torch_dtype_int32(), "torch.int32", &device);
  FASTAMP_CHECK(found_infs.size() >= 1 && found_infs.size() <= kMaxFoundInfs, op, ": found_infs must hold 1 to ",
                kMaxFoundInfs, " tensors, got ", found_infs.size());
  for (size_t i = 0; i < found_infs.size(); ++i) {
    const TensorInfo& f = found_infs.tensors()[i];
    FASTAMP_CHECK(f.strided_layout && f.dtype == aoti_torch_dtype_float32() && f.numel == 1, found_infs.item(i),
                  " must hold one torch.float32 element, got ", f.numel, " of ", dtype_name(f.dtype));
    FASTAMP_CHECK(f.device == device, found_infs.item(i), " must be on ", device.name(), " like scale, got ",
                  f.device.name(), ": move it with .to(scale.device, non_blocking=True)");
    update.found_infs[i] = static_cast<const float*>(f.data);
  }
  update.num_found_infs = static_cast<int32_t>(found_infs.size());
  FASTAMP_CHECK(update.growth_interval >= 1 && update.growth_interval <= std::numeric_limits<int32_t>::max(), op,
                ": growth_interval must be between 1 and 2147483647, got ", update.growth_interval);
  FASTAMP_CHECK(hysteresis >= 1 && hysteresis <= std::numeric_limits<int32_t>::max(), op,
                ": hysteresis must be between 1 and 2147483647, got ", hysteresis);
  FASTAMP_CHECK(hysteresis == 1 || hysteresis_tracker.has_value(), op, ": hysteresis = ", hysteresis,
                " needs hysteresis_tracker, a torch.int32 tensor of one element that starts at hysteresis");
  update.set_limits(min_scale, max_scale);
  FASTAMP_CHECK(update.min_scale <= update.max_scale, op, ": min_scale must not be above max_scale, got ",
                update.min_scale, " and ", update.max_scale);
  update.scale = static_cast<float*>(scale_info.data);
  update.growth_tracker = static_cast<int32_t*>(tracker_info.data);
  update.hysteresis = static_cast<int32_t>(hysteresis);
  if (hysteresis_tracker) {
    update.hysteresis_left = static_cast<int32_t*>(
        read_scalar(op, "hysteresis_tracker", *hysteresis_tracker, aoti_torch_dtype_int32(), "torch.int32", &device)
            .data);
  }
  const Backend backend(op, device);
  backend->update_scale(update, backend.stream());
}

void clip_coefficient_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const auto total = argument<Tensor>(stack[0]);
  const auto max_norm = argument<double>(stack[1]);
  const bool float64 = read_tensor(total.get()).dtype == aoti_torch_dtype_float64();
  const TensorInfo info =
      float64 ? read_scalar("clip_coefficient", "total_norm", total, aoti_torch_dtype_float64(), "torch.float64")
              : read_float_scalar("clip_coefficient", "total_norm", total);
  FASTAMP_CHECK(!std::isnan(max_norm), "clip_coefficient: max_norm must be a number, got NaN");
  const Backend backend("clip_coefficient", info.device);
  Tensor coefficient = torch::stable::empty_like(total);
  backend->clip_coefficient({info.data, float64}, max_norm, coefficient.data_ptr(), backend.stream());
  stack[0] = torch::stable::detail::from(coefficient);
}

std::vector<Tensor> scale_losses(std::vector<Tensor> losses, Tensor scale) {
  const char* op = "scale_losses";
  const TensorInfo scale_info = read_float_scalar(op, "scale", scale);
  // Outputs by input dtype and by whether they widen: torch promotes a 0-dim half loss times the float scale to float.
  Bucket buckets[4][2];
  std::vector<std::pair<int64_t, bool>> kinds;
  for (size_t i = 0; i < losses.size(); ++i) {
    const TensorInfo t = read_tensor(losses[i].get());
    const auto dtype = kernel_dtype(t.dtype);
    FASTAMP_CHECK(t.strided_layout && dtype && !dtype->complex, op, ": losses[", i,
                  "] must be a strided floating-point tensor, got ", dtype_name(t.dtype));
    FASTAMP_CHECK(t.device == scale_info.device, op, ": losses[", i, "] must be on ", scale_info.device.name(),
                  " like scale, got ", t.device.name());
    kinds.emplace_back(static_cast<int64_t>(dtype->dtype), t.dim == 0 && element_size(dtype->dtype) == 2);
  }
  std::vector<Tensor> outputs;
  outputs.reserve(losses.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto [dtype, widen] = kinds[i];
    const TensorInfo in = read_tensor(losses[i].get());
    const auto out_dtype = widen ? std::optional<ScalarType>(ScalarType::Float) : std::nullopt;
    outputs.push_back(torch::stable::new_empty(losses[i], losses[i].sizes(), out_dtype));
    const TensorInfo out = read_tensor(outputs.back().get());
    StridedRef strided;
    if (classify_layout(out.dim, out.sizes, out.strides, in.strides, &strided) == Layout::kDense) {
      buckets[dtype][widen].dense.push_back({out.data, in.data, out.numel, static_cast<int32_t>(i)});
    } else {
      strided.data = out.data;
      strided.source = in.data;
      strided.numel = out.numel;
      strided.index = static_cast<int32_t>(i);
      buckets[dtype][widen].strided.push_back(strided);
    }
  }
  const Backend backend(op, scale_info.device);
  for (int d = 0; d < 4; ++d)
    for (int widen = 0; widen < 2; ++widen) {
      const Bucket& b = buckets[d][widen];
      if (b.empty()) continue;
      const TensorSpan span{static_cast<DType>(d), b.dense.data(), static_cast<int64_t>(b.dense.size()),
                            b.strided.data(), static_cast<int64_t>(b.strided.size())};
      backend->scale_losses(span, widen, static_cast<const float*>(scale_info.data), backend.stream());
    }
  return outputs;
}

}  // namespace fastamp
