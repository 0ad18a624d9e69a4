// CPU twin of cuda/storage.cuh: the contract is in ../storage.h, the arithmetic of one value in ../codec.h. The AVX2
// forms below repeat that arithmetic eight values at a time and give the same bits.
#include "../storage.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "../codec.h"
#include "parallel.h"
#include "simd.h"

namespace fastamp::cpu {
namespace {

// Elements that one thread takes at a time, as in Chunks.
constexpr int64_t kUnitElements = kMinChunkElements;

// Results of this size and more leave the caches before they are read again: they are written past them, which spares
// reading the lines first and made decoding 1.9 times as fast (64 Mi floats, Zen 3).
constexpr int64_t kStreamedBytes = int64_t{32} << 20;

// How far ahead of a pass memory is asked for. The processor's own prefetching ends at a page, and two passes over a
// block at a time confuse it; a quarter of the time of quantising was spent waiting (64 Mi floats, Zen 3).
[[maybe_unused]] constexpr int kPrefetchBytes = 4096;

// fn(begin, end) over [0, n) in pieces of `unit`, on torch's threads.
template <class Fn>
void for_each_unit(int64_t n, int64_t unit, const Fn& fn) {
  const int64_t units = (n + unit - 1) / unit;
  auto run = [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; ++u) fn(u * unit, std::min(n, (u + 1) * unit));
  };
  if (units <= 1) {
    run(0, units);
  } else {
    parallel_for(0, units, 1, run);
  }
}

template <class T>
constexpr float largest_of() {
  return std::is_same_v<T, F16> ? 65504.0f : std::is_same_v<T, BF16> ? 0x1.fep127f : kLargestFloat;
}
template <class T>
constexpr float smallest_of() {
  return std::is_same_v<T, F16> ? 0x1p-24f : std::is_same_v<T, BF16> ? 0x1p-133f : 0x1p-149f;
}

// ---- quantise: reading a block ------------------------------------------------------------------------------------
// Each returns the bits of the largest magnitude, non-finite ones included: as integers, those are the largest. The
// block's values as floats are left in `buffer`, unless x is them already.

template <class T>
uint32_t read_block(const T* x, const T* base, int64_t n, float* buffer) {
  uint32_t seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    float v = Element<T>::load(x[i]);
    if (base) v = difference(v, Element<T>::load(base[i]));
    buffer[i] = v;
    seen = std::max(seen, float_bits(v) & kAbsBits);
  }
  return seen;
}

uint32_t largest_finite(const float* v, int64_t n) {
  uint32_t seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t abs = float_bits(v[i]) & kAbsBits;
    if (is_finite_bits(abs)) seen = std::max(seen, abs);
  }
  return seen;
}

// ---- quantise: writing codes ----------------------------------------------------------------------------------------

template <StorageFormat kFormat>
void put_code(uint8_t* payload, int64_t i, uint32_t code) {
  if constexpr (Codec<kFormat>::kBits == 8) {
    payload[i] = static_cast<uint8_t>(code);
  } else if (i % 2 == 0) {
    payload[i / 2] = code & 15u;
  } else {
    payload[i / 2] |= static_cast<uint8_t>((code & 15u) << 4);
  }
}

// Codes of v[begin, n). `group` is the random group of v[0].
template <StorageFormat kFormat>
void encode_span(const float* v, int64_t begin, int64_t n, const BlockScale& scale, bool marked, uint8_t* payload) {
  for (int64_t i = begin; i < n; ++i) {
    float y = scaled(scale, v[i]);
    if (marked) y = marked_value<kFormat>(v[i], y);
    put_code<kFormat>(payload, i, Codec<kFormat>::nearest(y, marked));
  }
}

template <StorageFormat kFormat>
void encode_span_stochastic(const float* v, int64_t begin, int64_t n, const BlockScale& scale, bool marked,
                            uint64_t seed, uint64_t group, uint8_t* payload) {
  Draws draws{};
  for (int64_t i = begin; i < n; ++i) {
    if (i == begin || i % kDrawsPerGroup == 0) draws = philox(seed, group + i / kDrawsPerGroup);
    float y = clamped(scale, scaled(scale, v[i]));
    if (marked) y = marked_value<kFormat>(v[i], y);
    put_code<kFormat>(payload, i, Codec<kFormat>::encode_stochastic(y, draws.of(static_cast<int>(i % kDrawsPerGroup))));
  }
}

