// CUDA on a CPU, for tests: csrc/cuda/runtime.cuh includes this instead of <cuda_runtime.h> when a kernel is
// compiled by a plain C++ compiler. Every CUDA thread is a fiber, and a seeded scheduler decides which one runs
// next; fibers switch at barriers, at warp collectives and, if asked, at atomics and fences. The scheduler is
// cuda_emulator.cpp; docs/cuda-emulator.md explains how to use all this for a new kernel.
//
// What the hardware forbids is an error (std::runtime_error, thrown by the launch) that names file, line, block
// and thread: divergent barriers and collectives, lanes missing from a mask, misaligned vectors, writes past a
// shared array, deadlock, an invalid launch. What is missing here does not compile; nothing is approximated.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <math.h>  // the global isfinite, fmaxf, ... that device code uses without std::
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// The toolkit's own types and conversions: these headers support a plain host compiler, and keep the alignment of
// the vector types, so that UBSan sees misaligned accesses.
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

// Not defined for a host compiler. The PTX layer checks blocks against these bounds.
#if !defined(__launch_bounds__)
#define __launch_bounds__(...)
#endif

namespace cuda_emulator {

// ---- Settings and records (set from Python, see emulator.py) ------------------------------------------------------

enum class Schedule {
  kInOrder,   // every thread that can run, by index
  kShuffled,  // every thread that can run, in random order; blocks start in random order too
  kStarving,  // only the threads of one warp until it cannot go on: other warps fall far behind
};

struct Settings {
  Schedule schedule = Schedule::kInOrder;
  uint64_t seed = 0;
  unsigned resident_blocks = 1;           // blocks that run interleaved
  unsigned preempt_one_in = 0;            // n: switch threads at one in n atomics and fences; 0: never
  unsigned junk_byte = 0xCD;              // what shared memory holds before it is written
  uint64_t skip_from = 0;                 // blocks [skip_from, skip_to) do not run, counted over all launches
  uint64_t skip_to = 0;                   //   since the records were cleared: 64-bit indices on sparse memory
  size_t parameter_limit = 32764;         // bytes; 4096 is the limit before CUDA 12.1
  int64_t grid_limit = INT64_MAX;         // blocks of a launch that asks: small inputs make blocks loop
};
extern Settings settings;

struct LaunchRecord {
  const void* kernel;
  dim3 grid;
  dim3 block;
  size_t dynamic_shared_bytes;
  const void* stream;
  size_t parameter_bytes;
};

// ---- The scheduler's interface -------------------------------------------------------------------------------------

// Where a barrier or collective was called.
struct Site {
  const char* operation;
  const char* file;
  int line;
};

// Reports an error of the kernel and ends the launch.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

int lane_index();

// A point where another thread may run: called at atomics and fences.
void maybe_preempt();

enum class BarrierResult { kNone, kOr, kAnd, kCount };
int block_barrier(int predicate, BarrierResult result, Site site);

// One warp collective: every lane of the mask meets, contributes a value, reads others', leaves.
struct WarpMeeting;
WarpMeeting* warp_meet(uint32_t mask, const void* value, size_t bytes, bool orders_memory, Site site);
void warp_read(const WarpMeeting* meeting, int source_lane, void* value, size_t bytes, Site site);
void warp_leave(WarpMeeting* meeting);

void fence_device();
void fence_block();

void* static_shared(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();
unsigned char* shared_memory_base();

template <class T>
inline void check_alignment(const T* address, const char* access) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) {
    fail("misaligned address: %s of %zu bytes at %p", access, sizeof(T), static_cast<const void*>(address));
  }
}

// ---- Launching -----------------------------------------------------------------------------------------------------

struct Launch {
  const void* kernel;
  dim3 grid;
  dim3 block;
  size_t dynamic_shared_bytes;
  const void* stream;
  const char* file;
  int line;
  size_t parameter_bytes;
};
void run_grid(const Launch& launch, const std::function<void()>& thread_body);

// The PTX layer sets this: given the kernel, it returns what nvcc made of it, or nothing if no PTX is loaded.
using PtxEntry = void (*)(const unsigned char* parameters);
extern PtxEntry (*find_ptx_entry)(const void* kernel);

// Kernel parameters as the hardware sees them: each at its natural alignment, one after the other.
class ParameterBuffer {
 public:
  template <class T>
  void append(const T& value) {
    const size_t offset = (size_ + alignof(T) - 1) / alignof(T) * alignof(T);
    size_ = offset + sizeof(T);
    bytes_.resize((size_ + sizeof(Unit) - 1) / sizeof(Unit));
    std::memcpy(reinterpret_cast<unsigned char*>(bytes_.data()) + offset, &value, sizeof(T));
  }
  const unsigned char* data() const { return reinterpret_cast<const unsigned char*>(bytes_.data()); }
  size_t size() const { return size_; }

