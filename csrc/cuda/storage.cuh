// The kernels behind fastamp::quantize_blockwise, dequantize_blockwise, pack_bits, pack_scaled_mask and unpack_bits.
// The contract is in ../storage.h, the arithmetic of one value in ../codec.h; the CPU twin in
// ../cpu/storage_kernel.cpp.
#pragma once

#include "../codec.h"
#include "multi_tensor.cuh"

namespace fastamp::cuda {

// Elements that a thread quantises at a time: one 16-byte store of codes, or half of one (int4).
constexpr int kThreadElements = 16;

// A mask is packed and unpacked by warps: 32 lanes x 16 bytes of payload.
constexpr int kWarpPayloadBytes = 32 * 16, kWarpMaskElements = 8 * kWarpPayloadBytes;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / 32; }

// payload_bytes() for kernels.
template <StorageFormat kFormat>
__device__ __forceinline__ int64_t bytes_of(int64_t numel) {
  return (numel * Codec<kFormat>::kBits + 7) / 8;
}

__device__ __forceinline__ bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// ---- quantise -----------------------------------------------------------------------------------------------------

// kCount values from p on, 0 from `left` on; differences where there is a base.
template <int kCount, class T>
__device__ __forceinline__ void read_values(const T* p, const T* base, int64_t left, bool aligned, float (&v)[kCount]) {
  if (aligned && left >= kCount) {
#pragma unroll
    for (int part = 0; part < kCount; part += Vec<T>::N) {
      const Vec<T> x = load128(p + part);
#pragma unroll
      for (int k = 0; k < Vec<T>::N; ++k) v[part + k] = to_float(x.v[k]);
      if (base) {
        const Vec<T> b = load128(base + part);
#pragma unroll
        for (int k = 0; k < Vec<T>::N; ++k) v[part + k] = difference(v[part + k], to_float(b.v[k]));
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      v[k] = k < left ? to_float(p[k]) : 0.0f;
      if (base && k < left) v[k] = difference(v[k], to_float(base[k]));
    }
  }
}

// The largest x of each `lanes` consecutive threads, a power of two. Every thread of the block must call it.
__device__ __forceinline__ uint32_t group_max(uint32_t x, int lanes) {
  for (int offset = min(lanes, 32) / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  if (lanes > 32) {
    FASTAMP_SHARED(uint32_t, largest, StreamPolicy::kWarps);
    __syncthreads();  // an earlier call may still be reading `largest`
    if (lane_index() == 0) largest[warp_index()] = x;
    __syncthreads();
    const int warps = lanes / 32, first = warp_index() & ~(warps - 1);
    for (int w = first; w < first + warps; ++w) x = max(x, largest[w]);
  }
  return x;
}

// Whether any thread that shares a group_max with this one has found something; as a rule, more threads are asked.
__device__ __forceinline__ bool group_any(bool found, int lanes) {
  return lanes > 32 ? __syncthreads_or(found) != 0 : __any_sync(0xffffffffu, found) != 0;
}

// The low bits of codes, side by side.
template <StorageFormat kFormat>
__device__ __forceinline__ Vec<uint32_t> join_codes(const uint32_t (&codes)[kThreadElements]) {
  Vec<uint32_t> joined{};
  if constexpr (Codec<kFormat>::kBits == 8) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t low = __byte_perm(codes[4 * w], codes[4 * w + 1], 0x0040);
      const uint32_t high = __byte_perm(codes[4 * w + 2], codes[4 * w + 3], 0x0040);
      joined.v[w] = __byte_perm(low, high, 0x5410);
    }
  } else {
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int k = 0; k < 8; ++k) joined.v[w] |= (codes[8 * w + k] & 15u) << (4 * k);
  }
  return joined;
}

// The first `bytes` of 16 to p.
__device__ __forceinline__ void store_payload(uint8_t* p, int64_t bytes, bool aligned, const Vec<uint32_t>& value) {
  if (aligned && bytes >= 16) {
    store128(reinterpret_cast<uint32_t*>(p), value);
  } else {
#pragma unroll
    for (int k = 0; k < 16; ++k)
      if (k < bytes) p[k] = static_cast<uint8_t>(value.v[k / 4] >> (k % 4 * 8));
  }
}

