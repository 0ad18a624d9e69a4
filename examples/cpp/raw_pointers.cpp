// Unscale, check, norm, clip, scale update and block quantisation on plain memory: no tensor class, only pointers and
// a stream. Prints what it finds, and exits with 1 if a result is not what its formula says.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include <fastamp/launchers.h>

namespace {

void expect(bool holds, const char* what) {
  std::printf("%s %s\n", holds ? "ok    " : "FAILED", what);
  if (!holds) std::exit(1);
}

bool close(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance * std::abs(b); }

}  // namespace

int main() {
  // 1 gives the table for CUDA memory, or nullptr if the library was built without.
  const fastamp::Launchers* launchers = fastamp_launchers(0);
  expect(launchers != nullptr && launchers->version == fastamp::kLaunchersVersion,
         "header and library belong together");
  void* stream = launchers->current_stream(0);  // for CUDA: a cudaStream_t; all work below is queued on it

  // Two gradients of one type, scaled by 1024.
  std::vector<float> first(1000), second(37);
  for (size_t i = 0; i < first.size(); ++i) first[i] = 1024.0f * (0.001f * i);
  for (size_t i = 0; i < second.size(); ++i) second[i] = -1024.0f;
  const fastamp::TensorRef refs[] = {{first.data(), nullptr, int64_t(first.size()), 0},
                                     {second.data(), nullptr, int64_t(second.size()), 1}};
  const fastamp::TensorSpan grads = {fastamp::DType::kFloat32, refs, 2, nullptr, 0};
  const float inv_scale = 1.0f / 1024.0f;
  float found_inf = 0.0f;

  // One pass: unscale in place, look for infinities and NaN, and take the L2 norms.
  float norms[2], total;
  std::vector<double> sums(2), partials(fastamp::kMaxNormBlocks + 2);
  unsigned ticket = 0;
  launchers->unscale_norm(grads, &inv_scale, &found_inf,
                          {sums.data(), partials.data(), &ticket, norms, &total, 2, false, true}, stream);
  double squares = 37.0;
  for (size_t i = 0; i < first.size(); ++i) squares += double(first[i]) * first[i];
  expect(close(first[500], 0.5, 1e-6) && second[0] == -1.0f && found_inf == 0.0f, "unscale_norm unscales");
  expect(close(total, std::sqrt(squares), 1e-5) && close(norms[1], std::sqrt(37.0), 1e-5), "unscale_norm measures");

  // Clip to norm 1; the coefficient stays in memory, so that nothing waits for it.
  float coefficient;
  launchers->clip_coefficient({&total, false}, 1.0, &coefficient, stream);
  launchers->clip(grads, {&coefficient, false}, stream);
  expect(close(second[0], -1.0 / std::sqrt(squares), 1e-5), "clip");

  // A step that overflows, and what becomes of the scale.
  second[36] = std::numeric_limits<float>::infinity();
  launchers->check(grads, &found_inf, stream);
  expect(found_inf == 1.0f, "check finds an infinity");
  float scale = 1024.0f;
  int32_t growth_tracker = 7;
  fastamp::ScaleUpdate update = {&scale, &growth_tracker, nullptr, 2.0, 0.5, 2000, 1, 1.0f,
                                 std::numeric_limits<float>::infinity(), 1, {&found_inf}};
  launchers->update_scale(update, stream);
  expect(scale == 512.0f && growth_tracker == 0, "update_scale backs off");

  // Keep an activation in a quarter of its bytes.
  std::vector<float> activation(1000), restored(1000);
  for (size_t i = 0; i < activation.size(); ++i) activation[i] = std::sin(0.1f * i);
  constexpr int32_t block = 128;
  constexpr fastamp::StorageFormat format = fastamp::StorageFormat::kInt8;
  std::vector<uint8_t> payload(fastamp::payload_bytes(format, 1000));
  std::vector<float> scales((1000 + block - 1) / block);
  launchers->quantize({fastamp::DType::kFloat32, activation.data(), nullptr, 1000, format, block, false, 0, 0,
                       payload.data(), scales.data(), nullptr, nullptr},
                      stream);
  launchers->dequantize({fastamp::DType::kFloat32, restored.data(), nullptr, 1000, format, block, payload.data(),
                         scales.data()},
                        stream);
  float worst = 0.0f;
  for (size_t i = 0; i < activation.size(); ++i) worst = std::max(worst, std::abs(activation[i] - restored[i]));
  std::printf("       largest error of int8: %.5f\n", worst);
  expect(worst > 0.0f && worst <= 1.0f / 250.0f, "quantize and dequantize");
  return 0;
}
