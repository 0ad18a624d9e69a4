// The kernels behind fastamp::unscale_, check_, unscale_norm_, clip_ and accumulate_. The contract is in ../unscale.h;
// the CPU twin in ../cpu/unscale_kernel.cpp.
#pragma once

#include "../unscale.h"
#include "multi_tensor.cuh"

namespace fastamp::cuda {

// What an element-wise pass does with each stored element. `found` collects what is not finite, `squares` the sum
// of squares of what is stored.
template <class T>
struct Multiply {
  opmath_t<T> factor;
  bool found = false;
  __device__ __forceinline__ void operator()(T& x) {
    x = from_float<T>(to_float(x) * factor);
    found |= !isfinite(to_float(x));
  }
};
template <class T>
struct Check {
  bool found = false;
  __device__ __forceinline__ void operator()(T& x) { found |= !isfinite(to_float(x)); }
};

// Squares are summed in opmath over one vector and from there on in double: at most 8 float additions in a row, and
// one double addition for every 16 bytes.
template <class T, class Pass>
struct WithSquares {
  Pass pass;
  double squares = 0;
  __device__ __forceinline__ void vector(Vec<T>& v) {
    opmath_t<T> sum = 0;
#pragma unroll
    for (int k = 0; k < Vec<T>::N; ++k) {
      pass(v.v[k]);
      const opmath_t<T> x = to_float(v.v[k]);
      sum = fma(x, x, sum);
    }
    squares += sum;
  }
  __device__ __forceinline__ void operator()(T& x) {
    pass(x);
    const double y = to_float(x);
    squares += y * y;
  }
};

// ---- kernels ------------------------------------------------------------------------------------------------------

template <bool kWrite, class T, class Table, class Pass>
__device__ __forceinline__ void run_dense(const Table& table, Pass& pass) {
  for_each_segment<Chunk<T>::kElements>(table, [&](int tensor, int64_t begin, int64_t end) {
    for_each_vector<kWrite>(
        static_cast<T*>(table.address[0][tensor]) + begin, end - begin,
        [&](Vec<T>& v) {
#pragma unroll
          for (int k = 0; k < Vec<T>::N; ++k) pass(v.v[k]);
        },
        [&](T& x) { pass(x); });
  });
}

template <bool kWrite, class T, class Pass>
__device__ __forceinline__ void run_strided(const StridedRef& ref, Pass& pass) {
  T* const p = static_cast<T*>(ref.data);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < ref.numel; i += step) {
    T& place = p[strided_offset(ref, ref.strides, i)];
    T x = place;
    pass(x);
    if (kWrite) place = x;
  }
}

template <class T, class Table>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    unscale_kernel(const __grid_constant__ Table table, const float* inv_scale, float* found_inf) {
  const float factor = *inv_scale;
  bool found;
  if (factor == 1.0f) {  // torch leaves the gradients alone, and so halves the traffic
    Check<T> pass;
    run_dense<false, T>(table, pass);
    found = pass.found;
  } else {
    Multiply<T> pass{factor};
    run_dense<true, T>(table, pass);
    found = pass.found;
  }
  report_found(found, found_inf);
}

template <class T>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    unscale_strided_kernel(const __grid_constant__ StridedRef ref, const float* inv_scale, float* found_inf) {
  Multiply<T> pass{*inv_scale};
  if (pass.factor == 1) {
    Check<T> check;
    run_strided<false, T>(ref, check);
    pass.found = check.found;
  } else {
    run_strided<true, T>(ref, pass);
  }
  report_found(pass.found, found_inf);
}

template <class T, class Table>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    check_kernel(const __grid_constant__ Table table, float* found_inf) {
  Check<T> pass;
  run_dense<false, T>(table, pass);
  report_found(pass.found, found_inf);
}

template <class T>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    check_strided_kernel(const __grid_constant__ StridedRef ref, float* found_inf) {
  Check<T> pass;
  run_strided<false, T>(ref, pass);
  report_found(pass.found, found_inf);
}

__device__ __forceinline__ double read_scalar(DeviceScalar scalar) {
  return scalar.float64 ? *static_cast<const double*>(scalar.data) : *static_cast<const float*>(scalar.data);
}