// ---- dequantise -----------------------------------------------------------------------------------------------------

template <StorageFormat kFormat>
uint32_t get_code(const uint8_t* payload, int64_t i) {
  if constexpr (Codec<kFormat>::kBits == 8) return payload[i];
  return payload[i / 2] >> (i % 2 * 4);
}

template <StorageFormat kFormat, class T>
void decode_span(const uint8_t* payload, int64_t begin, int64_t n, float stored_scale, const T* base, T* out) {
  const bool marked = float_bits(stored_scale) >> 31;
  const float scale = marked ? -stored_scale : stored_scale, least = least_value(scale, smallest_of<T>());
  for (int64_t i = begin; i < n; ++i) {
    const float v = Codec<kFormat>::value(get_code<kFormat>(payload, i));
    float d = marked ? restore_marked<kFormat>(v, scale) : Codec<kFormat>::ordinary(v, scale, least);
    if (base) d = add_base(d, Element<T>::load(base[i]), largest_of<T>());
    out[i] = Element<T>::store(d);
  }
}

// ---- bits -----------------------------------------------------------------------------------------------------------

void pack_span(const uint8_t* mask, int64_t begin, int64_t n, uint8_t* payload) {
  for (int64_t i = begin; i < n; i += 8) {
    uint32_t byte = 0;
    for (int64_t k = i; k < std::min(n, i + 8); ++k) byte |= static_cast<uint32_t>(mask[k] != 0) << (k - i);
    payload[i / 8] = static_cast<uint8_t>(byte);
  }
}

// Packs which words are not 0, and returns whether one of them is neither 0 nor c.
template <class Word>
bool pack_words(const Word* x, int64_t begin, int64_t n, Word c, uint8_t* payload) {
  Word other = 0;
  for (int64_t i = begin; i < n; i += 8) {
    uint32_t byte = 0;
    for (int64_t k = i; k < std::min(n, i + 8); ++k) {
      const Word word = x[k];
      byte |= static_cast<uint32_t>(word != 0) << (k - i);
      other |= word == 0 ? Word{0} : static_cast<Word>(word ^ c);
    }
    payload[i / 8] = static_cast<uint8_t>(byte);
  }
  return other != 0;
}

template <class Word>
void unpack_words(const uint8_t* payload, int64_t begin, int64_t n, Word c, Word* out) {
  for (int64_t i = begin; i < n; ++i) out[i] = payload[i / 8] >> (i % 8) & 1 ? c : Word{0};
}

#if FASTAMP_X86
// ---- AVX2 -----------------------------------------------------------------------------------------------------------
// All take full steps of kStep elements and leave the rest to the forms above, which start where these return.
constexpr int64_t kStep = 32;

FASTAMP_AVX2 inline uint32_t horizontal_max(__m256i v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

FASTAMP_AVX2 inline __m256 is_finite_avx2(__m256 v) {
  const __m256i abs = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), abs));
}

FASTAMP_AVX2 inline __m256 difference_avx2(__m256 x, __m256 base) {
  const __m256 d = _mm256_sub_ps(x, _mm256_and_ps(base, is_finite_avx2(base)));
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256 end = _mm256_or_ps(_mm256_and_ps(d, sign), _mm256_set1_ps(kLargestFloat));
  return _mm256_blendv_ps(d, end, _mm256_andnot_ps(is_finite_avx2(d), is_finite_avx2(x)));
}

template <class T, bool kBase, bool kStore>
FASTAMP_AVX2 uint32_t read_steps_avx2(const T* x, const T* base, int64_t n, float* buffer) {
  const __m256i abs_mask = _mm256_set1_epi32(0x7fffffff);
  __m256i seen[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i + kStep <= n; i += kStep)
    for (int u = 0; u < 4; ++u) {
      if (8 * u * sizeof(T) % 64 == 0)
        _mm_prefetch(reinterpret_cast<const char*>(x + i + 8 * u) + kPrefetchBytes, _MM_HINT_T0);
      __m256 v = Avx2<T>::load(x + i + 8 * u);
      if (kBase) v = difference_avx2(v, Avx2<T>::load(base + i + 8 * u));
      if (kStore) _mm256_storeu_ps(buffer + i + 8 * u, v);
      seen[u] = _mm256_max_epu32(seen[u], _mm256_and_si256(_mm256_castps_si256(v), abs_mask));
    }
  return horizontal_max(_mm256_max_epu32(_mm256_max_epu32(seen[0], seen[1]), _mm256_max_epu32(seen[2], seen[3])));
}

