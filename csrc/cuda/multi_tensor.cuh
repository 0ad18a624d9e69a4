// One launch over many tensors: the table of tensors travels as the kernel's parameter, and each block takes an equal,
// consecutive share of the chunks of all of them, whatever their sizes.
#pragma once

#include <algorithm>

#include "../tensor_ref.h"
#include "../unscale.h"
#include "policy.cuh"
#include "vector.cuh"

namespace fastamp::cuda {

// kOperands addresses a tensor (2: data and source). A kernel's parameters may take 32,764 bytes since CUDA 12.1, on
// compute capability 7.0 and later, and 4,096 before; both sizes are compiled, since the small one is also the
// cheaper to launch.
template <int kOperands, int kTableCapacity>
struct TensorTable {
  static constexpr int kCapacity = kTableCapacity;
  void* address[kOperands][kCapacity];
  int64_t numel[kCapacity];
  int32_t first_chunk[kCapacity + 1];  // running count of chunks: tensor t owns [first_chunk[t], first_chunk[t + 1])
  int32_t index[kCapacity];            // TensorRef::index
  int32_t count;
};

constexpr size_t kLargeParameters = 32764, kSmallParameters = 4096;
constexpr size_t kOtherParameters = 160;  // what a kernel takes beside its table, generously

template <int kOperands>
constexpr int table_capacity(size_t parameter_bytes) {
  return static_cast<int>((parameter_bytes - kOtherParameters) / (8 * kOperands + 8 + 4 + 4));
}
template <int kOperands>
using LargeTable = TensorTable<kOperands, table_capacity<kOperands>(kLargeParameters)>;
template <int kOperands>
using SmallTable = TensorTable<kOperands, table_capacity<kOperands>(kSmallParameters)>;

template <class T>
struct Chunk {
  static constexpr int kElements = StreamPolicy::kChunkBytes / static_cast<int>(sizeof(T));
};

// ---- device side ------------------------------------------------------------------------------------------------

// Block b of g works on chunks [first_chunk_of(b), first_chunk_of(b + 1)) of c.
__device__ __forceinline__ int first_chunk_of(int64_t block, int64_t chunks, int64_t blocks) {
  return static_cast<int>(block * chunks / blocks);
}
// The block that works on a chunk: the inverse of the above.
__device__ __forceinline__ int block_of(int64_t chunk, int64_t chunks, int64_t blocks) {
  return static_cast<int>(((chunk + 1) * blocks - 1) / chunks);
}

// fn(tensor, begin, end) for this block's share: consecutive elements of one tensor at a time. Uniform over the
// block.
template <int kChunkElements, class Table, class Fn>
__device__ __forceinline__ void for_each_segment(const Table& table, const Fn& fn) {
  const int chunks = table.first_chunk[table.count];
  int chunk = first_chunk_of(blockIdx.x, chunks, gridDim.x);
  const int last = first_chunk_of(blockIdx.x + int64_t{1}, chunks, gridDim.x);
  if (chunk == last) return;
  // The last tensor that starts at or before the chunk; empty tensors own no chunk and are stepped over.
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  for (int tensor = low; chunk < last; ++tensor) {
    const int first = table.first_chunk[tensor];
    const int stop = min(last, table.first_chunk[tensor + 1]);
    if (stop <= chunk) continue;
    const int64_t begin = static_cast<int64_t>(chunk - first) * kChunkElements;
    const int64_t end = min(table.numel[tensor], static_cast<int64_t>(stop - first) * kChunkElements);
    fn(tensor, begin, end);
    chunk = stop;
  }
}

// Calls vector(Vec<T>&, first) on the aligned middle of p[0, n) and single(element&, i) on what is left at its ends,
// each by one thread; `kWrite` stores what they leave. The block's threads share the run.
template <bool kWrite, class T, class VectorFn, class SingleFn>
__device__ __forceinline__ void for_each_vector(T* p, int64_t n, const VectorFn& vector, const SingleFn& single) {
  constexpr int kPerVector = Vec<T>::N, kThreads = StreamPolicy::kThreads, kUnroll = StreamPolicy::kUnroll;
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T));
  const int head = static_cast<int>(min(n, static_cast<int64_t>(misaligned ? kPerVector - misaligned : 0)));
  const int64_t vectors = (n - head) / kPerVector;
  T* const middle = p + head;
  const int thread = static_cast<int>(threadIdx.x);

  int64_t base = 0;  // uniform over the block
  for (; base + kUnroll * kThreads <= vectors; base += kUnroll * kThreads) {
    Vec<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load128(middle + (base + u * kThreads + thread) * kPerVector);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      vector(v[u]);
      if (kWrite) store128(middle + (base + u * kThreads + thread) * kPerVector, v[u]);
    }
  }
  for (int64_t i = base + thread; i < vectors; i += kThreads) {
    Vec<T> v = load128(middle + i * kPerVector);
    vector(v);
    if (kWrite) store128(middle + i * kPerVector, v);
  }

  auto one = [&](int64_t i) {
    T x = p[i];
    single(x);
    if (kWrite) p[i] = x;
  };
  if (thread < head) one(thread);
  const int64_t tail = head + vectors * kPerVector;
  if (tail + thread < n) one(tail + thread);  // fewer than kPerVector are left
}