 private:
  struct alignas(64) Unit {
    unsigned char bytes[64];
  };
  std::vector<Unit> bytes_;
  size_t size_ = 0;
};

// Calls a kernel. Not instrumented: to let TSan follow the copy of a table of 32 KB for each thread takes minutes, and
// the copy is the emulator's.
template <class Function, class Values, size_t... kIndices>
[[gnu::no_sanitize("thread"), gnu::noinline]] void call(Function* function, const Values& values,
                                                         std::index_sequence<kIndices...>) {
  function(std::get<kIndices>(values)...);
}

template <class... Parameters>
struct Launcher {
  void (*kernel)(Parameters...);
  Launch launch;

  template <class... Arguments>
  void operator()(Arguments&&... arguments) const {
    static_assert(sizeof...(Arguments) == sizeof...(Parameters), "wrong number of kernel arguments");
    static_assert((std::is_trivially_copyable_v<std::remove_cv_t<Parameters>> && ...),
                  "kernel parameters are copied byte by byte");
    // By value, as kernel parameters are: the kernel must not see later changes of the arguments.
    std::tuple<std::remove_cv_t<Parameters>...> values(std::forward<Arguments>(arguments)...);
    ParameterBuffer parameters;
    std::apply([&](const auto&... value) { (parameters.append(value), ...); }, values);
    Launch complete = launch;
    complete.kernel = reinterpret_cast<const void*>(kernel);
    complete.parameter_bytes = parameters.size();
    if (find_ptx_entry != nullptr) {
      const PtxEntry entry = find_ptx_entry(complete.kernel);
      run_grid(complete, [&] { entry(parameters.data()); });
      return;
    }
    auto* const function = kernel;
    run_grid(complete, [&] { call(function, values, std::index_sequence_for<Parameters...>()); });
  }
};

template <class... Parameters>
Launcher<Parameters...> make_launcher(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const void* stream,
                                      const char* file, int line, void (*kernel)(Parameters...)) {
  return {kernel, Launch{nullptr, grid, block, dynamic_shared_bytes, stream, file, line, 0}};
}

// ---- Building blocks of the collectives ----------------------------------------------------------------------------

// The value of lane `source_of(own lane)`.
template <class T, class SourceLane>
T warp_exchange(uint32_t mask, T value, SourceLane source_of, Site site) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>, "a collective moves at most 16 bytes a lane");
  WarpMeeting* const meeting = warp_meet(mask, &value, sizeof(T), false, site);
  T result;
  warp_read(meeting, source_of(lane_index()), &result, sizeof(T), site);
  warp_leave(meeting);
  return result;
}

// The values of all lanes of the mask combined, lowest lane first.
template <class T, class Combine>
T warp_reduce(uint32_t mask, T value, Combine combine, Site site) {
  WarpMeeting* const meeting = warp_meet(mask, &value, sizeof(T), false, site);
  T result{};
  bool first = true;
  for (int lane = 0; lane < 32; lane++) {
    if ((mask >> lane & 1) == 0) {
      continue;
    }
    T other;
    warp_read(meeting, lane, &other, sizeof(T), site);
    result = first ? other : static_cast<T>(combine(result, other));
    first = false;
  }
  warp_leave(meeting);
  return result;
}

// Relaxed, as CUDA's atomics are: they order nothing but themselves, so TSan sees a missing fence.
template <class T, class Update>
T atomic_update(T* address, Update update) {
  check_alignment(address, "atomic");
  maybe_preempt();
  T seen;
  __atomic_load(address, &seen, __ATOMIC_RELAXED);
  while (true) {
    T wanted = static_cast<T>(update(seen));
    if (__atomic_compare_exchange(address, &seen, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      return seen;
    }
  }
}

// cvt.r?i: saturating, NaN becomes 0.
template <class Integer, class Float>
Integer saturating_cast(Float rounded) {
  if (std::isnan(rounded)) {
    return 0;
  }
  // 2^digits is the first value above the range, and exact in any float type, which max() itself is not.
  const Float above = std::ldexp(Float(1), std::is_signed_v<Integer> ? 8 * sizeof(Integer) - 1 : 8 * sizeof(Integer));
  const Integer largest =
      static_cast<Integer>(std::is_signed_v<Integer> ? ~uint64_t{0} >> (65 - 8 * sizeof(Integer)) : ~uint64_t{0});
  if (rounded >= above) {
    return largest;
  }
  if (std::is_signed_v<Integer> && rounded <= -above) {
    return static_cast<Integer>(-largest - 1);
  }
  if (!std::is_signed_v<Integer> && rounded <= 0) {
    return 0;
  }
  return static_cast<Integer>(rounded);
}

template <class To, class From>
To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

template <class T>
using Same = std::common_type_t<T>;  // keeps an argument out of template deduction

}  // namespace cuda_emulator

