// Launchers of scale.cuh. The contract is in ../scale.h.
#include "scale.cuh"

namespace fastamp::cuda {

void update_scale(const ScaleUpdate& update, void* stream) {
  FASTAMP_LAUNCH(1, 1, 0, static_cast<Stream>(stream), update_scale_kernel)(update);
  check_launch("update_scale_");
}

void clip_coefficient(DeviceScalar total, double max_norm, void* coefficient, void* stream) {
  const auto on = static_cast<Stream>(stream);
  if (total.float64) {
    FASTAMP_LAUNCH(1, 1, 0, on, clip_coefficient_kernel<double>)
    (static_cast<const double*>(total.data), max_norm, static_cast<double*>(coefficient));
  } else {
    FASTAMP_LAUNCH(1, 1, 0, on, clip_coefficient_kernel<float>)
    (static_cast<const float*>(total.data), max_norm, static_cast<float*>(coefficient));
  }
  check_launch("clip_coefficient");
}

namespace {

template <class In, class Out>
void scale_list(const TensorSpan& losses, const float* scale, Stream on) {
  for_each_launch<2, In>(losses.dense, losses.num_dense, [&](const auto& table, unsigned blocks, bool) {
    using Table = std::decay_t<decltype(table)>;
    FASTAMP_LAUNCH(blocks, StreamPolicy::kThreads, 0, on, scale_losses_kernel<In, Out, Table>)(table, scale);
    check_launch("scale_losses");
  });
  for (int64_t i = 0; i < losses.num_strided; ++i) {
    const StridedRef& ref = losses.strided[i];
    FASTAMP_LAUNCH(strided_blocks<In>(ref), StreamPolicy::kThreads, 0, on, scale_losses_strided_kernel<In, Out>)
    (ref, scale);
    check_launch("scale_losses");
  }
}

}  // namespace

void scale_losses(const TensorSpan& losses, bool widen, const float* scale, void* stream) {
  const auto on = static_cast<Stream>(stream);
  switch (losses.dtype) {
    case DType::kFloat32: return scale_list<float, float>(losses, scale, on);
    case DType::kFloat64: return scale_list<double, double>(losses, scale, on);
    case DType::kFloat16:
      return widen ? scale_list<__half, float>(losses, scale, on) : scale_list<__half, __half>(losses, scale, on);
    case DType::kBFloat16:
      return widen ? scale_list<__nv_bfloat16, float>(losses, scale, on)
                   : scale_list<__nv_bfloat16, __nv_bfloat16>(losses, scale, on);
  }
}

}  // namespace fastamp::cuda