// Codes of eight values of ordinary blocks as int32, clean above the code but for the integers' sign; and what
// Codec::ordinary makes of their values.
template <StorageFormat kFormat>
struct Avx2Codec {
  static constexpr int kLeastCode = static_cast<int>(Codec<kFormat>::kNaN);

  FASTAMP_AVX2 static __m256i nearest(__m256 y) {
    const __m256i magic = _mm256_set1_epi32(0x4b400000);  // the bits of 1.5 * 2^23
    const __m256i rounded = _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(y, _mm256_castsi256_ps(magic))), magic);
    const __m256i bits = _mm256_castps_si256(y), zero = _mm256_setzero_si256();
    const __m256i least = _mm256_and_si256(_mm256_cmpgt_epi32(bits, zero), _mm256_cmpeq_epi32(rounded, zero));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(kLeastCode), least);
  }
  FASTAMP_AVX2 static __m256 ordinary(__m256 v, __m256 scale, __m256 least) {
    const __m256 is_least = _mm256_cmp_ps(v, _mm256_set1_ps(kLeastCode), _CMP_EQ_OQ);
    return _mm256_blendv_ps(_mm256_mul_ps(v, scale), least, is_least);
  }
  FASTAMP_AVX2 static __m256i encode_stochastic(__m256 y, __m256 fraction) {
    return _mm256_cvttps_epi32(_mm256_floor_ps(_mm256_add_ps(y, fraction)));
  }
};

template <int kMantissa, int kBias>
struct Avx2Fp8Codec {
  using C = Fp8Codec<kMantissa, kBias>;
  FASTAMP_AVX2 static __m256i with_sign(__m256i magnitude, __m256i bits) {
    return _mm256_or_si256(magnitude, _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
  }
  FASTAMP_AVX2 static __m256 ordinary(__m256 v, __m256 scale, __m256) { return _mm256_mul_ps(v, scale); }
  FASTAMP_AVX2 static __m256i nearest(__m256 y) {
    const __m256i bits = _mm256_castps_si256(y);
    const __m256i abs = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i magic = _mm256_set1_epi32(C::kSubnormalMagicBits);
    const __m256i subnormal = _mm256_sub_epi32(
        _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(abs), _mm256_castsi256_ps(magic))), magic);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(abs, C::kDropped), _mm256_set1_epi32(1));
    __m256i normal = _mm256_add_epi32(abs, _mm256_add_epi32(odd, _mm256_set1_epi32((1 << (C::kDropped - 1)) - 1)));
    normal = _mm256_sub_epi32(_mm256_srli_epi32(normal, C::kDropped), _mm256_set1_epi32(C::kRebias));
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(C::kMinNormalBits), abs);
    return with_sign(_mm256_blendv_epi8(normal, subnormal, small), bits);
  }
  // fraction is (draw + 1/2) / 2^16: its product with 2^(kDropped) is the integer to add.
  FASTAMP_AVX2 static __m256i encode_stochastic(__m256 y, __m256 fraction) {
    const __m256i bits = _mm256_castps_si256(y);
    const __m256i abs = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256 units = _mm256_set1_ps(kMantissa == 3 ? 0x1p9f : 0x1p16f);
    const __m256i subnormal =
        _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(_mm256_castsi256_ps(abs), units), fraction));
    const __m256i added = _mm256_cvttps_epi32(_mm256_mul_ps(fraction, _mm256_set1_ps(1 << C::kDropped)));
    const __m256i normal =
        _mm256_sub_epi32(_mm256_srli_epi32(_mm256_add_epi32(abs, added), C::kDropped), _mm256_set1_epi32(C::kRebias));
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(C::kMinNormalBits), abs);
    return with_sign(_mm256_blendv_epi8(normal, subnormal, small), bits);
  }
};
template <>
struct Avx2Codec<StorageFormat::kFp8E4M3> : Avx2Fp8Codec<3, 7> {};
template <>
struct Avx2Codec<StorageFormat::kFp8E5M2> : Avx2Fp8Codec<2, 15> {};

