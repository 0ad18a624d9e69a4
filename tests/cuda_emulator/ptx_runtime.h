// What PTX instructions mean: included by the C++ that ptx_to_cpp.py writes. On top of the emulator's scheduler.
#pragma once

#include <cmath>
#include <limits>

#include "cuda_emulator.h"

using u8 = uint8_t;
using s8 = int8_t;
using u16 = uint16_t;
using s16 = int16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

namespace ptx {

// Makes a translated kernel known under the mangled name it shares with the C++ kernel (ptx_registry.cpp).
struct Registration {
  Registration(const char* name, cuda_emulator::PtxEntry entry);
};

// .maxntid: what __launch_bounds__ promised.
inline void check_block(unsigned limit) {
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  if (threads > limit) {
    cuda_emulator::fail("the block has %u threads, more than the %u of __launch_bounds__", threads, limit);
  }
}

// ---- Registers hold raw bits ---------------------------------------------------------------------------------------

template <class T, class Bits>
T as(Bits bits) {
  if constexpr (std::is_floating_point_v<T>) {
    return cuda_emulator::bit_cast<T>(bits);
  } else {
    return static_cast<T>(bits);
  }
}
inline void assign(u32& target, f32 value) { target = cuda_emulator::bit_cast<u32>(value); }
inline void assign(u64& target, f64 value) { target = cuda_emulator::bit_cast<u64>(value); }
inline void assign(bool& target, bool value) { target = value; }
// A wider register gets the value sign- or zero-extended.
template <class Register, class Integer>
void assign(Register& target, Integer value) {
  static_assert(std::is_integral_v<Integer> && !std::is_same_v<Register, bool>, "registers hold bits");
  target = static_cast<Register>(value);
}

// ---- Memory --------------------------------------------------------------------------------------------------------

inline u64 address(const void* pointer) { return reinterpret_cast<u64>(pointer); }
// The shared window: 32-bit offsets from the block's base.
inline u32 shared_offset(const void* pointer) {
  return static_cast<u32>(static_cast<const unsigned char*>(pointer) - cuda_emulator::shared_memory_base());
}
inline u64 shared_address(u32 offset) { return address(cuda_emulator::shared_memory_base()) + offset; }

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Values {
  T v[kCount];
};
template <class T, int kCount>
Values<T, kCount> load(u64 address) {
  const auto* const source = reinterpret_cast<const Values<T, kCount>*>(address);
  cuda_emulator::check_alignment(source, "ld");
  return *source;
}
template <class T, int kCount>
void store(u64 address, const Values<T, kCount>& values) {
  auto* const target = reinterpret_cast<Values<T, kCount>*>(address);
  cuda_emulator::check_alignment(target, "st");
  *target = values;
}
template <class T, class Update>
T atomic(u64 address, Update update) {
  return cuda_emulator::atomic_update(reinterpret_cast<T*>(address), update);
}

// ---- Integer arithmetic wraps; float arithmetic gives the one NaN that the hardware gives --------------------------

inline f32 canonical(f32 x) { return std::isnan(x) ? cuda_emulator::bit_cast<f32>(0x7fffffffu) : x; }
inline f64 canonical(f64 x) {
  return std::isnan(x) ? cuda_emulator::bit_cast<f64>(u64{0x7fffffffffffffffu}) : x;
}

template <class T>
T add(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return canonical(a + b);
  } else {
    return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b));
  }
}
template <class T>
T sub(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return canonical(a - b);
  } else {
    return static_cast<T>(static_cast<u64>(a) - static_cast<u64>(b));
  }
}
template <class T>
T mul(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return canonical(a * b);
  } else {
    return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
  }
}
template <class T>
T mul_hi(T a, T b) {
  if constexpr (std::is_signed_v<T>) {
    return static_cast<T>((static_cast<__int128>(a) * b) >> (8 * sizeof(T)));
  } else {
    return static_cast<T>((static_cast<unsigned __int128>(a) * b) >> (8 * sizeof(T)));
  }
}
// Integer division by zero is unspecified in PTX, and no error: the compiler may speculate it.
template <class T>
T div(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return canonical(a / b);
  } else if constexpr (std::is_signed_v<T>) {
    if (b == 0 || (b == -1 && a == std::numeric_limits<T>::min())) {
      return b == 0 ? static_cast<T>(-1) : a;
    }
    return static_cast<T>(a / b);
  } else {
    return b == 0 ? static_cast<T>(-1) : static_cast<T>(a / b);
  }
}
template <class T>
T rem(T a, T b) {
  if constexpr (std::is_signed_v<T>) {
    if (b == 0 || b == -1) {
      return b == 0 ? a : 0;
    }
  } else if (b == 0) {
    return a;
  }
  return static_cast<T>(a % b);
}
inline f32 fma(f32 a, f32 b, f32 c) { return canonical(std::fma(a, b, c)); }
inline f64 fma(f64 a, f64 b, f64 c) { return canonical(std::fma(a, b, c)); }
inline f32 sqrt(f32 a) { return canonical(std::sqrt(a)); }
inline f64 sqrt(f64 a) { return canonical(std::sqrt(a)); }
template <class T>
T neg(T a) {
  if constexpr (std::is_floating_point_v<T>) {
    return -a;
  } else {
    return sub<T>(0, a);
  }
}
template <class T>
T abs(T a) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fabs(a);
  } else {
    return a < 0 ? neg(a) : a;
  }
}
inline u16 half_neg(u16 bits) { return bits ^ 0x8000; }
inline u16 half_abs(u16 bits) { return bits & 0x7fff; }
template <class T>
T copysign(T magnitude, T sign) {
  return std::copysign(magnitude, sign);
}

