// Kernels for the emulator's own tests (tests/test_cuda_emulator.py): some right, most with one planted mistake that
// the emulator must notice. Called through ctypes: run(case, in, out, n) returns "" or what the launch threw.
#include <cstring>
#include <map>

#include "vector.cuh"

using fastamp::load128;
using fastamp::store128;
using fastamp::Vec;

namespace self_test {

constexpr unsigned kAll = 0xffffffffu;

// ---- Right --------------------------------------------------------------------------------------------------------

// out[17 i ...]: what lane i of one warp got from each collective.
__global__ void collectives(const int* in, int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const int x = in[lane];
  int* const row = out + 17 * lane;
  row[0] = __shfl_sync(kAll, x, 5);
  row[1] = __shfl_sync(kAll, x, lane + 1, 8);
  row[2] = __shfl_up_sync(kAll, x, 3);
  row[3] = __shfl_up_sync(kAll, x, 3, 16);
  row[4] = __shfl_down_sync(kAll, x, 3);
  row[5] = __shfl_down_sync(kAll, x, 3, 4);
  row[6] = __shfl_xor_sync(kAll, x, 9);
  row[7] = static_cast<int>(__ballot_sync(kAll, x > 0));
  row[8] = __any_sync(kAll, x == in[31]);
  row[9] = __all_sync(kAll, x > 0);
  row[10] = __reduce_add_sync(kAll, x);
  row[11] = __reduce_min_sync(kAll, x);
  row[12] = __reduce_max_sync(kAll, x);
  row[13] = static_cast<int>(__reduce_and_sync(kAll, static_cast<unsigned>(x)));
  row[14] = static_cast<int>(__reduce_or_sync(kAll, static_cast<unsigned>(x)));
  row[15] = static_cast<int>(__reduce_xor_sync(kAll, static_cast<unsigned>(x)));
  if (lane % 3 == 0) {  // a mask that is not full
    unsigned mask = 0;
    for (int i = 0; i < 32; i += 3) {
      mask |= 1u << i;
    }
    row[16] = __reduce_add_sync(mask, x);
  } else {
    row[16] = 0;
  }
}

__global__ void block_votes(const int* in, int* out) {
  const int predicate = in[threadIdx.x] > 0;
  int* const row = out + 3 * threadIdx.x;
  row[0] = __syncthreads_or(predicate);
  row[1] = __syncthreads_and(predicate);
  row[2] = __syncthreads_count(predicate);
}

__global__ void atomics(int* out) {
  unsigned* const counters = reinterpret_cast<unsigned*>(out);
  atomicAdd(&out[0], 1);
  atomicMax(&out[1], static_cast<int>(threadIdx.x + 1));
  atomicMin(&out[2], -static_cast<int>(threadIdx.x));
  atomicInc(&counters[3], 9);
  atomicOr(&out[4], 1 << (threadIdx.x & 15));
  atomicAdd(reinterpret_cast<float*>(&out[5]), 0.5f);
  int seen = 0;  // a plain read beside other threads' atomics would be a race
  while (true) {
    const int before = atomicCAS(&out[6], seen, seen + 2);
    if (before == seen) {
      break;
    }
    seen = before;
  }
  atomicExch(&out[7], 7);
  atomicDec(&counters[8], 6);
}

__device__ float block_sum(float x, bool barrier_after) {
  FASTAMP_SHARED(float, partial, 8);
  for (int offset = 16; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kAll, x, offset);
  }
  if (threadIdx.x % 32 == 0) {
    partial[threadIdx.x / 32] = x;
  }
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < 8; i++) {
    sum += partial[i];
  }
  if (barrier_after) {
    __syncthreads();
  }
  return sum;
}

// Two sums through the same shared array. Without the barrier after each, a fast warp overwrites it too early.
__global__ void two_sums(const float* in, float* out, bool barrier_after) {
  const float first = block_sum(in[threadIdx.x], barrier_after);
  const float second = block_sum(2 * in[threadIdx.x], barrier_after);
  out[threadIdx.x] = first;
  out[blockDim.x + threadIdx.x] = second;
}

// The usual reduction over blocks: the last block to arrive adds up what all have written.
__global__ void last_block_sums(const float* in, float* out, unsigned* ticket, bool fence) {
  FASTAMP_SHARED(int, is_last, 1);
  const float sum = block_sum(in[blockIdx.x * blockDim.x + threadIdx.x], true);
  if (threadIdx.x == 0) {
    out[1 + blockIdx.x] = sum;
    if (fence) {
      __threadfence();
    }
    is_last[0] = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last[0] == 0) {
    return;
  }
  if (fence) {
    __threadfence();
  }
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (unsigned i = 0; i < gridDim.x; i++) {
      total += out[1 + i];
    }
    out[0] = total;
  }
}