// The codes of 32 values, in order, as a step of payload.
template <StorageFormat kFormat>
FASTAMP_AVX2 inline void put_codes_avx2(const __m256i (&codes)[4], uint8_t* payload) {
  constexpr bool kSigned = kFormat == StorageFormat::kInt8 || kFormat == StorageFormat::kInt4;
  __m256i bytes;
  if constexpr (kSigned) {
    bytes = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3]));
  } else {
    bytes = _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]), _mm256_packus_epi32(codes[2], codes[3]));
  }
  // The packs work within halves of a register, four codes at a time: back in order.
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  if constexpr (Codec<kFormat>::kBits == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(payload), bytes);
  } else {
    const __m256i nibbles = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
    const __m256i pairs = _mm256_maddubs_epi16(nibbles, _mm256_set1_epi16(0x1001));  // low + 16 * high
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(payload), _mm256_castsi256_si128(packed));
  }
}

// Philox for four groups at a time, one in each 64-bit lane: the fractions (draw + 1/2) / 2^16 of 32 elements.
FASTAMP_AVX2 inline void draw_fractions_avx2(uint64_t seed, uint64_t group, __m256 (&fraction)[4]) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxMultiplier0), m1 = _mm256_set1_epi64x(kPhiloxMultiplier1);
  const auto first = static_cast<int64_t>(group);
  const __m256i counter = _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_setr_epi64x(0, 1, 2, 3));
  // The upper halves of the lanes hold remains that no product reads.
  __m256i c0 = counter, c1 = _mm256_srli_epi64(counter, 32), c2 = _mm256_setzero_si256(), c3 = c2;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
    c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), _mm256_set1_epi64x(k0));
    c1 = p1;
    c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), _mm256_set1_epi64x(k1));
    c3 = p0;
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  const __m256i low = _mm256_set1_epi64x(0xffffffff);
  const __m256i front = _mm256_or_si256(_mm256_and_si256(c0, low), _mm256_slli_epi64(c1, 32));
  const __m256i back = _mm256_or_si256(_mm256_and_si256(c2, low), _mm256_slli_epi64(c3, 32));
  const __m256i even = _mm256_unpacklo_epi64(front, back), odd = _mm256_unpackhi_epi64(front, back);
  const __m128i draws[4] = {_mm256_castsi256_si128(even), _mm256_castsi256_si128(odd),
                            _mm256_extracti128_si256(even, 1), _mm256_extracti128_si256(odd, 1)};
  for (int u = 0; u < 4; ++u) {
    const __m256 number = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(draws[u]));
    fraction[u] = _mm256_mul_ps(_mm256_add_ps(number, _mm256_set1_ps(0.5f)), _mm256_set1_ps(0x1p-16f));
  }
}

// For ordinary blocks whose scale needs no widening.
template <StorageFormat kFormat>
FASTAMP_AVX2 int64_t encode_steps_avx2(const float* v, int64_t n, const BlockScale& scale, uint8_t* payload) {
  const __m256 inverse = _mm256_set1_ps(scale.inverse);
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    __m256i codes[4];
    for (int u = 0; u < 4; ++u)
      codes[u] = Avx2Codec<kFormat>::nearest(_mm256_mul_ps(_mm256_loadu_ps(v + i + 8 * u), inverse));
    put_codes_avx2<kFormat>(codes, payload + i * Codec<kFormat>::kBits / 8);
  }
  return i;
}

template <StorageFormat kFormat>
FASTAMP_AVX2 int64_t encode_steps_stochastic_avx2(const float* v, int64_t n, const BlockScale& scale, uint64_t seed,
                                                  uint64_t group, uint8_t* payload) {
  const __m256 inverse = _mm256_set1_ps(scale.inverse), top = _mm256_set1_ps(scale.top);
  const __m256 bottom = _mm256_set1_ps(-scale.top);
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    __m256i codes[4];
    __m256 fraction[4];
    draw_fractions_avx2(seed, group + i / kDrawsPerGroup, fraction);
    for (int u = 0; u < 4; ++u) {
      const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(v + i + 8 * u), inverse);
      const __m256 held = _mm256_max_ps(_mm256_min_ps(y, top), bottom);
      codes[u] = Avx2Codec<kFormat>::encode_stochastic(held, fraction[u]);
    }
    put_codes_avx2<kFormat>(codes, payload + i * Codec<kFormat>::kBits / 8);
  }
  return i;
}