// The thread's codes to its place in the payload. Of int4 a thread has 8 bytes: the even ones store for two. Every
// thread of the block must call it; `left` elements exist from the thread's first on.
template <StorageFormat kFormat>
__device__ __forceinline__ void store_codes(uint8_t* payload, int64_t begin, int64_t left,
                                            const uint32_t (&codes)[kThreadElements]) {
  Vec<uint32_t> joined = join_codes<kFormat>(codes);
  const int64_t bytes = bytes_of<kFormat>(max(left, int64_t{0}));
  if constexpr (Codec<kFormat>::kBits == 4) {
    joined.v[2] = __shfl_down_sync(0xffffffffu, joined.v[0], 1);
    joined.v[3] = __shfl_down_sync(0xffffffffu, joined.v[1], 1);
    if (threadIdx.x % 2 != 0) return;
  }
  store_payload(payload + begin * Codec<kFormat>::kBits / 8, bytes, is_aligned(payload), joined);
}

// A thread takes 16 consecutive elements, so that a block of 128 is shared by 8 threads and its amax costs 3 shuffles
// for 16 values. The loads of a warp are 64 bytes apart (float), each sector being used
// by two loads in a row.
template <StorageFormat kFormat, class T, bool kStochastic>
__global__ void __launch_bounds__(StreamPolicy::kThreads, StreamPolicy::kResidentBlocks)
    quantize_kernel(const __grid_constant__ Quantize args) {
  constexpr int kCount = kThreadElements;
  constexpr int64_t kTile = kCount * StreamPolicy::kThreads;
  static_assert(kTile >= kMaxBlockSize, "a block of elements must not reach beyond a block of threads");
  const T* const x = static_cast<const T*>(args.x);
  const T* const base = static_cast<const T*>(args.base);
  const bool aligned = is_aligned(x) && is_aligned(base);
  const int lanes = args.block_size / kCount, block_shift = 31 - __clz(args.block_size);
  uint32_t largest = 0;
  bool found = false;
  for (int64_t tile = blockIdx.x; tile * kTile < args.numel; tile += gridDim.x) {
    const int64_t begin = tile * kTile + static_cast<int>(threadIdx.x) * kCount, left = args.numel - begin;
    float v[kCount];
    read_values(x + begin, base ? base + begin : nullptr, left, aligned, v);

    uint32_t amax = 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) amax = max(amax, float_bits(v[k]) & kAbsBits);
    amax = group_max(amax, lanes);
    const bool marked = !is_finite_bits(amax), any_marked = group_any(marked, lanes);
    if (any_marked) {
      amax = 0;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t abs = float_bits(v[k]) & kAbsBits;
        amax = max(amax, is_finite_bits(abs) ? abs : 0u);
      }
      amax = group_max(amax, lanes);
    }
    const BlockScale scale = block_scale<kFormat>(amax, marked);
    if (left > 0 && static_cast<int>(threadIdx.x) % lanes == 0) args.scales[begin >> block_shift] = scale.stored;
    largest = max(largest, amax);
    found |= marked;

    // Codes are made of the values in place: y instead of x, or what stands for a non-finite x.
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float y = scaled(scale, v[k]);
      if (kStochastic) y = clamped(scale, y);
      if (any_marked) y = marked_value<kFormat>(v[k], y);
      v[k] = y;
    }
    uint32_t codes[kCount];
    if constexpr (kStochastic) {
#pragma unroll
      for (int group = 0; group < kCount / kDrawsPerGroup; ++group) {
        const Draws draws = philox(args.seed, args.offset + begin / kDrawsPerGroup + group);
#pragma unroll
        for (int k = 0; k < kDrawsPerGroup; ++k) {
          const int at = group * kDrawsPerGroup + k;
          codes[at] = Codec<kFormat>::encode_stochastic(v[at], draws.of(k));
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) codes[k] = Codec<kFormat>::nearest(v[k], marked);
    }
    store_codes<kFormat>(args.payload, begin, left, codes);
  }
  if (args.found_inf) report_found(found, args.found_inf);
  if (args.amax) {
    largest = group_max(largest, StreamPolicy::kThreads);
    // Floats that are not negative compare as their bits do.
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(args.amax), largest);
  }
}