__global__ void add_one_each(float* data, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) {
    data[i] += 1.0f;
  }
}

// Results must not be fused or flushed to zero.
__global__ void products(const float* in, float* out, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
    const float product = in[i] * in[n + i];
    out[i] = product;
    out[n + i] = __fadd_rn(__fmul_rn(in[i], in[n + i]), in[2 * n + i]);
    out[2 * n + i] = __fmaf_rn(in[i], in[n + i], in[2 * n + i]);
  }
}

template <class T>
__global__ void narrow(const float* in, T* out, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
    out[i] = fastamp::from_float<T>(in[i]);
  }
}

template <class T>
__global__ void widen(const T* in, float* out, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
    out[i] = fastamp::to_float(in[i]);
  }
}

__global__ void to_integers(const float* in, int* out, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
    out[5 * i] = __float2int_rn(in[i]);
    out[5 * i + 1] = __float2int_rz(in[i]);
    out[5 * i + 2] = __float2int_rd(in[i]);
    out[5 * i + 3] = __float2int_ru(in[i]);
    out[5 * i + 4] = static_cast<int>(__float2uint_rn(in[i]));
  }
}

__global__ void bits(const unsigned* in, unsigned* out) {
  const unsigned a = in[0];
  const unsigned b = in[1];
  const unsigned c = in[2];
  out[0] = __byte_perm(a, b, c);
  out[1] = __funnelshift_l(a, b, c);
  out[2] = __funnelshift_r(a, b, c);
  out[3] = __funnelshift_lc(a, b, c);
  out[4] = __funnelshift_rc(a, b, c);
  out[5] = static_cast<unsigned>(__popc(a));
  out[6] = static_cast<unsigned>(__clz(static_cast<int>(a)));
  out[7] = static_cast<unsigned>(__ffs(static_cast<int>(a)));
  out[8] = __umulhi(a, b);
  out[9] = __brev(a);
}