// The values of 32 codes. e4m3 is read as float16, whose exponent has 8 more: its values come out 2^-8 as large, and
// decode_steps_avx2 brings that into the scale.
template <StorageFormat kFormat>
FASTAMP_AVX2 inline void get_values_avx2(const uint8_t* payload, __m256 (&v)[4]) {
  if constexpr (kFormat == StorageFormat::kInt4) {
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(payload));
    const __m128i nibble = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    const __m128i low = _mm_and_si128(pairs, nibble), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
    for (int half = 0; half < 2; ++half) {
      __m128i bytes = half ? _mm_unpackhi_epi8(low, high) : _mm_unpacklo_epi8(low, high);
      bytes = _mm_sub_epi8(_mm_xor_si128(bytes, eight), eight);
      v[2 * half] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
      v[2 * half + 1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
    }
  } else {
    for (int u = 0; u < 4; ++u) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(payload + 8 * u));
      if constexpr (kFormat == StorageFormat::kInt8) {
        v[u] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
      } else {
        const __m128i top = _mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8);
        if constexpr (kFormat == StorageFormat::kFp8E5M2) {
          v[u] = _mm256_cvtph_ps(top);
        } else {
          const __m128i shifted = _mm_and_si128(_mm_srai_epi16(top, 1), _mm_set1_epi16(static_cast<short>(0xbf80)));
          v[u] = _mm256_cvtph_ps(shifted);
        }
      }
    }
  }
}

FASTAMP_AVX2 inline __m256 add_base_avx2(__m256 d, __m256 base, float largest) {
  const __m256 sum = _mm256_add_ps(d, _mm256_and_ps(base, is_finite_avx2(base)));
  return _mm256_max_ps(_mm256_min_ps(sum, _mm256_set1_ps(largest)), _mm256_set1_ps(-largest));
}

template <bool kStream, class T>
FASTAMP_AVX2 inline void put_values_avx2(T* out, typename Avx2<T>::Raw values) {
  if constexpr (!kStream) {
    Avx2<T>::store(out, values);
  } else if constexpr (sizeof(T) == 4) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out), values);
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(out), values);
  }
}

// For ordinary blocks. With kStream, out is a multiple of 32 bytes.
template <StorageFormat kFormat, class T, bool kBase, bool kStream>
FASTAMP_AVX2 int64_t decode_steps_avx2(const uint8_t* payload, int64_t n, float scale, const T* base, T* out) {
  const __m256 by = _mm256_set1_ps(kFormat == StorageFormat::kFp8E4M3 ? scale * 256.0f : scale);
  const __m256 least = _mm256_set1_ps(least_value(scale, smallest_of<T>()));
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    __m256 v[4];
    get_values_avx2<kFormat>(payload + i * Codec<kFormat>::kBits / 8, v);
    for (int u = 0; u < 4; ++u) {
      __m256 d = Avx2Codec<kFormat>::ordinary(v[u], by, least);
      if (kBase) d = add_base_avx2(d, Avx2<T>::load(base + i + 8 * u), largest_of<T>());
      put_values_avx2<kStream>(out + i + 8 * u, Avx2<T>::pack(d));
    }
  }
  return i;
}

FASTAMP_AVX2 inline uint32_t nonzero_bytes_avx2(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())));
}

FASTAMP_AVX2 int64_t pack_steps_avx2(const uint8_t* mask, int64_t n, uint8_t* payload) {
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    const uint32_t bits = nonzero_bytes_avx2(mask + i);
    std::memcpy(payload + i / 8, &bits, sizeof bits);
  }
  return i;
}

