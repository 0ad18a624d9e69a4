// The arithmetic of the storage codecs on one value and one block, included by the CPU twin and by the CUDA kernels:
// what stands here once cannot differ between them. Every float operation is rounded once; nothing may be contracted
// (-ffp-contract=off, -fmad=false).
#pragma once

#include <cstdint>
#include <cstring>

#include "storage.h"

#if defined(__CUDACC__)
#define FASTAMP_HD __host__ __device__ __forceinline__
#else
#define FASTAMP_HD inline
#endif

namespace fastamp {

FASTAMP_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
FASTAMP_HD float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr uint32_t kAbsBits = 0x7fffffffu, kInfinityBits = 0x7f800000u, kNaNBits = 0x7fc00000u;
constexpr float kLargestFloat = 3.402823466e+38f, kSmallestNormalFloat = 1.175494351e-38f;

FASTAMP_HD bool is_finite_bits(uint32_t abs_bits) { return abs_bits < kInfinityBits; }

// ---- formats ------------------------------------------------------------------------------------------------------
// A code is the low bits (8, or 4) of what encode() returns; value() is the number it stands for before scaling.
//   kTop        the largest code of an ordinary block
//   kMarkedTop  the largest in a block that holds non-finite values, where kInf (and -kInf) and kNaN are the values of
//               the codes that stand for those. They lie above kMarkedTop in magnitude and are exact codes, so that
//               encode() needs to know nothing of them.
//   nearest()   encode(), except that in an ordinary block of an integer format the code of a positive y is never 0: it
//               is the lowest.
//   ordinary()  what a code of an ordinary block decodes to: its value times scale; but `least`, which least_value()
//               gives, for the lowest code of an integer format.

template <int kLargest>
struct IntegerCodec {
  static constexpr float kTop = kLargest, kMarkedTop = kLargest - 1, kInf = kLargest, kNaN = -(kLargest + 1);

  // 1.5 * 2^23: the sum's unit is 1, so it is y rounded to nearest even, in two's complement in the low bits.
  static FASTAMP_HD uint32_t encode(float y) { return float_bits(y + 12582912.0f); }

  // By the bits, which compare as positive floats do: 0 < y <= 1/2.
  static FASTAMP_HD uint32_t nearest(float y, bool marked) {
    const bool least = float_bits(y) - 1u < 0x3f000000u && !marked;
    return least ? static_cast<uint32_t>(-(kLargest + 1)) : encode(y);
  }
  static FASTAMP_HD float ordinary(float v, float scale, float least) { return v < -kTop ? least : v * scale; }

  // floor(y + u) for u = (draw + 1/2) / 2^16. An integer y stays itself for every draw.
  static FASTAMP_HD uint32_t encode_stochastic(float y, uint32_t draw) {
    const float sum = y + (static_cast<float>(draw) + 0.5f) * 0x1p-16f;
    const int32_t whole = static_cast<int32_t>(sum);
    return static_cast<uint32_t>(whole - (sum < static_cast<float>(whole)));
  }
};

template <int kMantissa, int kBias>
struct Fp8Codec {
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr uint32_t kMinNormalBits = static_cast<uint32_t>(128 - kBias) << 23;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << kMantissa;
  // Its unit is the format's smallest subnormal.
  static constexpr uint32_t kSubnormalMagicBits = static_cast<uint32_t>(127 + 23 - kBias + 1 - kMantissa) << 23;

  // Rounds to nearest even. Not for |y| beyond the largest code.
  static FASTAMP_HD uint32_t encode(float y) {
    const uint32_t bits = float_bits(y), abs = bits & kAbsBits;
    const uint32_t subnormal = float_bits(float_of_bits(abs) + float_of_bits(kSubnormalMagicBits));
    const uint32_t normal = (abs + ((1u << (kDropped - 1)) - 1) + ((abs >> kDropped) & 1)) >> kDropped;
    return (abs < kMinNormalBits ? subnormal - kSubnormalMagicBits : normal - kRebias) | (bits >> 24 & 0x80u);
  }