template <class T, class Table>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    clip_kernel(const __grid_constant__ Table table, DeviceScalar coefficient) {
  Multiply<T> pass{static_cast<opmath_t<T>>(read_scalar(coefficient))};
  if (pass.factor == 1) return;
  run_dense<true, T>(table, pass);
}

template <class T>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    clip_strided_kernel(const __grid_constant__ StridedRef ref, DeviceScalar coefficient) {
  Multiply<T> pass{static_cast<opmath_t<T>>(read_scalar(coefficient))};
  if (pass.factor == 1) return;
  run_strided<true, T>(ref, pass);
}

// The last block of a launch to draw the ticket finishes the sums; true in that block only. The ticket wraps to 0,
// ready for the next launch.
__device__ __forceinline__ bool draw_last_ticket(unsigned* ticket) {
  FASTAMP_SHARED(bool, last, 1);
  if (threadIdx.x == 0) {
    __threadfence();  // this block's partial sums are visible before its ticket is
    last[0] = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();  // and the others' before they are read
  }
  __syncthreads();
  return last[0];
}

__device__ __forceinline__ void write_norm(const NormOutput& output, void* to, int64_t at, double square) {
  if (output.float64) {
    static_cast<double*>(to)[at] = sqrt(square);
  } else {
    static_cast<float*>(to)[at] = static_cast<float>(sqrt(square));
  }
}

// The norms of all tensors of the call and their total, from sums that this block and earlier launches have written.
__device__ __forceinline__ void finish_norms(const NormOutput& output) {
  __syncthreads();  // the sums that other warps of this block wrote
  double total = 0;
  for (int64_t t = threadIdx.x; t < output.count; t += StreamPolicy::kThreads) {
    const double square = output.sum_of_squares[t];
    total += square;
    write_norm(output, output.norms, t, square);
  }
  total = block_sum(total);
  if (threadIdx.x == 0) write_norm(output, output.total, 0, total);
}

template <bool kWrite, class T, class Table, class Pass>
__device__ __forceinline__ bool run_dense_norm(const Table& table, const Pass& pass, const NormOutput& output) {
  bool found = false;
  for_each_segment<Chunk<T>::kElements>(table, [&](int tensor, int64_t begin, int64_t end) {
    WithSquares<T, Pass> with{pass};
    for_each_vector<kWrite>(
        static_cast<T*>(table.address[0][tensor]) + begin, end - begin, [&](Vec<T>& v) { with.vector(v); },
        [&](T& x) { with(x); });
    found |= with.pass.found;
    const double sum = block_sum(with.squares);
    // Walking blocks and tensors together, block + tensor grows by one from segment to segment: a place of its own
    // for each partial sum.
    if (threadIdx.x == 0) output.partials[blockIdx.x + tensor] = sum;
  });
  return found;
}

template <class T, class Table>
__global__ void __launch_bounds__(StreamPolicy::kThreads, StreamPolicy::kResidentBlocks)
    unscale_norm_kernel(const __grid_constant__ Table table, const float* inv_scale, float* found_inf,
                        const __grid_constant__ NormOutput output) {
  const float factor = *inv_scale;
  const bool found = factor == 1.0f ? run_dense_norm<false, T>(table, Check<T>{}, output)
                                    : run_dense_norm<true, T>(table, Multiply<T>{factor}, output);
  report_found(found, found_inf);
  if (!draw_last_ticket(output.ticket)) return;

  const int chunks = table.first_chunk[table.count];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int tensor = warp; tensor < table.count; tensor += StreamPolicy::kWarps) {
    double sum = 0;
    const int first_chunk = table.first_chunk[tensor], end_chunk = table.first_chunk[tensor + 1];
    if (end_chunk > first_chunk) {
      const int first = block_of(first_chunk, chunks, gridDim.x), last = block_of(end_chunk - 1, chunks, gridDim.x);
      for (int block = first + lane; block <= last; block += 32) sum += __ldcg(&output.partials[block + tensor]);
    }
    sum = warp_sum(sum);
    if (lane == 0) output.sum_of_squares[table.index[tensor]] = sum;
  }
  if (output.finish) finish_norms(output);
}