// One lane of a vector of words is all ones where the word is 0, and where it is c.
FASTAMP_AVX2 inline __m256i equal_words(__m256i a, __m256i b, uint16_t) { return _mm256_cmpeq_epi16(a, b); }
FASTAMP_AVX2 inline __m256i equal_words(__m256i a, __m256i b, uint32_t) { return _mm256_cmpeq_epi32(a, b); }
FASTAMP_AVX2 inline __m256i equal_words(__m256i a, __m256i b, uint64_t) { return _mm256_cmpeq_epi64(a, b); }
FASTAMP_AVX2 inline __m256i broadcast(uint16_t c) { return _mm256_set1_epi16(static_cast<short>(c)); }
FASTAMP_AVX2 inline __m256i broadcast(uint32_t c) { return _mm256_set1_epi32(static_cast<int>(c)); }
FASTAMP_AVX2 inline __m256i broadcast(uint64_t c) { return _mm256_set1_epi64x(static_cast<long long>(c)); }

template <class Word>
FASTAMP_AVX2 int64_t pack_words_steps_avx2(const Word* x, int64_t n, Word c, uint8_t* payload, bool* other) {
  constexpr int kPerVector = 32 / sizeof(Word);
  const __m256i zero = _mm256_setzero_si256(), constant = broadcast(c);
  __m256i known = _mm256_set1_epi8(-1);
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    uint32_t bits = 0;
    for (int at = 0; at < kStep; at += kPerVector) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + at));
      const __m256i zeros = equal_words(words, zero, Word{});
      known = _mm256_and_si256(known, _mm256_or_si256(zeros, equal_words(words, constant, Word{})));
      uint32_t lanes;
      if constexpr (sizeof(Word) == 8) {
        lanes = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(zeros)));
      } else if constexpr (sizeof(Word) == 4) {
        lanes = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(zeros)));
      } else {
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(zeros, zeros), 0x08);
        lanes = static_cast<uint32_t>(_mm_movemask_epi8(_mm256_castsi256_si128(bytes)));
      }
      bits |= (~lanes & ((1u << kPerVector) - 1)) << at;
    }
    std::memcpy(payload + i / 8, &bits, sizeof bits);
  }
  *other |= _mm256_movemask_epi8(known) != -1;
  return i;
}

// Spreads 32 bits over the bytes of a vector: all ones where the bit is set.
FASTAMP_AVX2 inline __m256i spread_bits(uint32_t bits) {
  const __m256i select = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), select);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

template <class Word>
FASTAMP_AVX2 int64_t unpack_steps_avx2(const uint8_t* payload, int64_t n, Word c, Word* out) {
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    uint32_t bits;
    std::memcpy(&bits, payload + i / 8, sizeof bits);
    const __m256i bytes = spread_bits(bits);
    auto* to = reinterpret_cast<__m256i*>(out + i);
    if constexpr (sizeof(Word) == 1) {
      _mm256_storeu_si256(to, _mm256_and_si256(bytes, _mm256_set1_epi8(static_cast<char>(c))));
    } else {
      const __m256i constant = broadcast(c);
      for (int part = 0; part < static_cast<int>(sizeof(Word)); ++part) {
        // The 32 / sizeof(Word) bytes that widen to the part's words.
        alignas(32) int8_t copy[32];
        _mm256_store_si256(reinterpret_cast<__m256i*>(copy), bytes);
        __m256i wide;
        if constexpr (sizeof(Word) == 2) {
          wide = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(copy + 16 * part)));
        } else if constexpr (sizeof(Word) == 4) {
          wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(copy + 8 * part)));
        } else {
          int32_t four;
          std::memcpy(&four, copy + 4 * part, sizeof four);
          wide = _mm256_cvtepi8_epi64(_mm_cvtsi32_si128(four));
        }
        _mm256_storeu_si256(to + part, _mm256_and_si256(wide, constant));
      }
    }
  }
  return i;
}
#endif

// ---- the same, with the form that this processor runs ---------------------------------------------------------------

template <class T>
uint32_t read_values(const T* x, const T* base, int64_t n, float* buffer, const float** values) {
  *values = buffer;
  uint32_t seen = 0;
  int64_t done = 0;
#if FASTAMP_X86
  if (has_avx2()) {
    done = n / kStep * kStep;
    if (base) {
      seen = read_steps_avx2<T, true, true>(x, base, done, buffer);
    } else if constexpr (std::is_same_v<T, float>) {
      seen = read_steps_avx2<T, false, false>(x, base, done, buffer);
      if (done == n) {
        *values = x;
        return seen;
      }
      std::memcpy(buffer, x, done * sizeof(float));
    } else {
      seen = read_steps_avx2<T, false, true>(x, base, done, buffer);
    }
  }
#endif
  return std::max(seen, read_block(x + done, base ? base + done : nullptr, n - done, buffer + done));
}

