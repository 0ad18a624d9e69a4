// The one header every kernel file includes: CUDA under nvcc, the project's emulator (tests/cuda_emulator) under
// any other compiler. The macros hide the few spellings that a plain C++ compiler cannot parse.
//
//   FASTAMP_LAUNCH(grid, block, shared_bytes, stream, kernel<T, 4>)(arguments...);
//   FASTAMP_SHARED(float, partial, 8);     // inside a kernel: __shared__ float partial[8]
//   FASTAMP_DYN_SHARED(float, scratch);    // inside a kernel: float* scratch, of the launch's shared_bytes
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#if defined(__CUDACC__)

#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

// The kernel comes last and is variadic, so that the commas of a template argument list need no parentheses.
#define FASTAMP_LAUNCH(grid, block, shared_bytes, stream, ...) __VA_ARGS__<<<grid, block, shared_bytes, stream>>>
#define FASTAMP_SHARED(T, name, N) __shared__ T name[N]
#define FASTAMP_DYN_SHARED(T, name)                                       \
  extern __shared__ __align__(16) unsigned char fastamp_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(fastamp_dynamic_shared)

namespace fastamp {

using Stream = cudaStream_t;

// Call after every launch: a bad configuration or an earlier asynchronous error is reported with the op's name.
// Does not synchronise.
inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(op) + ": CUDA kernel launch failed: " + cudaGetErrorString(error));
  }
}

// The most blocks that a launch may have. The emulator can lower it, so that its blocks loop over small inputs.
inline int64_t grid_limit(int64_t policy) { return policy; }

// Bytes of parameters that a kernel may take: 32,764 with driver and toolkit of CUDA 12.1 and later, else 4,096.
inline size_t parameter_limit() {
#if CUDART_VERSION >= 12010
  static const size_t limit = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010 ? size_t{32764} : size_t{4096};
  }();
  return limit;
#else
  return 4096;
#endif
}

// Whether work on the stream is being captured into a CUDA graph rather than run.
inline bool stream_is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

// Vector accesses call this so that the emulator can refuse a misaligned address as the hardware would.
template <class T>
__device__ __forceinline__ void check_alignment(const T*, const char*) {}

}  // namespace fastamp

#else

#include "cuda_emulator.h"

#define FASTAMP_LAUNCH(grid, block, shared_bytes, stream, ...) \
  ::cuda_emulator::make_launcher(dim3(grid), dim3(block), shared_bytes, stream, __FILE__, __LINE__, __VA_ARGS__)
// The unused static's address tells one array from another; every block has its own memory behind it.
#define FASTAMP_SHARED(T, name, N) \
  static char name##_key;          \
  T(&name)[N] = *static_cast<T(*)[N]>(::cuda_emulator::static_shared(&name##_key, sizeof(T[N]), alignof(T)))
#define FASTAMP_DYN_SHARED(T, name) T* name = static_cast<T*>(::cuda_emulator::dynamic_shared())

namespace fastamp {

using Stream = void*;

// An emulated launch has thrown already if it was refused.
inline void check_launch(const char*) {}

inline int64_t grid_limit(int64_t policy) { return std::min(policy, ::cuda_emulator::settings.grid_limit); }

inline size_t parameter_limit() { return ::cuda_emulator::settings.parameter_limit; }

inline bool stream_is_capturing(Stream) { return false; }

template <class T>
inline void check_alignment(const T* address, const char* access) {
  ::cuda_emulator::check_alignment(address, access);
}

}  // namespace fastamp

#endif
