// 128-bit global memory accesses and the conversions between a stored element type and the type it is computed in.
#pragma once

#include <cstring>

#include "runtime.cuh"

namespace fastamp {

// The type arithmetic is done in: float for everything narrower, double for double.
template <class T>
struct Opmath {
  using type = float;
};
template <>
struct Opmath<double> {
  using type = double;
};
template <class T>
using opmath_t = typename Opmath<T>::type;

// Stored element -> arithmetic type. Always exact.
__host__ __device__ __forceinline__ float to_float(float x) { return x; }
__host__ __device__ __forceinline__ double to_float(double x) { return x; }
__host__ __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__host__ __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Arithmetic type -> stored element, rounded to nearest even as torch does.
template <class T>
__host__ __device__ __forceinline__ T from_float(opmath_t<T> x);
template <>
__host__ __device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__host__ __device__ __forceinline__ double from_float<double>(double x) {
  return x;
}
template <>
__host__ __device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__host__ __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// As many elements as one 128-bit access moves.
template <class T>
struct alignas(16) Vec {
  static constexpr int N = 16 / sizeof(T);
  T v[N];
};

// One 128-bit load or store of global memory; the address must be a multiple of 16 bytes. Going through uint4 makes
// the load one instruction whatever the compiler thinks of the members of T. The store is written out: nvcc cuts a
// plain one into up to four, by what it knows of the words' origin.
template <class T>
__device__ __forceinline__ Vec<T> load128(const T* address) {
  const uint4* const source = reinterpret_cast<const uint4*>(address);
  check_alignment(source, "load128");
  const uint4 bits = *source;
  Vec<T> result;
  memcpy(&result, &bits, sizeof(bits));
  return result;
}

template <class T>
__device__ __forceinline__ void store128(T* address, const Vec<T>& value) {
  uint4* const target = reinterpret_cast<uint4*>(address);
  check_alignment(target, "store128");
  uint4 bits;
  memcpy(&bits, &value, sizeof(bits));
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(bits.x),
               "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
#else
  *target = bits;
#endif
}

}  // namespace fastamp