template <StorageFormat kFormat>
void encode(const float* v, int64_t n, const BlockScale& scale, bool marked, const Quantize& args, uint64_t group,
            uint8_t* payload) {
  int64_t done = 0;
#if FASTAMP_X86
  if (!marked && scale.widen == 1.0f && has_avx2())
    done = args.stochastic ? encode_steps_stochastic_avx2<kFormat>(v, n, scale, args.seed, group, payload)
                           : encode_steps_avx2<kFormat>(v, n, scale, payload);
#endif
  if (args.stochastic) {
    encode_span_stochastic<kFormat>(v, done, n, scale, marked, args.seed, group, payload);
  } else {
    encode_span<kFormat>(v, done, n, scale, marked, payload);
  }
}

template <StorageFormat kFormat, class T, bool kStream>
void decode(const uint8_t* payload, int64_t n, float scale, const T* base, T* out) {
  int64_t done = 0;
#if FASTAMP_X86
  if (!(float_bits(scale) >> 31) && has_avx2())
    done = base ? decode_steps_avx2<kFormat, T, true, kStream>(payload, n, scale, base, out)
                : decode_steps_avx2<kFormat, T, false, kStream>(payload, n, scale, base, out);
#endif
  decode_span<kFormat>(payload, done, n, scale, base, out);
}

void pack(const uint8_t* mask, int64_t n, uint8_t* payload) {
  int64_t done = 0;
#if FASTAMP_X86
  if (has_avx2()) done = pack_steps_avx2(mask, n, payload);
#endif
  pack_span(mask, done, n, payload);
}

template <class Word>
bool pack_constant(const Word* x, int64_t n, Word c, uint8_t* payload) {
  int64_t done = 0;
  bool other = false;
#if FASTAMP_X86
  if (has_avx2()) done = pack_words_steps_avx2(x, n, c, payload, &other);
#endif
  return other | pack_words(x, done, n, c, payload);
}

template <class Word>
void unpack(const uint8_t* payload, int64_t n, Word c, Word* out) {
  int64_t done = 0;
#if FASTAMP_X86
  if (has_avx2()) done = unpack_steps_avx2(payload, n, c, out);
#endif
  unpack_words(payload, done, n, c, out);
}

// ---- launchers ----------------------------------------------------------------------------------------------------

template <class Fn>
void dispatch_dtype(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kFloat16: return fn(F16{});
    case DType::kBFloat16: return fn(BF16{});
    default: return fn(float{});
  }
}

template <StorageFormat kFormat>
using Tag = std::integral_constant<StorageFormat, kFormat>;

template <class Fn>
void dispatch_format(StorageFormat format, const Fn& fn) {
  switch (format) {
    case StorageFormat::kInt8: return fn(Tag<StorageFormat::kInt8>{});
    case StorageFormat::kInt4: return fn(Tag<StorageFormat::kInt4>{});
    case StorageFormat::kFp8E4M3: return fn(Tag<StorageFormat::kFp8E4M3>{});
    case StorageFormat::kFp8E5M2: return fn(Tag<StorageFormat::kFp8E5M2>{});
  }
}

// fn(Word{}) with the unsigned integer as wide as the dtype.
template <class Fn>
void dispatch_word(DType dtype, const Fn& fn) {
  switch (element_size(dtype)) {
    case 2: return fn(uint16_t{});
    case 4: return fn(uint32_t{});
    default: return fn(uint64_t{});
  }
}

void raise_to(std::atomic<uint32_t>& shared, uint32_t value) {
  uint32_t known = shared.load(std::memory_order_relaxed);
  while (value > known && !shared.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
  }
}