__global__ void dynamic_reverse(const float* in, float* out) {
  FASTAMP_DYN_SHARED(float, values);
  values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

template <int kBytes>
struct Blob {
  unsigned char bytes[kBytes];
};
template <int kBytes>
__global__ void big_parameter(const __grid_constant__ Blob<kBytes> blob, int* out) {
  out[threadIdx.x] = blob.bytes[kBytes - 1];
}

// ---- Races that each need another schedule ------------------------------------------------------------------------

__global__ void no_barrier(const float* in, float* out) {
  FASTAMP_SHARED(float, values, 64);
  values[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = values[63 - threadIdx.x];
}

// Right only if threads run by index.
__global__ void expects_order(const float* in, float* out) {
  FASTAMP_SHARED(float, values, 64);
  values[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = threadIdx.x == 0 ? 0.0f : values[threadIdx.x - 1];
}

// Right only if blocks run one after the other.
__global__ void expects_finished_block(const float* in, float* out) {
  const float before = blockIdx.x == 0 ? 0.0f : out[blockIdx.x - 1];
  __syncthreads();
  if (threadIdx.x == 0) {
    out[blockIdx.x] = before + in[blockIdx.x];
  }
}

// Right only if nothing happens between an atomic and the store after it.
__global__ void lost_update(const float*, float* out) {
  unsigned* const counter = reinterpret_cast<unsigned*>(out);
  const unsigned seen = atomicAdd(counter, 0u);
  atomicExch(counter, seen + 1);
}

__global__ void racy_flag(const float* in, float* out) {
  if (in[threadIdx.x] != 0.0f) {
    out[0] = 1.0f;
  }
}

// ---- What the hardware forbids ------------------------------------------------------------------------------------

__global__ void reads_junk(const float*, float* out) {
  FASTAMP_SHARED(float, values, 64);
  out[threadIdx.x] = values[threadIdx.x];
}
__global__ void barrier_after_exit(const float*, float*) {
  if (threadIdx.x == 3) {
    return;
  }
  __syncthreads();
}
__global__ void two_barriers(const float*, float*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void barrier_for_some(const float*, float*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncwarp(0x1);
  }
}
__global__ void shuffle_outside_mask(const float* in, float* out) {
  out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], 0);
}
__global__ void shuffle_with_exited_lane(const float* in, float* out) {
  if (threadIdx.x == 0) {
    return;
  }
  out[threadIdx.x] = __shfl_sync(kAll, in[threadIdx.x], 1);
}
__global__ void shuffle_by_some(const float* in, float* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(kAll, in[threadIdx.x], 1);
  } else {
    __syncthreads();
  }
}
__global__ void shuffle_beyond_block(const float* in, float* out) {  // launched with 40 threads
  out[threadIdx.x] = __shfl_sync(kAll, in[threadIdx.x], 1);
}
__global__ void shuffle_from_outside_mask(const float* in, float* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], 20);
  }
}
__global__ void masks_overlap(const float* in, float* out) {
  out[threadIdx.x] = threadIdx.x < 16 ? __shfl_sync(0x1ffffu, in[threadIdx.x], 1)
                                      : __shfl_sync(0xffff0000u, in[threadIdx.x], 17);
}
__global__ void different_collectives(const float* in, float* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(kAll, in[threadIdx.x], 1);
  } else {
    out[threadIdx.x] = __shfl_xor_sync(kAll, in[threadIdx.x], 1);
  }
}
__global__ void misaligned_load(const float* in, float* out) {
  const Vec<float> values = load128(in + 1);
  out[threadIdx.x] = values.v[0];
}
__global__ void misaligned_store(const float* in, float* out) {
  store128(out + 1, load128(in));
}
__global__ void shared_overflow(const float* in, float* out) {
  FASTAMP_SHARED(float, values, 64);
  float* const pointer = values;
  pointer[threadIdx.x + 1] = in[threadIdx.x];
  out[threadIdx.x] = pointer[threadIdx.x + 1];
}
__global__ void dynamic_overflow(const float* in, float*) {
  FASTAMP_DYN_SHARED(float, values);
  values[threadIdx.x + 1] = in[threadIdx.x];
}
__global__ void shared_overflow_read(const float*, float* out) {
  FASTAMP_SHARED(float, values, 64);
  values[threadIdx.x] = 1.0f;
  __syncthreads();
  const float* const pointer = values;
  out[threadIdx.x] = pointer[threadIdx.x + 1];
}
__global__ void too_much_shared(const float*, float* out) {
  FASTAMP_SHARED(float, first, 8192);
  FASTAMP_SHARED(float, second, 8192);
  out[0] = first[0] + second[0];
}
__global__ void traps(const float*, float*) { __trap(); }
__global__ void launches_a_kernel(const float* in, float* out) {
  FASTAMP_LAUNCH(1, 1, 0, nullptr, reads_junk)(in, out);
}
__global__ void global_overflow(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x + 1]; }

// ---- Launching ----------------------------------------------------------------------------------------------------

using Simple = void (*)(const float*, float*);

struct SimpleCase {
  Simple kernel;
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
};

const std::map<std::string, SimpleCase>& simple_cases() {
  static const std::map<std::string, SimpleCase> cases = {
      {"no_barrier", {no_barrier, 1, 64, 0}},
      {"expects_order", {expects_order, 1, 64, 0}},
      {"expects_finished_block", {expects_finished_block, 8, 64, 0}},
      {"lost_update", {lost_update, 1, 64, 0}},
      {"racy_flag", {racy_flag, 1, 64, 0}},
      {"reads_junk", {reads_junk, 1, 64, 0}},
      {"barrier_after_exit", {barrier_after_exit, 1, 64, 0}},
      {"two_barriers", {two_barriers, 1, 64, 0}},
      {"barrier_for_some", {barrier_for_some, 1, 64, 0}},
      {"shuffle_outside_mask", {shuffle_outside_mask, 1, 64, 0}},
      {"shuffle_with_exited_lane", {shuffle_with_exited_lane, 1, 64, 0}},
      {"shuffle_by_some", {shuffle_by_some, 1, 32, 0}},
      {"shuffle_beyond_block", {shuffle_beyond_block, 1, 40, 0}},
      {"shuffle_from_outside_mask", {shuffle_from_outside_mask, 1, 32, 0}},
      {"masks_overlap", {masks_overlap, 1, 32, 0}},
      {"different_collectives", {different_collectives, 1, 32, 0}},
      {"misaligned_load", {misaligned_load, 1, 1, 0}},
      {"misaligned_store", {misaligned_store, 1, 1, 0}},
      {"shared_overflow", {shared_overflow, 1, 64, 0}},
      {"dynamic_overflow", {dynamic_overflow, 1, 64, 256}},
      {"shared_overflow_read", {shared_overflow_read, 1, 64, 0}},
      {"too_much_shared", {too_much_shared, 1, 1, 0}},
      {"traps", {traps, dim3(1, 2, 3), dim3(4, 5, 6), 0}},
      {"launches_a_kernel", {launches_a_kernel, 1, 1, 0}},
      {"global_overflow", {global_overflow, 1, 64, 0}},
      {"dynamic_reverse", {dynamic_reverse, 1, 64, 256}},
      {"empty_grid", {reads_junk, 0, 64, 0}},
      {"large_grid_y", {reads_junk, dim3(1, 65536, 1), 64, 0}},
      {"empty_block", {reads_junk, 1, 0, 0}},
      {"large_block", {reads_junk, 1, 1025, 0}},
      {"deep_block", {reads_junk, 1, dim3(1, 1, 65), 0}},
      {"large_dynamic_shared", {dynamic_reverse, 1, 64, 49153}},
      {"static_and_dynamic_shared", {reads_junk, 1, 64, 49152}},
  };
  return cases;
}