// ---- dequantise ---------------------------------------------------------------------------------------------------

// Brings 16 bytes of payload a lane into the warp's part of shared memory, from where each lane can take the codes
// that belong to its coalesced stores.
__device__ __forceinline__ void stage_payload(const uint8_t* payload, int64_t begin, int64_t bytes, bool aligned,
                                              Vec<uint32_t>* staged) {
  const int64_t at = begin + lane_index() * 16;
  Vec<uint32_t> value{};
  if (aligned && at + 16 <= bytes) {
    value = load128(reinterpret_cast<const uint32_t*>(payload + at));
  } else {
#pragma unroll
    for (int k = 0; k < 16; ++k)
      if (at + k < bytes) value.v[k / 4] |= static_cast<uint32_t>(payload[at + k]) << (k % 4 * 8);
  }
  __syncwarp();  // the warp's earlier codes have been read
  staged[lane_index()] = value;
  __syncwarp();
}

// The value of code k of consecutive codes. Integers are put below the exponent of 2^23, whose unit is 1, which is
// cheaper than a conversion.
template <StorageFormat kFormat>
__device__ __forceinline__ float code_value(const uint32_t* words, int k) {
  if constexpr (kFormat == StorageFormat::kInt8) {
    const uint32_t biased = words[k / 4] ^ 0x80808080u;
    return float_of_bits(__byte_perm(biased, 0x4b000000u, 0x7440u | (k % 4))) - 8388736.0f;
  } else if constexpr (kFormat == StorageFormat::kInt4) {
    const uint32_t biased = (words[k / 8] ^ 0x88888888u) >> (k % 2 * 4) & 0x0f0f0f0fu;
    return float_of_bits(__byte_perm(biased, 0x4b000000u, 0x7440u | (k % 8 / 2))) - 8388616.0f;
  } else {
    return Codec<kFormat>::value(words[k / 4] >> (k % 4 * 8));
  }
}

template <class T>
__device__ __forceinline__ float largest_of() {
  return kLargestFloat;
}
template <>
__device__ __forceinline__ float largest_of<__half>() {
  return 65504.0f;
}
template <>
__device__ __forceinline__ float largest_of<__nv_bfloat16>() {
  return 0x1.fep127f;
}

template <class T>
__device__ __forceinline__ float smallest_of() {
  return 0x1p-149f;
}
template <>
__device__ __forceinline__ float smallest_of<__half>() {
  return 0x1p-24f;
}
template <>
__device__ __forceinline__ float smallest_of<__nv_bfloat16>() {
  return 0x1p-133f;
}