// A NaN loses against a number; -0 is less than +0.
template <class T>
T min(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) {
      return canonical(b);
    }
    if (a == b) {
      return std::signbit(a) ? a : b;
    }
    return b < a ? b : a;
  } else {
    return b < a ? b : a;
  }
}
template <class T>
T max(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) {
      return canonical(b);
    }
    if (a == b) {
      return std::signbit(a) ? b : a;
    }
    return b > a ? b : a;
  } else {
    return b > a ? b : a;
  }
}
template <class T>
T min_nan(T a, T b) {
  return std::isnan(a) || std::isnan(b) ? canonical(a + b) : min(a, b);
}
template <class T>
T max_nan(T a, T b) {
  return std::isnan(a) || std::isnan(b) ? canonical(a + b) : max(a, b);
}

// ---- Bits ----------------------------------------------------------------------------------------------------------

template <class T>
T shl(T a, u32 amount) {
  return amount >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<u64>(a) << amount);
}
template <class T>
T shr(T a, u32 amount) {
  if (amount >= 8 * sizeof(T)) {
    return a < 0 ? static_cast<T>(-1) : T{0};
  }
  return static_cast<T>(a >> amount);
}
inline u32 funnel_shift_left_wrap(u32 low, u32 high, u32 amount) { return __funnelshift_l(low, high, amount); }
inline u32 funnel_shift_right_wrap(u32 low, u32 high, u32 amount) { return __funnelshift_r(low, high, amount); }
inline u32 funnel_shift_left_clamp(u32 low, u32 high, u32 amount) { return __funnelshift_lc(low, high, amount); }
inline u32 funnel_shift_right_clamp(u32 low, u32 high, u32 amount) { return __funnelshift_rc(low, high, amount); }

// Bit i of the table is the result for a, b, c being bits 2, 1, 0 of i.
inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (int i = 0; i < 8; i++) {
    if ((table >> i & 1) != 0) {
      result |= ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
    }
  }
  return result;
}
// Bits [position, position + length), extended with the sign bit of the field for signed types.
template <class T>
T bfe(T a, u32 position, u32 length) {
  constexpr u32 kBits = 8 * sizeof(T);
  position &= 255;
  length &= 255;
  T fill = 0;
  if (std::is_signed_v<T> && length != 0) {
    const u32 top = position + length - 1 < kBits - 1 ? position + length - 1 : kBits - 1;
    fill = (static_cast<u64>(a) >> top & 1) != 0 ? 1 : 0;
  }
  u64 result = 0;
  for (u32 i = 0; i < kBits; i++) {
    const bool inside = i < length && position + i < kBits;
    const u64 bit = inside ? static_cast<u64>(a) >> (position + i) & 1 : static_cast<u64>(fill);
    result |= bit << i;
  }
  return static_cast<T>(result);
}
template <class T>
T bfi(T field, T base, u32 position, u32 length) {
  T result = base;
  for (u32 i = 0; i < (length & 255) && (position & 255) + i < 8 * sizeof(T); i++) {
    const u32 at = (position & 255) + i;
    result = static_cast<T>((result & ~(T{1} << at)) | ((field >> i & 1) << at));
  }
  return result;
}
inline u32 popc(u32 a) { return static_cast<u32>(__builtin_popcount(a)); }
inline u32 popc(u64 a) { return static_cast<u32>(__builtin_popcountll(a)); }
inline u32 clz(u32 a) { return a == 0 ? 32 : static_cast<u32>(__builtin_clz(a)); }
inline u32 clz(u64 a) { return a == 0 ? 64 : static_cast<u32>(__builtin_clzll(a)); }
// The position of the highest bit, or how far it has to be shifted left to get to the top; all ones if there is none.
template <class T>
u32 bfind(T a, bool shift_amount) {
  if (a == 0) {
    return ~u32{0};
  }
  return shift_amount ? clz(a) : static_cast<u32>(8 * sizeof(T)) - 1 - clz(a);
}

