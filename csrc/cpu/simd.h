// Element types of the CPU kernels, and the AVX2 + F16C forms of their loads and stores.
//
// The library is one binary for any x86-64 (and any other) processor, so AVX2 code stands in functions of its own,
// marked FASTAMP_AVX2 and called only where has_avx2() says so; the scalar form beside each gives the same bits.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <torch/headeronly/util/Half.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTAMP_X86 1
#define FASTAMP_AVX2 __attribute__((target("avx2,f16c")))
#include <immintrin.h>
#else
#define FASTAMP_X86 0
#endif

namespace fastamp::cpu {

#if FASTAMP_X86
// FASTAMP_AVX2=0 in the environment turns the AVX2 forms off, so that the scalar ones can be tested anywhere.
inline bool has_avx2() {
  static const bool yes = [] {
    const char* const wish = std::getenv("FASTAMP_AVX2");
    return !(wish && wish[0] == '0') && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  }();
  return yes;
}
#endif

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

// What the kernels need to know of an element type. A value is finite where (bits & kAbsMask) < kInfinity: an
// integer test of what was stored, which no floating-point flag can spoil.
template <class T>
struct Element;

template <>
struct Element<float> {
  using Bits = uint32_t;
  using OpMath = float;
  static constexpr Bits kAbsMask = 0x7fffffffu, kInfinity = 0x7f800000u;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};

template <>
struct Element<double> {
  using Bits = uint64_t;
  using OpMath = double;
  static constexpr Bits kAbsMask = 0x7fffffffffffffffull, kInfinity = 0x7ff0000000000000ull;
  static double load(double x) { return x; }
  static double store(double x) { return x; }
};

template <>
struct Element<F16> {
  using Bits = uint16_t;
  using OpMath = float;
  static constexpr Bits kAbsMask = 0x7fffu, kInfinity = 0x7c00u;
  static float load(F16 x) { return c10::detail::fp16_ieee_to_fp32_value(x.bits); }
  static F16 store(float x) { return {c10::detail::fp16_ieee_from_fp32_value(x)}; }
};

template <>
struct Element<BF16> {
  using Bits = uint16_t;
  using OpMath = float;
  static constexpr Bits kAbsMask = 0x7fffu, kInfinity = 0x7f80u;
  static float load(BF16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
  static BF16 store(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    // Without this test the rounding below could carry a NaN into infinity or zero.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0u};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};

template <class T>
inline typename Element<T>::Bits abs_bits(T x) {
  return bit_cast<typename Element<T>::Bits>(x) & Element<T>::kAbsMask;
}

#if FASTAMP_X86
// Eight elements at a time as floats. `Seen` keeps the largest abs_bits of what passed through note().
template <class T>
struct Avx2;

template <>
struct Avx2<float> {
  using Raw = __m256i;
  FASTAMP_AVX2 static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
  FASTAMP_AVX2 static Raw pack(__m256 v) { return _mm256_castps_si256(v); }
  FASTAMP_AVX2 static void store(float* p, Raw r) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r); }
  FASTAMP_AVX2 static Raw zero() { return _mm256_setzero_si256(); }
  FASTAMP_AVX2 static Raw note(Raw seen, Raw r) {
    return _mm256_max_epu32(seen, _mm256_and_si256(r, _mm256_set1_epi32(0x7fffffff)));
  }
  FASTAMP_AVX2 static bool any_nonfinite(Raw seen) {
    const __m256i bad = _mm256_cmpgt_epi32(seen, _mm256_set1_epi32(0x7f7fffff));
    return !_mm256_testz_si256(bad, bad);
  }
};

struct Avx2Half {  // what F16 and BF16 share: eight 16-bit words in an __m128i
  using Raw = __m128i;
  FASTAMP_AVX2 static Raw load_raw(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  FASTAMP_AVX2 static void store_raw(void* p, Raw r) { _mm_storeu_si128(static_cast<__m128i*>(p), r); }
  FASTAMP_AVX2 static Raw zero() { return _mm_setzero_si128(); }
  FASTAMP_AVX2 static Raw note(Raw seen, Raw r) {
    return _mm_max_epu16(seen, _mm_and_si128(r, _mm_set1_epi16(0x7fff)));
  }
  FASTAMP_AVX2 static bool above(Raw seen, short limit) {  // seen is below 0x8000, so signed compares serve
    const __m128i bad = _mm_cmpgt_epi16(seen, _mm_set1_epi16(limit));
    return !_mm_testz_si128(bad, bad);
  }
};

template <>
struct Avx2<F16> : Avx2Half {
  FASTAMP_AVX2 static __m256 load(const F16* p) { return _mm256_cvtph_ps(load_raw(p)); }
  FASTAMP_AVX2 static Raw pack(__m256 v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  FASTAMP_AVX2 static void store(F16* p, Raw r) { store_raw(p, r); }
  FASTAMP_AVX2 static bool any_nonfinite(Raw seen) { return above(seen, 0x7bff); }
};

template <>
struct Avx2<BF16> : Avx2Half {
  FASTAMP_AVX2 static __m256 load(const BF16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_raw(p)), 16));
  }
  FASTAMP_AVX2 static Raw pack(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    r = _mm256_srli_epi32(r, 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    return _mm256_castsi256_si128(r);
  }
  FASTAMP_AVX2 static void store(BF16* p, Raw r) { store_raw(p, r); }
  FASTAMP_AVX2 static bool any_nonfinite(Raw seen) { return above(seen, 0x7f7f); }
};

// kElements multiplied where they are: what is stored is returned.
template <class T>
struct Avx2Wide : Avx2<T> {
  using typename Avx2<T>::Raw;
  static constexpr int kElements = 8;
  FASTAMP_AVX2 static Raw multiply(T* p, __m256 by) {
    const Raw raw = Avx2<T>::pack(_mm256_mul_ps(Avx2<T>::load(p), by));
    Avx2<T>::store(p, raw);
    return raw;
  }
};

// Sixteen at a time as eight words with an even and an odd element each: a bfloat16 is the upper half of a float, so
// that odd ones are floats as they stand, and nothing has to cross lanes. It takes half the time of widening eight.
template <>
struct Avx2Wide<BF16> {
  using Raw = __m256i;
  static constexpr int kElements = 16;
  FASTAMP_AVX2 static Raw multiply(BF16* p, __m256 by) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256 even = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), by);
    const __m256 odd = _mm256_mul_ps(
        _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000)))), by);
    __m256i low = rounded(even), high = rounded(odd);
    const __m256 unordered = _mm256_cmp_ps(even, odd, _CMP_UNORD_Q);
    if (__builtin_expect(!_mm256_testz_ps(unordered, unordered), 0)) {
      low = quiet_nans(even, low);
      high = quiet_nans(odd, high);
    }
    const Raw raw = _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), raw);
    return raw;
  }
  FASTAMP_AVX2 static Raw zero() { return _mm256_setzero_si256(); }
  FASTAMP_AVX2 static Raw note(Raw seen, Raw r) {
    return _mm256_max_epu16(seen, _mm256_and_si256(r, _mm256_set1_epi16(0x7fff)));
  }
  FASTAMP_AVX2 static bool any_nonfinite(Raw seen) {
    const __m256i bad = _mm256_cmpgt_epi16(seen, _mm256_set1_epi16(0x7f7f));
    return !_mm256_testz_si256(bad, bad);
  }

 private:
  // To nearest even, in the upper halves; the lower ones hold what is left.
  FASTAMP_AVX2 static __m256i rounded(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
  }
  // Rounding could carry a NaN into infinity or zero.
  FASTAMP_AVX2 static __m256i quiet_nans(__m256 v, __m256i rounded) {
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  }
};
#endif

}  // namespace fastamp::cpu