template <StorageFormat kFormat, class T>
__global__ void __launch_bounds__(StreamPolicy::kThreads, StreamPolicy::kResidentBlocks)
    dequantize_kernel(const __grid_constant__ Dequantize args) {
  constexpr int kCount = Vec<T>::N, kBits = Codec<kFormat>::kBits;
  constexpr int kWarpElements = kWarpPayloadBytes * 8 / kBits;
  FASTAMP_SHARED(Vec<uint32_t>, shared, StreamPolicy::kThreads);
  Vec<uint32_t>* const staged = shared + warp_index() * 32;
  T* const out = static_cast<T*>(args.out);
  const T* const base = static_cast<const T*>(args.base);
  const bool aligned = is_aligned(args.payload), base_aligned = is_aligned(base), out_aligned = is_aligned(out);
  const int64_t bytes = bytes_of<kFormat>(args.numel);
  const int block_shift = 31 - __clz(args.block_size);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * StreamPolicy::kWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * StreamPolicy::kWarps + warp_index();
       tile * kWarpElements < args.numel; tile += warps) {
    stage_payload(args.payload, tile * kWarpPayloadBytes, bytes, aligned, staged);
#pragma unroll
    for (int vector = 0; vector < kWarpElements / (32 * kCount); ++vector) {
      const int first = (vector * 32 + lane_index()) * kCount;
      const int64_t at = tile * kWarpElements + first, left = args.numel - at;
      if (left <= 0) break;
      // kCount codes are 2, 4 or 8 bytes.
      uint32_t words[(kCount * kBits + 31) / 32];
      const char* const codes = reinterpret_cast<const char*>(staged) + first * kBits / 8;
      if constexpr (kCount * kBits == 16) {
        words[0] = *reinterpret_cast<const uint16_t*>(codes);
      } else if constexpr (kCount * kBits == 32) {
        words[0] = *reinterpret_cast<const uint32_t*>(codes);
      } else {
        const uint2 pair = *reinterpret_cast<const uint2*>(codes);
        words[0] = pair.x;
        words[1] = pair.y;
      }
      const float stored = args.scales[at >> block_shift];
      const bool marked = float_bits(stored) >> 31 != 0;
      const float scale = fabsf(stored), least = least_value(scale, smallest_of<T>());
      float d[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float v = code_value<kFormat>(words, k);
        d[k] = marked ? restore_marked<kFormat>(v, scale) : Codec<kFormat>::ordinary(v, scale, least);
      }
      if (base) {
        float b[kCount];
        read_values(base + at, static_cast<const T*>(nullptr), left, base_aligned, b);
#pragma unroll
        for (int k = 0; k < kCount; ++k) d[k] = add_base(d[k], b[k], largest_of<T>());
      }
      Vec<T> result;
#pragma unroll
      for (int k = 0; k < kCount; ++k) result.v[k] = from_float<T>(d[k]);
      if (out_aligned && left >= kCount) {
        store128(out + at, result);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          if (k < left) out[at + k] = result.v[k];
      }
    }
  }
}

// ---- bits ---------------------------------------------------------------------------------------------------------

// Bit k is set if byte k of the word is not 0.
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t word) {
  word |= word >> 4;
  word |= word >> 2;
  word |= word >> 1;
  // Bits 0, 8, 16 and 24 of the product's first factor meet at bits 28 to 31, and no two products meet below them.
  return ((word & 0x01010101u) * 0x10204080u) >> 28;
}

// bits(begin, left) gives this lane's 16 bits for the elements from `begin` on, of which `left` exist. A warp packs
// 8 times 512 elements before it stores, so that its store is 16 bytes a lane; kUnroll of them are read at once.
template <int kUnroll, class BitsFn>
__device__ __forceinline__ void pack_mask(int64_t numel, uint8_t* payload, const BitsFn& bits) {
  FASTAMP_SHARED(Vec<uint32_t>, shared, StreamPolicy::kThreads);
  Vec<uint32_t>* const staged = shared + warp_index() * 32;
  const int64_t bytes = (numel + 7) / 8, warps = static_cast<int64_t>(gridDim.x) * StreamPolicy::kWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * StreamPolicy::kWarps + warp_index();
       tile * kWarpMaskElements < numel; tile += warps) {
#pragma unroll kUnroll
    for (int part = 0; part < 8; ++part) {
      const int piece = part * 32 + lane_index();
      const int64_t begin = tile * kWarpMaskElements + piece * 16;
      reinterpret_cast<uint16_t*>(staged)[piece] = static_cast<uint16_t>(bits(begin, numel - begin));
    }
    __syncwarp();
    const int64_t at = tile * kWarpPayloadBytes + lane_index() * 16;
    store_payload(payload + at, bytes - at, true, staged[lane_index()]);
    __syncwarp();  // before the next round overwrites what this one reads
  }
}

__global__ void __launch_bounds__(StreamPolicy::kThreads, StreamPolicy::kResidentBlocks)
    pack_bits_kernel(const uint8_t* mask, int64_t numel, uint8_t* payload) {
  const bool aligned = is_aligned(mask);
  pack_mask<4>(numel, payload, [&](int64_t begin, int64_t left) {
    uint32_t bits = 0;
    if (aligned && left >= 16) {
      const Vec<uint32_t> bytes = load128(reinterpret_cast<const uint32_t*>(mask + begin));
#pragma unroll
      for (int w = 0; w < 4; ++w) bits |= nonzero_bytes(bytes.v[w]) << (4 * w);
    } else {
#pragma unroll
      for (int k = 0; k < 16; ++k)
        if (k < left && mask[begin + k] != 0) bits |= 1u << k;
    }
    return bits;
  });
}