  static FASTAMP_HD uint32_t nearest(float y, bool) { return encode(y); }
  static FASTAMP_HD float ordinary(float v, float scale, float) { return v * scale; }

  // Adds (draw + 1/2) / 2^16 of the unit at |y| and cuts off. A code's own value stays itself for every draw.
  static FASTAMP_HD uint32_t encode_stochastic(float y, uint32_t draw) {
    constexpr float kUnits = kMantissa == 3 ? 0x1p9f : 0x1p16f;  // 1 / the smallest subnormal
    const uint32_t bits = float_bits(y), abs = bits & kAbsBits;
    const float sum = float_of_bits(abs) * kUnits + (static_cast<float>(draw) + 0.5f) * 0x1p-16f;
    const uint32_t subnormal = static_cast<uint32_t>(abs < kMinNormalBits ? sum : 0.0f);
    const uint32_t normal = (abs + ((2 * draw + 1) << (kDropped - 17))) >> kDropped;
    return (abs < kMinNormalBits ? subnormal : normal - kRebias) | (bits >> 24 & 0x80u);
  }

  // The exponent is read with the wrong bias, which also makes float's subnormals of the format's, and put right by
  // one exact product.
  static FASTAMP_HD float value(uint32_t code) {
    constexpr uint32_t kMask = 0x80000000u | (0x7fu << kDropped);
    const int32_t shifted = static_cast<int32_t>(code << 24) >> (kMantissa + 1);
    return float_of_bits(static_cast<uint32_t>(shifted) & kMask) * (kBias == 7 ? 0x1p120f : 0x1p112f);
  }
};

template <StorageFormat>
struct Codec;

template <>
struct Codec<StorageFormat::kInt8> : IntegerCodec<127> {
  static constexpr int kBits = 8;
  static FASTAMP_HD float value(uint32_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};
template <>
struct Codec<StorageFormat::kInt4> : IntegerCodec<7> {
  static constexpr int kBits = 4;
  static FASTAMP_HD float value(uint32_t code) {
    return static_cast<float>(static_cast<int32_t>((code & 15u) ^ 8u) - 8);
  }
};
template <>
struct Codec<StorageFormat::kFp8E4M3> : Fp8Codec<3, 7> {
  static constexpr int kBits = 8;
  // Codes 0x7e, 0xfe and 0x7f; the last is the format's own NaN.
  static constexpr float kTop = 448, kMarkedTop = 416, kInf = 448, kNaN = 480;
};
template <>
struct Codec<StorageFormat::kFp8E5M2> : Fp8Codec<2, 15> {
  static constexpr int kBits = 8;
  // The format's own infinities, 0x7c and 0xfc, and its NaN 0x7f.
  static constexpr float kTop = 57344, kMarkedTop = 57344, kInf = 65536, kNaN = 114688;
};

// ---- blocks -------------------------------------------------------------------------------------------------------

struct BlockScale {
  float stored;   // what goes to scales[]
  float widen;    // a power of two, 1 but for tiny blocks
  float inverse;  // y = (x * widen) * inverse
  float top;
};

// abs_amax: the bits of the largest finite magnitude in the block; marked: it holds non-finite values as well.
//
// scale = amax * (1 / top), each rounded to nearest, moved by one unit in two cases. Where scale is subnormal its
// rounding may lose much of it: it is rounded up so far that scale * top reaches amax, and no code exceeds top. (Any
// amax up to top * 2^-149 gets the scale 2^-149, and with integer codes comes back exactly.) Where scale * top would
// be infinite it is rounded down: a finite value never decodes to an infinity.
// Below 2^-100 the inverse could overflow, so that values are first brought up by 2^64, exactly.
template <StorageFormat kFormat>
FASTAMP_HD BlockScale block_scale(uint32_t abs_amax, bool marked) {
  constexpr float kTop = Codec<kFormat>::kTop, kMarkedTop = Codec<kFormat>::kMarkedTop;
  constexpr float kReciprocal = 1.0f / kTop, kMarkedReciprocal = 1.0f / kMarkedTop;
  const float amax = float_of_bits(abs_amax), top = marked ? kMarkedTop : kTop;
  float scale = amax * (marked ? kMarkedReciprocal : kReciprocal);
  const float reach = scale * top;
  if (reach < amax && scale < kSmallestNormalFloat) scale = float_of_bits(float_bits(scale) + 1);
  if (reach > kLargestFloat) scale = float_of_bits(float_bits(scale) - 1);
  BlockScale result;
  result.stored = marked ? -scale : scale;
  result.widen = scale < 0x1p-100f && scale > 0.0f ? 0x1p64f : 1.0f;
  result.inverse = scale > 0.0f ? 1.0f / (scale * result.widen) : 0.0f;
  result.top = top;
  return result;
}

FASTAMP_HD float scaled(const BlockScale& block, float x) { return (x * block.widen) * block.inverse; }

// Stochastic rounding may not step past the largest code.
FASTAMP_HD float clamped(const BlockScale& block, float y) {
  return y > block.top ? block.top : y < -block.top ? -block.top : y;
}

// What the lowest code of an integer format decodes to: positive in the output dtype, whose smallest number is given,
// and otherwise next to nothing, as the 0 that it stands in for. Backward passes divide by what they saved, which a
// subnormal would make infinite, and compare it with what was saved elsewhere, which more than was there would blow up.
FASTAMP_HD float least_value(float scale, float smallest) {
  const float least = (scale < 1.0f ? scale : 1.0f) * 0x1p-40f;
  return least > smallest ? least : smallest;
}

// What to encode in a marked block: y, or the stand-in of a non-finite x.
template <StorageFormat kFormat>
FASTAMP_HD float marked_value(float x, float y) {
  const uint32_t abs = float_bits(x) & kAbsBits;
  if (is_finite_bits(abs)) return y;
  if (abs > kInfinityBits) return Codec<kFormat>::kNaN;
  return x > 0 ? Codec<kFormat>::kInf : -Codec<kFormat>::kInf;
}

// The inverse: v is a code's value in a marked block.
template <StorageFormat kFormat>
FASTAMP_HD float restore_marked(float v, float scale) {
  using C = Codec<kFormat>;
  if (v <= C::kMarkedTop && v >= -C::kMarkedTop) return v * scale;
  if (v == C::kInf) return float_of_bits(kInfinityBits);
  if (v == -C::kInf) return float_of_bits(kInfinityBits | 0x80000000u);
  return float_of_bits(kNaNBits);
}

// x - base as it is coded: base's non-finite values count as 0, and a difference beyond float's range is held at its
// end, so that only a non-finite x is coded as one.
FASTAMP_HD float difference(float x, float base) {
  const float known = is_finite_bits(float_bits(base) & kAbsBits) ? base : 0.0f;
  const float d = x - known;
  if (is_finite_bits(float_bits(d) & kAbsBits) || !is_finite_bits(float_bits(x) & kAbsBits)) return d;
  return d > 0 ? kLargestFloat : -kLargestFloat;
}

// The sum that undoes it; `largest` is the output dtype's, so that a finite x never comes back infinite.
FASTAMP_HD float add_base(float d, float base, float largest) {
  if (!is_finite_bits(float_bits(d) & kAbsBits)) return d;
  const float sum = d + (is_finite_bits(float_bits(base) & kAbsBits) ? base : 0.0f);
  return sum > largest ? largest : sum < -largest ? -largest : sum;
}

// ---- random numbers -----------------------------------------------------------------------------------------------

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): 128 random bits for each pair of
// a 64-bit seed (the key) and a 64-bit group number (the counter), 16 for each of the group's eight elements.
struct Draws {
  uint32_t word[4];
  FASTAMP_HD uint32_t of(int element) const { return word[element / 2] >> (element % 2 * 16) & 0xffffu; }
};

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10, kDrawsPerGroup = 8;

FASTAMP_HD Draws philox(uint64_t seed, uint64_t group) {
  uint32_t c0 = static_cast<uint32_t>(group), c1 = static_cast<uint32_t>(group >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxMultiplier0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxMultiplier1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace fastamp
