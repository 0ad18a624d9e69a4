// fastamp::unscale_, check_, unscale_norm_, clip_, accumulate_: checks, sorting by dtype, and the call of the launcher.
#include "unscale.h"

#include <optional>

#include "ops.h"
#include "tensor_list.h"

namespace fastamp {

using torch::headeronly::ScalarType;

void unscale_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads("unscale_", "grads", stack[0]);
  const auto found_inf = argument<Tensor>(stack[1]), inv_scale = argument<Tensor>(stack[2]);
  const TensorInfo found = read_float_scalar("unscale_", "found_inf", found_inf);
  const TensorInfo inv = read_float_scalar("unscale_", "inv_scale", inv_scale, &found.device);
  const Buckets buckets = make_buckets(grads, found.device);
  const Backend backend("unscale_", found.device);
  buckets.for_each_in_turn(backend->one_thread_elements, [&](const TensorSpan& span, bool) {
    backend->unscale(span, static_cast<const float*>(inv.data), static_cast<float*>(found.data), backend.stream());
  });
}

void check_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads("check_", "grads", stack[0]);
  const auto found_inf = argument<Tensor>(stack[1]);
  const TensorInfo found = read_float_scalar("check_", "found_inf", found_inf);
  const Buckets buckets = make_buckets(grads, found.device);
  const Backend backend("check_", found.device);
  buckets.for_each(
      [&](const TensorSpan& span, bool) { backend->check(span, static_cast<float*>(found.data), backend.stream()); });
}

void unscale_norm_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads("unscale_norm_", "grads", stack[0]);
  const auto found_inf = argument<Tensor>(stack[1]), inv_scale = argument<Tensor>(stack[2]);
  const TensorInfo found = read_float_scalar("unscale_norm_", "found_inf", found_inf);
  const TensorInfo inv = read_float_scalar("unscale_norm_", "inv_scale", inv_scale, &found.device);
  const Buckets buckets = make_buckets(grads, found.device);
  const Backend backend("unscale_norm_", found.device);

  const int64_t count = buckets.count;
  bool float64 = count > 0;
  for (int d = 0; d < 4; ++d) float64 &= static_cast<DType>(d) == DType::kFloat64 || buckets.by_dtype[d].empty();
  const ScalarType out_dtype = float64 ? ScalarType::Double : ScalarType::Float;
  // Both results start as zeros only where no kernel will write them.
  const int64_t zero_dim = 0;
  const torch::headeronly::IntHeaderOnlyArrayRef scalar_shape(&zero_dim, size_t{0});
  Tensor total = count ? torch::stable::new_empty(found_inf, scalar_shape, out_dtype)
                       : torch::stable::new_zeros(found_inf, scalar_shape, out_dtype);
  Tensor norms = empty_on(found_inf, count, out_dtype);
  if (count) {
    const Tensor workspace = empty_on(found_inf, 2 * count + kMaxNormBlocks, ScalarType::Double);
    const Tensor ticket = make_ticket(backend, found.device, found_inf);
    NormOutput output{};
    output.sum_of_squares = static_cast<double*>(workspace.data_ptr());
    output.partials = output.sum_of_squares + count;
    output.ticket = static_cast<unsigned*>(ticket.data_ptr());
    output.norms = norms.data_ptr();
    output.total = total.data_ptr();
    output.count = count;
    output.float64 = float64;
    const auto* by = static_cast<const float*>(inv.data);
    std::optional<Tensor> one;
    if (buckets.repeats()) {  // the norm is of what all of the list's divisions leave
      buckets.for_each_in_turn(0, [&](const TensorSpan& span, bool) {
        backend->unscale(span, by, static_cast<float*>(found.data), backend.stream());
      });
      one = torch::stable::fill_(empty_on(found_inf, 1, ScalarType::Float), 1.0);
      by = static_cast<const float*>(one->data_ptr());
    }
    buckets.for_each([&](const TensorSpan& span, bool last) {
      output.finish = last;
      backend->unscale_norm(span, by, static_cast<float*>(found.data), output, backend.stream());
    });
  }
  stack[0] = torch::stable::detail::from(total);
  stack[1] = torch::stable::detail::from(norms);
}

void clip_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads("clip_", "grads", stack[0]);
  const auto coefficient = argument<Tensor>(stack[1]);
  const bool float64 = read_tensor(coefficient.get()).dtype == aoti_torch_dtype_float64();
  const TensorInfo by =
      float64 ? read_scalar("clip_", "coefficient", coefficient, aoti_torch_dtype_float64(), "torch.float64")
              : read_float_scalar("clip_", "coefficient", coefficient);
  const Buckets buckets = make_buckets(grads, by.device);
  const Backend backend("clip_", by.device);
  buckets.for_each_in_turn(backend->one_thread_elements, [&](const TensorSpan& span, bool) {
    backend->clip(span, {by.data, float64}, backend.stream());
  });
}

void accumulate_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList main_grads("accumulate_", "main_grads", stack[0]);
  const TensorList grads("accumulate_", "grads", stack[1]);
  const auto found_inf = argument<Tensor>(stack[2]), inv_scale = argument<Tensor>(stack[3]);
  const TensorInfo found = read_float_scalar("accumulate_", "found_inf", found_inf);
  const TensorInfo inv = read_float_scalar("accumulate_", "inv_scale", inv_scale, &found.device);
  FASTAMP_CHECK(main_grads.size() == grads.size(), "accumulate_: main_grads and grads must have the same length, got ",
                main_grads.size(), " and ", grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const TensorInfo &m = main_grads.tensors()[i], &g = grads.tensors()[i];
    FASTAMP_CHECK(m.dtype == aoti_torch_dtype_float32(), main_grads.item(i), " must be torch.float32, got ",
                  dtype_name(m.dtype));
    const auto dtype = kernel_dtype(g.dtype);
    FASTAMP_CHECK(dtype && !dtype->complex && dtype->dtype != DType::kFloat64, grads.item(i),
                  " must be torch.float16, torch.bfloat16 or torch.float32, got ", dtype_name(g.dtype));
    bool same = m.dim == g.dim;
    for (int64_t d = 0; same && d < m.dim; ++d) same = m.sizes[d] == g.sizes[d];
    FASTAMP_CHECK(same, main_grads.item(i), " and ", grads.item(i), " must have the same shape");
  }
  const Buckets buckets = make_buckets(main_grads, found.device, &grads);
  const Backend backend("accumulate_", found.device);
  // Sums of several dtypes into one tensor are taken in the list's order, in a list of any size.
  buckets.for_each_in_turn(0, [&](const TensorSpan& span, bool) {
    backend->accumulate(span, static_cast<const float*>(inv.data), static_cast<float*>(found.data), backend.stream());
  });
}

}  // namespace fastamp