template <class T>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    unscale_norm_strided_kernel(const __grid_constant__ StridedRef ref, const float* inv_scale, float* found_inf,
                                const __grid_constant__ NormOutput output) {
  const float factor = *inv_scale;
  bool found;
  double squares;
  if (factor == 1.0f) {
    WithSquares<T, Check<T>> with{};
    run_strided<false, T>(ref, with);
    found = with.pass.found;
    squares = with.squares;
  } else {
    WithSquares<T, Multiply<T>> with{{factor}};
    run_strided<true, T>(ref, with);
    found = with.pass.found;
    squares = with.squares;
  }
  report_found(found, found_inf);
  const double sum = block_sum(squares);
  if (threadIdx.x == 0) output.partials[blockIdx.x] = sum;
  if (!draw_last_ticket(output.ticket)) return;

  double total = 0;
  for (int block = static_cast<int>(threadIdx.x); block < static_cast<int>(gridDim.x); block += StreamPolicy::kThreads)
    total += __ldcg(&output.partials[block]);
  total = block_sum(total);
  if (threadIdx.x == 0) output.sum_of_squares[ref.index] = total;
  if (output.finish) finish_norms(output);
}

// main = main + float(grad) * factor, as two roundings: what PyTorch's own operators would store.
template <class T>
__device__ __forceinline__ float accumulate_one(float main, T grad, float factor) {
  return __fadd_rn(main, __fmul_rn(static_cast<float>(to_float(grad)), factor));
}

template <class T, class Table>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    accumulate_kernel(const __grid_constant__ Table table, const float* inv_scale, float* found_inf) {
  // Vectors of the source set the pace: one of 16 bytes goes with one, two or (for double) half as many of floats.
  constexpr int kPerVector = Vec<T>::N, kFloats = Vec<float>::N, kThreads = StreamPolicy::kThreads;
  const float factor = *inv_scale;
  bool found = false;
  for_each_segment<Chunk<T>::kElements>(table, [&](int tensor, int64_t begin, int64_t end) {
    float* const main = static_cast<float*>(table.address[0][tensor]) + begin;
    const T* const grad = static_cast<const T*>(table.address[1][tensor]) + begin;
    const int64_t n = end - begin;
    const int thread = static_cast<int>(threadIdx.x);
    auto one = [&](int64_t i) {
      main[i] = accumulate_one(main[i], grad[i], factor);
      found |= !isfinite(main[i]);
    };
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(grad) % 16 / sizeof(T));
    int64_t head = min(n, static_cast<int64_t>(misaligned ? kPerVector - misaligned : 0));
    // Where the two operands are never aligned at the same element, all of it goes one by one.
    if (reinterpret_cast<uintptr_t>(main + head) % 16 != 0) head = n;
    const int64_t vectors = (n - head) / kPerVector;
    for (int64_t i = thread; i < vectors; i += kThreads) {
      const int64_t at = head + i * kPerVector;
      const Vec<T> g = load128(grad + at);
      Vec<float> m[kPerVector / kFloats];
#pragma unroll
      for (int part = 0; part < kPerVector / kFloats; ++part) m[part] = load128(main + at + part * kFloats);
#pragma unroll
      for (int part = 0; part < kPerVector / kFloats; ++part) {
#pragma unroll
        for (int k = 0; k < kFloats; ++k) {
          float& x = m[part].v[k];
          x = accumulate_one(x, g.v[part * kFloats + k], factor);
          found |= !isfinite(x);
        }
        store128(main + at + part * kFloats, m[part]);
      }
    }
    for (int64_t i = thread; i < head; i += kThreads) one(i);
    for (int64_t i = head + vectors * kPerVector + thread; i < n; i += kThreads) one(i);
  });
  report_found(found, found_inf);
}

template <class T>
__global__ void __launch_bounds__(StreamPolicy::kThreads)
    accumulate_strided_kernel(const __grid_constant__ StridedRef ref, const float* inv_scale, float* found_inf) {
  const float factor = *inv_scale;
  bool found = false;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < ref.numel; i += step) {
    float& main = static_cast<float*>(ref.data)[strided_offset(ref, ref.strides, i)];
    const T grad = static_cast<const T*>(ref.source)[strided_offset(ref, ref.source_strides, i)];
    main = accumulate_one(main, grad, factor);
    found |= !isfinite(main);
  }
  report_found(found, found_inf);
}

}  // namespace fastamp::cuda