template <StorageFormat kFormat, class T>
void quantize_all(const Quantize& args) {
  const T* const x = static_cast<const T*>(args.x);
  const T* const base = static_cast<const T*>(args.base);
  std::atomic<uint32_t> largest{0};
  std::atomic<bool> found{false};
  // A unit is a whole number of blocks: both are powers of two.
  for_each_unit(args.numel, kUnitElements, [&](int64_t begin, int64_t end) {
    alignas(32) float buffer[kMaxBlockSize];
    uint32_t unit_largest = 0;
    bool unit_found = false;
    for (int64_t at = begin; at < end; at += args.block_size) {
      const int64_t n = std::min<int64_t>(args.block_size, end - at);
      const float* values;
      uint32_t amax = read_values(x + at, base ? base + at : nullptr, n, buffer, &values);
      const bool marked = !is_finite_bits(amax);
      if (marked) amax = largest_finite(values, n);
      const BlockScale scale = block_scale<kFormat>(amax, marked);
      args.scales[at / args.block_size] = scale.stored;
      encode<kFormat>(values, n, scale, marked, args, args.offset + at / kDrawsPerGroup,
                      args.payload + at * Codec<kFormat>::kBits / 8);
      unit_largest = std::max(unit_largest, amax);
      unit_found |= marked;
    }
    if (args.amax) raise_to(largest, unit_largest);
    if (unit_found) found.store(true, std::memory_order_relaxed);
  });
  if (args.found_inf && found) *args.found_inf = 1.0f;
  if (args.amax) *args.amax = std::max(*args.amax, float_of_bits(largest));
}

template <StorageFormat kFormat, class T, bool kStream>
void dequantize_all(const Dequantize& args) {
  T* const out = static_cast<T*>(args.out);
  const T* const base = static_cast<const T*>(args.base);
  for_each_unit(args.numel, kUnitElements, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += args.block_size)
      decode<kFormat, T, kStream>(args.payload + at * Codec<kFormat>::kBits / 8,
                                  std::min<int64_t>(args.block_size, end - at), args.scales[at / args.block_size],
                                  base ? base + at : nullptr, out + at);
#if FASTAMP_X86
    if (kStream) _mm_sfence();  // streamed stores are ordered by nothing else
#endif
  });
}

}  // namespace

void quantize(const Quantize& args, void*) {
  dispatch_format(args.format, [&](auto format) {
    dispatch_dtype(args.dtype, [&](auto tag) { quantize_all<decltype(format)::value, decltype(tag)>(args); });
  });
}

void dequantize(const Dequantize& args, void*) {
  const bool stream =
      args.numel * element_size(args.dtype) >= kStreamedBytes && reinterpret_cast<uintptr_t>(args.out) % 32 == 0;
  dispatch_format(args.format, [&](auto format) {
    dispatch_dtype(args.dtype, [&](auto tag) {
      constexpr StorageFormat kFormat = decltype(format)::value;
      using T = decltype(tag);
      if (stream) {
        dequantize_all<kFormat, T, true>(args);
      } else {
        dequantize_all<kFormat, T, false>(args);
      }
    });
  });
}

void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* payload, void*) {
  for_each_unit(numel, kUnitElements,
                [&](int64_t begin, int64_t end) { pack(mask + begin, end - begin, payload + begin / 8); });
}

void pack_scaled_mask(const PackScaledMask& args, void*) {
  dispatch_word(args.dtype, [&](auto tag) {
    using Word = decltype(tag);
    const Word* const x = static_cast<const Word*>(args.x);
    const Word* const first = std::find_if(x, x + args.numel, [](Word word) { return word != 0; });
    const Word c = first == x + args.numel ? Word{0} : *first;
    // What is no mask shows it early as a rule: from then on nothing more is read.
    std::atomic<bool> other{false};
    for_each_unit(args.numel, kUnitElements, [&](int64_t begin, int64_t end) {
      if (other.load(std::memory_order_relaxed)) return;
      if (pack_constant(x + begin, end - begin, c, args.payload + begin / 8))
        other.store(true, std::memory_order_relaxed);
    });
    *static_cast<Word*>(args.value) = other ? static_cast<Word>(nan_word(args.dtype)) : c;
  });
}

void unpack_bits(const UnpackBits& args, void*) {
  auto run = [&](auto* out, auto c) {
    for_each_unit(args.numel, kUnitElements,
                  [&](int64_t begin, int64_t end) { unpack(args.payload + begin / 8, end - begin, c, out + begin); });
  };
  if (!args.value) return run(static_cast<uint8_t*>(args.out), uint8_t{1});
  dispatch_word(args.dtype, [&](auto tag) {
    using Word = decltype(tag);
    run(static_cast<Word*>(args.out), *static_cast<const Word*>(args.value));
  });
}

}  // namespace fastamp::cpu