// ---- Conversions ---------------------------------------------------------------------------------------------------

template <class T>
T round_rni(T x) {
  return std::nearbyint(x);
}
template <class T>
T round_rzi(T x) {
  return std::trunc(x);
}
template <class T>
T round_rmi(T x) {
  return std::floor(x);
}
template <class T>
T round_rpi(T x) {
  return std::ceil(x);
}
template <class T>
T saturate(T x) {
  return x > 0 ? (x < 1 ? x : T{1}) : T{0};
}
template <class To, class From>
To saturate_integer(From x) {
  const __int128 wide = x;
  if (wide < static_cast<__int128>(std::numeric_limits<To>::min())) {
    return std::numeric_limits<To>::min();
  }
  if (wide > static_cast<__int128>(std::numeric_limits<To>::max())) {
    return std::numeric_limits<To>::max();
  }
  return static_cast<To>(x);
}
inline u16 to_half(f32 x) { return static_cast<__half_raw>(__float2half_rn(x)).x; }
inline u16 to_bfloat16(f32 x) { return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x; }
inline f32 from_half(u16 bits) {
  __half_raw half;
  half.x = bits;
  return canonical(__half2float(half));
}
inline f32 from_bfloat16(u16 bits) { return as<f32>(static_cast<u32>(bits) << 16); }
inline u16 floats_to_fp8(f32 high, f32 low, __nv_fp8_interpretation_t kind) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kind);
}
inline u16 halves_to_fp8(u32 halves, __nv_fp8_interpretation_t kind) {
  __half2_raw pair;
  pair.x = static_cast<u16>(halves);
  pair.y = static_cast<u16>(halves >> 16);
  return __nv_cvt_halfraw2_to_fp8x2(pair, __NV_SATFINITE, kind);
}
inline u32 fp8_to_halves(u16 pair, __nv_fp8_interpretation_t kind) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, kind);
  return static_cast<u32>(halves.y) << 16 | halves.x;
}

// ---- Collectives ---------------------------------------------------------------------------------------------------

enum class Shuffle { kUp, kDown, kBfly, kIdx };

// limits: the clamp in bits 0-4, the mask of the segment in bits 8-12.
inline u32 shuffle(Shuffle mode, u32 value, u32 operand, u32 limits, u32 mask, bool* in_range,
                   cuda_emulator::Site site) {
  const int lane = cuda_emulator::lane_index();
  const int distance = static_cast<int>(operand & 31);
  const int clamp = static_cast<int>(limits & 31);
  const int segment = static_cast<int>(limits >> 8 & 31);
  const int first = lane & segment;
  const int last = first | (clamp & ~segment);
  int source = lane;
  switch (mode) {
    case Shuffle::kUp:
      source = lane - distance;
      *in_range = source >= last;
      break;
    case Shuffle::kDown:
      source = lane + distance;
      *in_range = source <= last;
      break;
    case Shuffle::kBfly:
      source = lane ^ distance;
      *in_range = source <= last;
      break;
    case Shuffle::kIdx:
      source = first | (distance & ~segment);
      *in_range = source <= last;
      break;
  }
  if (!*in_range) {
    source = lane;
  }
  return cuda_emulator::warp_exchange(mask, value, [=](int) { return source; }, site);
}
inline u32 vote_ballot(u32 mask, bool predicate, cuda_emulator::Site site) {
  const u32 own = predicate ? 1u << cuda_emulator::lane_index() : 0u;
  return cuda_emulator::warp_reduce(mask, own, [](u32 a, u32 b) { return a | b; }, site);
}
inline bool vote_any(u32 mask, bool predicate, cuda_emulator::Site site) {
  return vote_ballot(mask, predicate, site) != 0;
}
inline bool vote_all(u32 mask, bool predicate, cuda_emulator::Site site) {
  return vote_ballot(mask, predicate, site) == mask;
}

}  // namespace ptx
