// Gradient unscaling: the contract of the launchers behind fastamp::unscale_, check_, unscale_norm_, clip_ and
// accumulate_. Torch-free. CPU twin: cpu/unscale_kernel.cpp; CUDA kernels: cuda/unscale.cuh.
//
// Arithmetic, the same on every backend. opmath is float, and double for float64 tensors.
//   unscale     g = T(opmath(g) * opmath(inv_scale)); untouched where inv_scale == 1
//               found_inf = 1 if any stored g is not finite
//   check       as unscale, without the product and without the store
//   clip        g = T(opmath(g) * opmath(coefficient)); untouched where coefficient == 1
//   accumulate  m = m + float(g) * inv_scale, each operation rounded to float; found_inf = 1 if any stored m is
//               not finite
// found_inf is only ever set to 1, never cleared: several launches combine into one flag.
// No memory may be listed twice in a span that is written: threads share out its elements (buckets.h makes turns).
#pragma once

#include <cstdint>

#include "tensor_ref.h"

namespace fastamp {

// Upper bound of the blocks (CUDA) or chunks a tensor list is cut into for the norm; the partial sums of one call
// number at most kMaxNormBlocks + tensors, so that no workspace grows with the gradients.
constexpr int64_t kMaxNormBlocks = 4096;

// A list of up to this many elements is one chunk, and one thread's, on the CPU. Small enough to share among threads
// and stay in the second-level cache; large enough that a chunk costs far more than handing it out.
constexpr int64_t kMinChunkElements = 1 << 15;

// Where unscale_norm leaves its sums. A call covers the tensors of one span; the call with `finish` set also
// computes the total over sum_of_squares[0, count), which earlier calls on the same stream have filled.
struct NormOutput {
  double* sum_of_squares;  // [count], one a tensor at TensorRef::index: workspace
  double* partials;        // [kMaxNormBlocks + count]: workspace
  unsigned* ticket;        // one counter, 0 before and after each call: the last block to draw finishes the sums
  void* norms;             // [count] float, or double if float64: the L2 norm of each tensor
  void* total;             // [1]: the L2 norm of all of them
  int64_t count;
  bool float64;
  bool finish;
};

// A scalar on the device: float, or double if float64.
struct DeviceScalar {
  const void* data;
  bool float64;
};

#define FASTAMP_DECLARE_UNSCALE_LAUNCHERS                                                                        \
  void unscale(const TensorSpan& grads, const float* inv_scale, float* found_inf, void* stream);                 \
  void check(const TensorSpan& grads, float* found_inf, void* stream);                                           \
  void unscale_norm(const TensorSpan& grads, const float* inv_scale, float* found_inf, const NormOutput& output, \
                    void* stream);                                                                               \
  void clip(const TensorSpan& grads, DeviceScalar coefficient, void* stream);                                    \
  /* grads.dense[i].data is the float main gradient, .source the gradient of grads.dtype */                      \
  void accumulate(const TensorSpan& grads, const float* inv_scale, float* found_inf, void* stream);

namespace cpu {
FASTAMP_DECLARE_UNSCALE_LAUNCHERS
}
namespace cuda {
FASTAMP_DECLARE_UNSCALE_LAUNCHERS
bool is_capturing(void* stream);  // into a CUDA graph
}  // namespace cuda
#undef FASTAMP_DECLARE_UNSCALE_LAUNCHERS

}  // namespace fastamp
