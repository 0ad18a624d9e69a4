// Loss scaling and the scale's update: the contract of the launchers behind fastamp::scale_losses,
// fastamp::update_scale_ and fastamp::clip_coefficient. Torch-free. CPU twin: cpu/scale_kernel.cpp; CUDA kernels:
// cuda/scale.cuh.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "tensor_ref.h"
#include "unscale.h"

namespace fastamp {

constexpr int kMaxFoundInfs = 256;

// One step of dynamic loss scaling:
//   overflow = any of found_infs is not 0
//   overflow:      tracker = 0; hysteresis_left -= 1; where that reaches 0: scale = max(scale * backoff, min_scale)
//   no overflow:   hysteresis_left = hysteresis; tracker += 1; where it equals growth_interval:
//                  tracker = 0; scale = min(scale * growth, max_scale) unless that is not finite
// The products are taken in double and rounded once to float, as torch's _amp_update_scale_ does. Without
// hysteresis (nullptr) every overflow backs off.
struct ScaleUpdate {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_left;  // or nullptr
  double growth_factor, backoff_factor;
  int64_t growth_interval;
  int32_t hysteresis;
  float min_scale;  // 0 where unset
  float max_scale;  // +inf where unset
  int32_t num_found_infs;
  const float* found_infs[kMaxFoundInfs];

  void set_limits(std::optional<double> smallest, std::optional<double> largest) {
    min_scale = static_cast<float>(smallest.value_or(0.0));
    max_scale = static_cast<float>(largest.value_or(std::numeric_limits<double>::infinity()));
  }
};

#define FASTAMP_DECLARE_SCALE_LAUNCHERS                                                                      \
  void update_scale(const ScaleUpdate& update, void* stream);                                                \
  /* *coefficient = min(max_norm * (1 / (total + 1e-6)), 1), of total's dtype, as torch's clip_grad_norm_ */ \
  /* computes it; NaN stays NaN */                                                                           \
  void clip_coefficient(DeviceScalar total, double max_norm, void* coefficient, void* stream);               \
  /* losses.dense[i].data = source * scale; data is float where widen, else of losses.dtype like source */   \
  void scale_losses(const TensorSpan& losses, bool widen, const float* scale, void* stream);

namespace cpu {
FASTAMP_DECLARE_SCALE_LAUNCHERS
}
namespace cuda {
FASTAMP_DECLARE_SCALE_LAUNCHERS
}
#undef FASTAMP_DECLARE_SCALE_LAUNCHERS

}  // namespace fastamp