// ---- Built-in variables --------------------------------------------------------------------------------------------

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = 32;

// ---- Barriers and fences -------------------------------------------------------------------------------------------

#define CUDA_EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDA_EMULATOR_SITE) {
  cuda_emulator::block_barrier(0, cuda_emulator::BarrierResult::kNone, {"__syncthreads", file, line});
}
inline int __syncthreads_or(int predicate, CUDA_EMULATOR_SITE) {
  return cuda_emulator::block_barrier(predicate, cuda_emulator::BarrierResult::kOr,
                                      {"__syncthreads_or", file, line});
}
inline int __syncthreads_and(int predicate, CUDA_EMULATOR_SITE) {
  return cuda_emulator::block_barrier(predicate, cuda_emulator::BarrierResult::kAnd,
                                      {"__syncthreads_and", file, line});
}
inline int __syncthreads_count(int predicate, CUDA_EMULATOR_SITE) {
  return cuda_emulator::block_barrier(predicate, cuda_emulator::BarrierResult::kCount,
                                      {"__syncthreads_count", file, line});
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_EMULATOR_SITE) {
  cuda_emulator::warp_leave(cuda_emulator::warp_meet(mask, nullptr, 0, true, {"__syncwarp", file, line}));
}
inline void __threadfence() { cuda_emulator::fence_device(); }
inline void __threadfence_block() { cuda_emulator::fence_block(); }