void launch(const std::string& name, const void* in, void* out, int64_t n, fastamp::Stream stream) {
  const float* const floats = static_cast<const float*>(in);
  float* const results = static_cast<float*>(out);
  const int count = static_cast<int>(n);
  const auto found = simple_cases().find(name);
  if (found != simple_cases().end()) {
    const SimpleCase& c = found->second;
    FASTAMP_LAUNCH(c.grid, c.block, c.shared_bytes, stream, c.kernel)(floats, results);
  } else if (name == "collectives") {
    FASTAMP_LAUNCH(1, 32, 0, stream, collectives)(static_cast<const int*>(in), static_cast<int*>(out));
  } else if (name == "block_votes") {
    FASTAMP_LAUNCH(1, 96, 0, stream, block_votes)(static_cast<const int*>(in), static_cast<int*>(out));
  } else if (name == "atomics") {
    FASTAMP_LAUNCH(2, 64, 0, stream, atomics)(static_cast<int*>(out));
  } else if (name == "two_sums" || name == "two_sums_racy") {
    FASTAMP_LAUNCH(1, 256, 0, stream, two_sums)(floats, results, name == "two_sums");
  } else if (name == "last_block" || name == "last_block_no_fence") {
    unsigned ticket = 0;
    FASTAMP_LAUNCH(6, 256, 0, stream, last_block_sums)(floats, results, &ticket, name == "last_block");
  } else if (name == "add_one_each") {
    FASTAMP_LAUNCH((n + 255) / 256, 256, 0, stream, add_one_each)(results, n);
  } else if (name == "products") {
    FASTAMP_LAUNCH(1, 32, 0, stream, products)(floats, results, count);
  } else if (name == "to_half") {
    FASTAMP_LAUNCH(1, 32, 0, stream, narrow<__half>)(floats, static_cast<__half*>(out), count);
  } else if (name == "to_bfloat16") {
    FASTAMP_LAUNCH(1, 32, 0, stream, narrow<__nv_bfloat16>)(floats, static_cast<__nv_bfloat16*>(out), count);
  } else if (name == "from_half") {
    FASTAMP_LAUNCH(1, 32, 0, stream, widen<__half>)(static_cast<const __half*>(in), results, count);
  } else if (name == "from_bfloat16") {
    FASTAMP_LAUNCH(1, 32, 0, stream, widen<__nv_bfloat16>)(static_cast<const __nv_bfloat16*>(in), results, count);
  } else if (name == "to_integers") {
    FASTAMP_LAUNCH(1, 32, 0, stream, to_integers)(floats, static_cast<int*>(out), count);
  } else if (name == "bits") {
    FASTAMP_LAUNCH(1, 1, 0, stream, bits)(static_cast<const unsigned*>(in), static_cast<unsigned*>(out));
  } else if (name == "largest_parameter") {
    Blob<32752> blob{};  // with the pointer after it and its alignment: 32,760 bytes
    blob.bytes[32751] = 42;
    FASTAMP_LAUNCH(1, 4, 0, stream, big_parameter<32752>)(blob, static_cast<int*>(out));
  } else if (name == "too_large_parameter") {
    FASTAMP_LAUNCH(1, 4, 0, stream, big_parameter<32760>)(Blob<32760>{}, static_cast<int*>(out));
  } else if (name == "outside_a_kernel") {
    __syncthreads();
  } else {
    throw std::runtime_error("no such case");
  }
  fastamp::check_launch("self_test");
}

}  // namespace self_test

extern "C" const char* self_test_run(const char* name, const void* in, void* out, int64_t n, void* stream) {
  static thread_local std::string error;
  error.clear();
  try {
    self_test::launch(name, in, out, n, stream);
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  return error.c_str();
}
