// Launchers of unscale.cuh: how a span of tensors becomes launches. The contract is in ../unscale.h.
#include "unscale.cuh"

namespace fastamp::cuda {

namespace {

constexpr int kThreads = StreamPolicy::kThreads;

}  // namespace

void unscale(const TensorSpan& grads, const float* inv_scale, float* found_inf, void* stream) {
  const auto on = static_cast<Stream>(stream);
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    for_each_launch<1, T>(grads.dense, grads.num_dense, [&](const auto& table, unsigned blocks, bool) {
      using Table = std::decay_t<decltype(table)>;
      FASTAMP_LAUNCH(blocks, kThreads, 0, on, unscale_kernel<T, Table>)(table, inv_scale, found_inf);
      check_launch("unscale_");
    });
    for (int64_t i = 0; i < grads.num_strided; ++i) {
      const StridedRef& ref = grads.strided[i];
      FASTAMP_LAUNCH(strided_blocks<T>(ref), kThreads, 0, on, unscale_strided_kernel<T>)(ref, inv_scale, found_inf);
      check_launch("unscale_");
    }
  });
}

void check(const TensorSpan& grads, float* found_inf, void* stream) {
  const auto on = static_cast<Stream>(stream);
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    for_each_launch<1, T>(grads.dense, grads.num_dense, [&](const auto& table, unsigned blocks, bool) {
      using Table = std::decay_t<decltype(table)>;
      FASTAMP_LAUNCH(blocks, kThreads, 0, on, check_kernel<T, Table>)(table, found_inf);
      check_launch("check_");
    });
    for (int64_t i = 0; i < grads.num_strided; ++i) {
      const StridedRef& ref = grads.strided[i];
      FASTAMP_LAUNCH(strided_blocks<T>(ref), kThreads, 0, on, check_strided_kernel<T>)(ref, found_inf);
      check_launch("check_");
    }
  });
}

void unscale_norm(const TensorSpan& grads, const float* inv_scale, float* found_inf, const NormOutput& output,
                  void* stream) {
  const auto on = static_cast<Stream>(stream);
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    NormOutput part = output;  // only the last launch of the span may finish the total
    for_each_launch<1, T>(grads.dense, grads.num_dense, [&](const auto& table, unsigned blocks, bool last) {
      using Table = std::decay_t<decltype(table)>;
      part.finish = output.finish && last && grads.num_strided == 0;
      FASTAMP_LAUNCH(blocks, kThreads, 0, on, unscale_norm_kernel<T, Table>)(table, inv_scale, found_inf, part);
      check_launch("unscale_norm_");
    });
    for (int64_t i = 0; i < grads.num_strided; ++i) {
      const StridedRef& ref = grads.strided[i];
      part.finish = output.finish && i + 1 == grads.num_strided;
      FASTAMP_LAUNCH(strided_blocks<T>(ref), kThreads, 0, on, unscale_norm_strided_kernel<T>)
      (ref, inv_scale, found_inf, part);
      check_launch("unscale_norm_");
    }
  });
}

void clip(const TensorSpan& grads, DeviceScalar coefficient, void* stream) {
  const auto on = static_cast<Stream>(stream);
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    for_each_launch<1, T>(grads.dense, grads.num_dense, [&](const auto& table, unsigned blocks, bool) {
      using Table = std::decay_t<decltype(table)>;
      FASTAMP_LAUNCH(blocks, kThreads, 0, on, clip_kernel<T, Table>)(table, coefficient);
      check_launch("clip_");
    });
    for (int64_t i = 0; i < grads.num_strided; ++i) {
      const StridedRef& ref = grads.strided[i];
      FASTAMP_LAUNCH(strided_blocks<T>(ref), kThreads, 0, on, clip_strided_kernel<T>)(ref, coefficient);
      check_launch("clip_");
    }
  });
}

void accumulate(const TensorSpan& grads, const float* inv_scale, float* found_inf, void* stream) {
  const auto on = static_cast<Stream>(stream);
  auto launch = [&](auto tag) {
    using T = decltype(tag);
    for_each_launch<2, T>(grads.dense, grads.num_dense, [&](const auto& table, unsigned blocks, bool) {
      using Table = std::decay_t<decltype(table)>;
      FASTAMP_LAUNCH(blocks, kThreads, 0, on, accumulate_kernel<T, Table>)(table, inv_scale, found_inf);
      check_launch("accumulate_");
    });
    for (int64_t i = 0; i < grads.num_strided; ++i) {
      const StridedRef& ref = grads.strided[i];
      FASTAMP_LAUNCH(strided_blocks<T>(ref), kThreads, 0, on, accumulate_strided_kernel<T>)
      (ref, inv_scale, found_inf);
      check_launch("accumulate_");
    }
  };
  // The op refuses float64 gradients, so no kernel is compiled for them.
  switch (grads.dtype) {
    case DType::kFloat16: return launch(__half{});
    case DType::kBFloat16: return launch(__nv_bfloat16{});
    default: return launch(float{});
  }
}

bool is_capturing(void* stream) { return stream_is_capturing(static_cast<Stream>(stream)); }

}  // namespace fastamp::cuda
