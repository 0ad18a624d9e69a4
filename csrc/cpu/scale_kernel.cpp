// CPU twin of cuda/scale.cuh: the contract is in ../scale.h.
#include "../scale.h"

#include <cmath>

#include "parallel.h"
#include "simd.h"

namespace fastamp::cpu {
namespace {

template <class In, class Out>
void scale_span(const In* in, Out* out, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) out[i] = Element<Out>::store(Element<In>::load(in[i]) * scale);
}

template <class In, class Out>
void scale_list(const TensorSpan& losses, float scale) {
  Chunks(losses).for_each_segment([&](int64_t t, int64_t begin, int64_t end, int64_t) {
    const TensorRef& ref = losses.dense[t];
    scale_span(static_cast<const In*>(ref.source) + begin, static_cast<Out*>(ref.data) + begin, end - begin, scale);
  });
  for (int64_t s = 0; s < losses.num_strided; ++s) {
    const StridedRef& ref = losses.strided[s];
    for_each_element(ref, [&](int64_t at, int64_t source_at) {
      scale_span(static_cast<const In*>(ref.source) + source_at, static_cast<Out*>(ref.data) + at, 1, scale);
    });
  }
}

template <class F>
F coefficient_of(F total, double max_norm) {
  // torch computes max_norm / (total + 1e-6) as a reciprocal and a product.
  const F reciprocal = F(1) / (total + static_cast<F>(1e-6));
  const F coefficient = reciprocal * static_cast<F>(max_norm);
  return coefficient > F(1) ? F(1) : coefficient;
}

}  // namespace

void update_scale(const ScaleUpdate& update, void*) {
  bool overflow = false;
  for (int32_t i = 0; i < update.num_found_infs; ++i) overflow |= *update.found_infs[i] != 0.0f;
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
  if (std::isfinite(grown)) *update.scale = grown > update.max_scale ? update.max_scale : grown;
}

void clip_coefficient(DeviceScalar total, double max_norm, void* coefficient, void*) {
  if (total.float64) {
    *static_cast<double*>(coefficient) = coefficient_of(*static_cast<const double*>(total.data), max_norm);
  } else {
    *static_cast<float*>(coefficient) = coefficient_of(*static_cast<const float*>(total.data), max_norm);
  }
}

void scale_losses(const TensorSpan& losses, bool widen, const float* scale, void*) {
  switch (losses.dtype) {
    case DType::kFloat32: return scale_list<float, float>(losses, *scale);
    case DType::kFloat64: return scale_list<double, double>(losses, *scale);
    case DType::kFloat16: return widen ? scale_list<F16, float>(losses, *scale) : scale_list<F16, F16>(losses, *scale);
    case DType::kBFloat16:
      return widen ? scale_list<BF16, float>(losses, *scale) : scale_list<BF16, BF16>(losses, *scale);
  }
}

}  // namespace fastamp::cpu
