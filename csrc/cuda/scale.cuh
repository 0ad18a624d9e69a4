// The kernels behind fastamp::update_scale_, clip_coefficient and scale_losses. The contract is in ../scale.h; the CPU
// twin in ../cpu/scale_kernel.cpp.
#pragma once

#include "../scale.h"
#include "multi_tensor.cuh"

namespace fastamp::cuda {

// ---- kernels ------------------------------------------------------------------------------------------------------

// One thread: there is one scale.
__global__ void update_scale_kernel(const __grid_constant__ ScaleUpdate update) {
  bool overflow = false;
  for (int i = 0; i < update.num_found_infs; ++i) overflow |= *update.found_infs[i] != 0.0f;
  if (overflow) {
    *update.growth_tracker = 0;
    if (update.hysteresis_left && --*update.hysteresis_left > 0) return;
    const float backed_off = static_cast<float>(*update.scale * update.backoff_factor);
    *update.scale = backed_off < update.min_scale ? update.min_scale : backed_off;
    return;
  }
  if (update.hysteresis_left) *update.hysteresis_left = update.hysteresis;
  const int32_t successful = *update.growth_tracker + 1;
  if (successful != update.growth_interval) {
    *update.growth_tracker = successful;
    return;
  }
  *update.growth_tracker = 0;
  const float grown = static_cast<float>(*update.scale * update.growth_factor);
  if (isfinite(grown)) *update.scale = grown > update.max_scale ? update.max_scale : grown;
}

template <class F>
__global__ void clip_coefficient_kernel(const F* total, double max_norm, F* coefficient) {
  const F reciprocal = F(1) / (*total + static_cast<F>(1e-6));
  const F product = reciprocal * static_cast<F>(max_norm);
  *coefficient = product > F(1) ? F(1) : product;
}

// Losses are scalars, or small: coalesced single elements are all that pays.
template <class In, class Out, class Table>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    scale_losses_kernel(const __grid_constant__ Table table, const float* scale) {
  const opmath_t<In> factor = *scale;
  for_each_segment<Chunk<In>::kElements>(table, [&](int tensor, int64_t begin, int64_t end) {
    Out* const out = static_cast<Out*>(table.address[0][tensor]);
    const In* const in = static_cast<const In*>(table.address[1][tensor]);
    for (int64_t i = begin + threadIdx.x; i < end; i += StreamPolicy::kThreads)
      out[i] = from_float<Out>(to_float(in[i]) * factor);
  });
}

template <class In, class Out>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    scale_losses_strided_kernel(const __grid_constant__ StridedRef ref, const float* scale) {
  const opmath_t<In> factor = *scale;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < ref.numel; i += step) {
    const In x = static_cast<const In*>(ref.source)[strided_offset(ref, ref.source_strides, i)];
    static_cast<Out*>(ref.data)[strided_offset(ref, ref.strides, i)] = from_float<Out>(to_float(x) * factor);
  }
}

}  // namespace fastamp::cuda