// ---- Warp collectives ----------------------------------------------------------------------------------------------

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_EMULATOR_SITE) {
  auto source_of = [=](int lane) { return (lane & ~(width - 1)) | (source & (width - 1)); };
  return cuda_emulator::warp_exchange(mask, value, source_of, {"__shfl_sync", file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_EMULATOR_SITE) {
  auto source_of = [=](int lane) {
    const int other = lane - static_cast<int>(delta);
    return other < (lane & ~(width - 1)) ? lane : other;
  };
  return cuda_emulator::warp_exchange(mask, value, source_of, {"__shfl_up_sync", file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_EMULATOR_SITE) {
  auto source_of = [=](int lane) {
    const int other = lane + static_cast<int>(delta);
    return other > (lane | (width - 1)) ? lane : other;
  };
  return cuda_emulator::warp_exchange(mask, value, source_of, {"__shfl_down_sync", file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDA_EMULATOR_SITE) {
  auto source_of = [=](int lane) {
    const int other = lane ^ lane_mask;
    return other > (lane | (width - 1)) ? lane : other;
  };
  return cuda_emulator::warp_exchange(mask, value, source_of, {"__shfl_xor_sync", file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_EMULATOR_SITE) {
  const unsigned own = predicate != 0 ? 1u << cuda_emulator::lane_index() : 0u;
  auto combine = [](unsigned a, unsigned b) { return a | b; };
  return cuda_emulator::warp_reduce(mask, own, combine, {"__ballot_sync", file, line});
}
inline int __any_sync(unsigned mask, int predicate, CUDA_EMULATOR_SITE) {
  auto combine = [](int a, int b) { return a | b; };
  return cuda_emulator::warp_reduce(mask, predicate != 0 ? 1 : 0, combine, {"__any_sync", file, line});
}
inline int __all_sync(unsigned mask, int predicate, CUDA_EMULATOR_SITE) {
  auto combine = [](int a, int b) { return a & b; };
  return cuda_emulator::warp_reduce(mask, predicate != 0 ? 1 : 0, combine, {"__all_sync", file, line});
}

#define CUDA_EMULATOR_REDUCE(NAME, T, EXPRESSION)                                  \
  inline T NAME(unsigned mask, T value, CUDA_EMULATOR_SITE) {                      \
    auto combine = [](T a, T b) -> T { return EXPRESSION; };                       \
    return cuda_emulator::warp_reduce(mask, value, combine, {#NAME, file, line});  \
  }
CUDA_EMULATOR_REDUCE(__reduce_add_sync, unsigned, a + b)
CUDA_EMULATOR_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
CUDA_EMULATOR_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
CUDA_EMULATOR_REDUCE(__reduce_and_sync, unsigned, a & b)
CUDA_EMULATOR_REDUCE(__reduce_or_sync, unsigned, a | b)
CUDA_EMULATOR_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
CUDA_EMULATOR_REDUCE(__reduce_add_sync, int, static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
CUDA_EMULATOR_REDUCE(__reduce_min_sync, int, a < b ? a : b)
CUDA_EMULATOR_REDUCE(__reduce_max_sync, int, a > b ? a : b)
#undef CUDA_EMULATOR_REDUCE

// ---- Atomics -------------------------------------------------------------------------------------------------------

template <class T>
T atomicAdd(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T old) { return old + value; });
}
template <class T>
T atomicSub(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T old) { return old - value; });
}
template <class T>
T atomicMin(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicMax(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T old) { return value > old ? value : old; });
}
template <class T>
T atomicAnd(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T old) { return old & value; });
}
template <class T>
T atomicOr(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T old) { return old | value; });
}
template <class T>
T atomicXor(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T old) { return old ^ value; });
}
template <class T>
T atomicExch(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, cuda_emulator::Same<T> expected, cuda_emulator::Same<T> value) {
  return cuda_emulator::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return cuda_emulator::atomic_update(address, [=](unsigned old) { return old >= limit ? 0 : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
  return cuda_emulator::atomic_update(address,
                                      [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}

// ---- Loads and stores with a cache hint ----------------------------------------------------------------------------

#define CUDA_EMULATOR_LOAD(NAME)                        \
  template <class T>                                    \
  T NAME(const T* address) {                            \
    cuda_emulator::check_alignment(address, #NAME);     \
    return *address;                                    \
  }
CUDA_EMULATOR_LOAD(__ldg)
CUDA_EMULATOR_LOAD(__ldca)
CUDA_EMULATOR_LOAD(__ldcg)
CUDA_EMULATOR_LOAD(__ldcs)
#undef CUDA_EMULATOR_LOAD

#define CUDA_EMULATOR_STORE(NAME)                                \
  template <class T>                                             \
  void NAME(T* address, cuda_emulator::Same<T> value) {          \
    cuda_emulator::check_alignment(address, #NAME);              \
    *address = value;                                            \
  }
CUDA_EMULATOR_STORE(__stwb)
CUDA_EMULATOR_STORE(__stcg)
CUDA_EMULATOR_STORE(__stcs)
#undef CUDA_EMULATOR_STORE

// ---- Arithmetic that rounds as it says -----------------------------------------------------------------------------
// The build passes -ffp-contract=off, so that a product stays a product.

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// fminf and fmaxf ignore a NaN, and so do CUDA's min and max of floats.
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  const T x = static_cast<T>(a);
  const T y = static_cast<T>(b);
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(x, y);
  } else {
    return y < x ? y : x;
  }
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  const T x = static_cast<T>(a);
  const T y = static_cast<T>(b);
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(x, y);
  } else {
    return x < y ? y : x;
  }
}

// ---- Conversions and bits ------------------------------------------------------------------------------------------

inline int __float2int_rn(float x) { return cuda_emulator::saturating_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return cuda_emulator::saturating_cast<int>(std::trunc(x)); }
inline int __float2int_rd(float x) { return cuda_emulator::saturating_cast<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return cuda_emulator::saturating_cast<int>(std::ceil(x)); }
inline unsigned __float2uint_rn(float x) { return cuda_emulator::saturating_cast<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return cuda_emulator::saturating_cast<unsigned>(std::trunc(x)); }
inline int __double2int_rn(double x) { return cuda_emulator::saturating_cast<int>(std::nearbyint(x)); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return static_cast<double>(x); }

inline int __float_as_int(float x) { return cuda_emulator::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_emulator::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_emulator::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_emulator::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_emulator::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_emulator::bit_cast<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x != 0 ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x != 0 ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int bit = 0; bit < 32; bit++) {
    result |= (x >> bit & 1) << (31 - bit);
  }
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(int64_t{a} * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

// Byte i of the result is the byte of y:x that nibble i of the selector names; bit 3 repeats its sign instead.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t source = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned nibble = selector >> (4 * i) & 15;
    unsigned byte = source >> (8 * (nibble & 7)) & 255;
    if (nibble & 8) {
      byte = (byte & 128) != 0 ? 255 : 0;
    }
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}

inline void __trap() { cuda_emulator::fail("__trap() was called"); }

using std::isfinite;
using std::isinf;
using std::isnan;