// seen[0] collects the bits that are set in any non-zero element, seen[1] those that are clear in any: all non-zero
// elements are equal where no bit is in both.
template <class Word>
__global__ void __launch_bounds__(StreamPolicy::kThreads, StreamPolicy::kResidentBlocks)
    pack_scaled_mask_kernel(const Word* x, int64_t numel, uint8_t* payload, uint64_t* seen) {
  const bool aligned = is_aligned(x);
  Word set = 0, clear = 0;
  pack_mask<8 / sizeof(Word)>(numel, payload, [&](int64_t begin, int64_t left) {
    uint32_t bits = 0;
    auto note = [&](Word word, int k) {
      if (word == 0) return;
      bits |= 1u << k;
      set = static_cast<Word>(set | word);
      clear = static_cast<Word>(clear | ~word);
    };
    if (aligned && left >= 16) {
#pragma unroll
      for (int part = 0; part < 16; part += Vec<Word>::N) {
        const Vec<Word> words = load128(x + begin + part);
#pragma unroll
        for (int k = 0; k < Vec<Word>::N; ++k) note(words.v[k], part + k);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 16; ++k)
        if (k < left) note(x[begin + k], k);
    }
    return bits;
  });
  unsigned long long set64 = set, clear64 = clear;
#pragma unroll
  for (int offset = 16; offset; offset /= 2) {
    set64 |= __shfl_xor_sync(0xffffffffu, set64, offset);
    clear64 |= __shfl_xor_sync(0xffffffffu, clear64, offset);
  }
  if (lane_index() == 0) {
    atomicOr(reinterpret_cast<unsigned long long*>(seen), set64);
    atomicOr(reinterpret_cast<unsigned long long*>(seen) + 1, clear64);
  }
}

template <class Word>
__global__ void finish_scaled_mask_kernel(const uint64_t* seen, Word nan, Word* value) {
  *value = (seen[0] & seen[1]) != 0 ? nan : static_cast<Word>(seen[0]);
}

// Word is as wide as an element of the result; `value` is null for a bool mask.
template <class Word>
__global__ void __launch_bounds__(StreamPolicy::kThreads, StreamPolicy::kResidentBlocks)
    unpack_bits_kernel(const uint8_t* payload, int64_t numel, const Word* value, Word* out) {
  constexpr int kCount = Vec<Word>::N;
  FASTAMP_SHARED(Vec<uint32_t>, shared, StreamPolicy::kThreads);
  Vec<uint32_t>* const staged = shared + warp_index() * 32;
  const Word constant = value ? *value : Word{1};
  const bool aligned = is_aligned(payload);
  const int64_t bytes = (numel + 7) / 8, warps = static_cast<int64_t>(gridDim.x) * StreamPolicy::kWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * StreamPolicy::kWarps + warp_index();
       tile * kWarpMaskElements < numel; tile += warps) {
    stage_payload(payload, tile * kWarpPayloadBytes, bytes, aligned, staged);
#pragma unroll 8
    for (int vector = 0; vector < kWarpMaskElements / (32 * kCount); ++vector) {
      const int first = (vector * 32 + lane_index()) * kCount;
      const int64_t at = tile * kWarpMaskElements + first, left = numel - at;
      if (left <= 0) break;
      const uint32_t bits = reinterpret_cast<const uint32_t*>(staged)[first / 32] >> (first % 32);
      Vec<Word> result;
      if constexpr (sizeof(Word) == 1) {
        // Four bits at 0, 1, 2, 3 go to 0, 8, 16, 24; what else the product holds is cut off.
        Vec<uint32_t> spread;
#pragma unroll
        for (int w = 0; w < 4; ++w) spread.v[w] = ((bits >> (4 * w) & 15u) * 0x00204081u & 0x01010101u) * constant;
        memcpy(&result, &spread, sizeof result);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k) result.v[k] = bits >> k & 1u ? constant : Word{0};
      }
      if (left >= kCount) {
        store128(out + at, result);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          if (k < left) out[at + k] = result.v[k];
      }
    }
  }
}

}  // namespace fastamp::cuda