// The offset of element i of a strided tensor.
__device__ __forceinline__ int64_t strided_offset(const StridedRef& ref, const int64_t* strides, int64_t i) {
  int64_t offset = 0;
  for (int d = 0; d < ref.dim; ++d) {
    const int64_t size = ref.sizes[d];
    offset += i % size * strides[d];
    i /= size;
  }
  return offset;
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The sum over the block, valid in thread 0. Every thread of the block must call it.
__device__ __forceinline__ double block_sum(double x) {
  FASTAMP_SHARED(double, partial, StreamPolicy::kWarps);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  x = warp_sum(x);
  __syncthreads();  // an earlier call may still be reading `partial`
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  if (warp == 0) x = warp_sum(lane < StreamPolicy::kWarps ? partial[lane] : 0.0);
  return x;
}

// Sets the flag if any thread of the block found something: one atomic a block, however many values are bad.
__device__ __forceinline__ void report_found(bool found, float* found_inf) {
  if (__syncthreads_or(found) && threadIdx.x == 0) atomicExch(found_inf, 1.0f);
}

// ---- host side --------------------------------------------------------------------------------------------------

// Cuts a list into launches: launch(table, blocks, last) for each, with the smallest table that holds what is left.
template <int kOperands, class T, class Launch>
void for_each_launch(const TensorRef* refs, int64_t count, const Launch& launch) {
  auto fill = [&](auto& table, int64_t begin) {
    int64_t chunks = 0;
    int filled = 0;
    for (int64_t i = begin; i < count && filled < table.kCapacity; ++i, ++filled) {
      const TensorRef& ref = refs[i];
      table.address[0][filled] = ref.data;
      if constexpr (kOperands == 2) table.address[1][filled] = const_cast<void*>(ref.source);
      table.numel[filled] = ref.numel;
      table.index[filled] = ref.index;
      table.first_chunk[filled] = static_cast<int32_t>(chunks);
      chunks += (ref.numel + Chunk<T>::kElements - 1) / Chunk<T>::kElements;
    }
    table.first_chunk[filled] = static_cast<int32_t>(chunks);
    table.count = filled;
    const int64_t blocks = std::min<int64_t>(std::max<int64_t>(chunks, 1), grid_limit(StreamPolicy::kMaxBlocks));
    launch(table, static_cast<unsigned>(blocks), begin + filled == count);
    return begin + filled;
  };
  const bool large = parameter_limit() >= kLargeParameters;
  for (int64_t begin = 0; begin < count;) {
    if (large && count - begin > SmallTable<kOperands>::kCapacity) {
      LargeTable<kOperands> table;
      begin = fill(table, begin);
    } else {
      SmallTable<kOperands> table;
      begin = fill(table, begin);
    }
  }
}

template <class T>
unsigned strided_blocks(const StridedRef& ref) {
  const int64_t chunks = (ref.numel + Chunk<T>::kElements - 1) / Chunk<T>::kElements;
  return static_cast<unsigned>(std::min<int64_t>(std::max<int64_t>(chunks, 1), grid_limit(StreamPolicy::kMaxBlocks)));
}

// fn(T{}) with the element type of a dtype.
template <class Fn>
void dispatch(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn(float{});
    case DType::kFloat64: return fn(double{});
    case DType::kFloat16: return fn(__half{});
    case DType::kBFloat16: return fn(__nv_bfloat16{});
  }
}

}  // namespace fastamp::cuda
