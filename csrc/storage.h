// Activation storage: the contract of the launchers behind fastamp::quantize_blockwise, dequantize_blockwise,
// pack_bits, pack_scaled_mask and unpack_bits. Torch-free. CPU twin: cpu/storage_kernel.cpp; CUDA kernels:
// cuda/storage.cuh; the arithmetic of one value, which both include: codec.h.
//
// A tensor is read as one array of `numel` elements, cut into blocks of `block_size`; the last may be shorter. Each
// block has one float scale and a code for each element:
//   amax    the largest magnitude among the block's finite values
//   scale   amax / top (codec.h says how it is rounded), top being the format's largest code
//   code    x / scale, rounded to nearest even or stochastically
//   value   code * scale, rounded once to float and once to the output's dtype
// The lowest code of int8 and int4, which no rounding gives, is what a positive x becomes that would be rounded to 0
// (to nearest; stochastic rounding has no such code). It decodes to next to nothing, 2^-40 * min(scale, 1), but not to
// 0: so x > 0 can be asked of the value, which is all that the backward pass of ReLU and its kin asks. A block that
// holds an infinity or a NaN has a negative scale (-0.0 where nothing in it is finite). Only there, three codes stand
// for inf, -inf and NaN, none for next to nothing, and `top` is one code lower.
//
// With `base`, the difference x - base is coded instead, taken in float; non-finite elements of base count as 0, and
// those of x are still coded as themselves.
#pragma once

#include <cstdint>

#include "tensor_ref.h"

namespace fastamp {

enum class StorageFormat : int32_t { kInt8, kInt4, kFp8E4M3, kFp8E5M2 };

// Powers of two. Fewer than 32 elements would spend more than a bit an element on scales; more than 4,096 would not
// fit the first-level cache (CPU) or one block of threads (CUDA), and gain less than 0.01 bit an element.
constexpr int32_t kMinBlockSize = 32, kMaxBlockSize = 4096;

// Bytes of payload; int4 holds element 2i in the low half of byte i and element 2i + 1 in the high half.
constexpr int64_t payload_bytes(StorageFormat format, int64_t numel) {
  return format == StorageFormat::kInt4 ? (numel + 1) / 2 : numel;
}

struct Quantize {
  DType dtype;  // of x and base; not kFloat64
  const void* x;
  const void* base;  // or nullptr
  int64_t numel;
  StorageFormat format;
  int32_t block_size;
  bool stochastic;
  uint64_t seed, offset;  // element i draws from group offset + i / 8 of the seed's random stream
  uint8_t* payload;       // [payload_bytes(format, numel)]
  float* scales;          // [ceil(numel / block_size)]
  float* found_inf;       // or nullptr; set to 1 if x holds an infinity or a NaN, else left as it is
  float* amax;            // or nullptr; raised to the largest finite magnitude that was coded
};

struct Dequantize {
  DType dtype;  // of out and base; not kFloat64
  void* out;
  const void* base;  // or nullptr
  int64_t numel;
  StorageFormat format;
  int32_t block_size;
  const uint8_t* payload;
  const float* scales;
};

// A mask at one bit an element: bit i % 8 of byte i / 8 is element i; the last byte is filled up with zeros.
struct PackScaledMask {
  DType dtype;
  const void* x;
  int64_t numel;
  uint8_t* payload;  // [ceil(numel / 8)]: whether x[i] has any bit set
  void* value;       // of dtype: c if every element is 0 or c, bit for bit; else NaN, and the payload says nothing
  uint64_t* seen;    // [2], zeros: workspace
};

// What value becomes where x is no mask.
constexpr uint64_t nan_word(DType dtype) {
  return dtype == DType::kFloat64    ? 0x7ff8000000000000u
         : dtype == DType::kFloat32  ? 0x7fc00000u
         : dtype == DType::kBFloat16 ? 0x7fc0u
                                     : 0x7e00u;
}

struct UnpackBits {
  DType dtype;        // of out and value
  const void* value;  // out[i] = bit ? *value : 0; nullptr for a bool mask, bytes of 0 and 1
  void* out;
  int64_t numel;
  const uint8_t* payload;
};

#define FASTAMP_DECLARE_STORAGE_LAUNCHERS                                             \
  void quantize(const Quantize& args, void* stream);                                  \
  void dequantize(const Dequantize& args, void* stream);                              \
  /* any byte other than 0 is true */                                                 \
  void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* payload, void* stream); \
  void pack_scaled_mask(const PackScaledMask& args, void* stream);                    \
  void unpack_bits(const UnpackBits& args, void* stream);

namespace cpu {
FASTAMP_DECLARE_STORAGE_LAUNCHERS
}
namespace cuda {
FASTAMP_DECLARE_STORAGE_LAUNCHERS
}
#undef FASTAMP_DECLARE_STORAGE_LAUNCHERS

}  // namespace fastamp
