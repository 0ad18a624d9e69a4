// CPU twin of cuda/unscale.cuh: the contract is in ../unscale.h.
#include "../unscale.h"

#include <atomic>
#include <cmath>
#include <type_traits>

#include "parallel.h"
#include "simd.h"

namespace fastamp::cpu {
namespace {

// ---- spans: one run of consecutive elements ------------------------------------------------------------------
// Each returns whether a value that it stored (check: read) is not finite. Tails and other processors take the
// scalar form.

template <class T>
bool check_span(const T* p, int64_t n) {
  typename Element<T>::Bits seen = 0;
  for (int64_t i = 0; i < n; ++i) seen = std::max(seen, abs_bits(p[i]));
  return seen >= Element<T>::kInfinity;
}

template <class T>
bool multiply_span(T* p, int64_t n, typename Element<T>::OpMath factor) {
  typename Element<T>::Bits seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    p[i] = Element<T>::store(Element<T>::load(p[i]) * factor);
    seen = std::max(seen, abs_bits(p[i]));
  }
  return seen >= Element<T>::kInfinity;
}

template <class T>
bool accumulate_span(float* main, const T* grad, int64_t n, float factor) {
  uint32_t seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float scaled = static_cast<float>(Element<T>::load(grad[i])) * factor;
    main[i] = main[i] + scaled;
    seen = std::max(seen, abs_bits(main[i]));
  }
  return seen >= Element<float>::kInfinity;
}

// Sums of squares run in kLanes interleaved partial sums of at most kRun / kLanes additions each, which are then
// added in double: the error of a sum is bounded by kRun / kLanes + 1 roundings however long the tensor is.
constexpr int kLanes = 32;
constexpr int64_t kRun = 4096;

template <class T, bool kWrite>
bool multiply_norm_run(T* p, int64_t n, typename Element<T>::OpMath factor,
                       typename Element<T>::OpMath (&lanes)[kLanes]) {
  typename Element<T>::Bits seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    T stored = p[i];
    if (kWrite) p[i] = stored = Element<T>::store(Element<T>::load(stored) * factor);
    const auto x = Element<T>::load(stored);
    lanes[i % kLanes] += x * x;
    seen = std::max(seen, abs_bits(stored));
  }
  return seen >= Element<T>::kInfinity;
}

#if FASTAMP_X86
constexpr int kStep = 8, kUnroll = kLanes / kStep;

// Four vectors in flight hide the load latency of one.
template <class T>
FASTAMP_AVX2 bool check_span_avx2(const T* p, int64_t n) {
  using V = Avx2<T>;
  auto seen = V::zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int u = 0; u < kUnroll; ++u) {
      typename V::Raw raw;
      std::memcpy(&raw, p + i + u * kStep, sizeof raw);
      seen = V::note(seen, raw);
    }
  return V::any_nonfinite(seen) | check_span(p + i, n - i);
}

template <class T>
FASTAMP_AVX2 bool multiply_span_avx2(T* p, int64_t n, float factor) {
  using V = Avx2Wide<T>;
  const __m256 by = _mm256_set1_ps(factor);
  auto seen = V::zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int u = 0; u < kLanes; u += V::kElements) seen = V::note(seen, V::multiply(p + i + u, by));
  for (; i + V::kElements <= n; i += V::kElements) seen = V::note(seen, V::multiply(p + i, by));
  return V::any_nonfinite(seen) | multiply_span(p + i, n - i, factor);
}

// Four doubles at a time. There is no unsigned maximum of 64 bits: what is not finite is noted as it comes.
template <bool kWrite>
FASTAMP_AVX2 bool double_span_avx2(std::conditional_t<kWrite, double, const double>* p, int64_t n, double factor) {
  const __m256d by = _mm256_set1_pd(factor);
  const __m256i abs_mask = _mm256_set1_epi64x(Element<double>::kAbsMask);
  const __m256i largest = _mm256_set1_epi64x(Element<double>::kInfinity - 1);
  __m256i bad = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int u = 0; u < 16; u += 4) {
      __m256d v = _mm256_loadu_pd(p + i + u);
      if constexpr (kWrite) _mm256_storeu_pd(p + i + u, v = _mm256_mul_pd(v, by));
      const __m256i bits = _mm256_and_si256(_mm256_castpd_si256(v), abs_mask);
      bad = _mm256_or_si256(bad, _mm256_cmpgt_epi64(bits, largest));
    }
  if constexpr (kWrite) return !_mm256_testz_si256(bad, bad) | multiply_span(p + i, n - i, factor);
  return !_mm256_testz_si256(bad, bad) | check_span(p + i, n - i);
}

template <class T>
FASTAMP_AVX2 bool accumulate_span_avx2(float* main, const T* grad, int64_t n, float factor) {
  const __m256 by = _mm256_set1_ps(factor);
  auto seen = Avx2<float>::zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = i + u * kStep;
      const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(main + at), _mm256_mul_ps(Avx2<T>::load(grad + at), by));
      _mm256_storeu_ps(main + at, sum);
      seen = Avx2<float>::note(seen, Avx2<float>::pack(sum));
    }
  return Avx2<float>::any_nonfinite(seen) | accumulate_span(main + i, grad + i, n - i, factor);
}

template <class T, bool kWrite>
FASTAMP_AVX2 bool multiply_norm_run_avx2(T* p, int64_t n, float factor, float (&lanes)[kLanes]) {
  using V = Avx2Wide<T>;
  const __m256 by = _mm256_set1_ps(factor);
  auto seen = V::zero();
  __m256 sum[kUnroll];
  for (int u = 0; u < kUnroll; ++u) sum[u] = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int u = 0; u < kLanes; u += V::kElements) {
      typename V::Raw raw;
      if (kWrite) {
        raw = V::multiply(p + i + u, by);
      } else {
        std::memcpy(&raw, p + i + u, sizeof raw);
      }
      seen = V::note(seen, raw);
    }
    for (int u = 0; u < kUnroll; ++u) {
      const __m256 x = Avx2<T>::load(p + i + u * kStep);  // the norm is of what was stored
      sum[u] = _mm256_add_ps(sum[u], _mm256_mul_ps(x, x));
    }
  }
  for (int u = 0; u < kUnroll; ++u) _mm256_storeu_ps(lanes + u * kStep, sum[u]);
  return V::any_nonfinite(seen) | multiply_norm_run<T, kWrite>(p + i, n - i, factor, lanes);
}
#endif

// ---- the same, with the form that this processor runs -----------------------------------------------------------

template <class T>
bool check_run(const T* p, int64_t n) {
#if FASTAMP_X86
  if (has_avx2()) {
    if constexpr (std::is_same_v<T, double>)
      return double_span_avx2<false>(p, n, 1.0);
    else
      return check_span_avx2(p, n);
  }
#endif
  return check_span(p, n);
}

template <class T>
bool multiply_run(T* p, int64_t n, typename Element<T>::OpMath factor) {
#if FASTAMP_X86
  if (has_avx2()) {
    if constexpr (std::is_same_v<T, double>)
      return double_span_avx2<true>(p, n, factor);
    else
      return multiply_span_avx2(p, n, factor);
  }
#endif
  return multiply_span(p, n, factor);
}

template <class T>
bool accumulate_run(float* main, const T* grad, int64_t n, float factor) {
#if FASTAMP_X86
  if constexpr (!std::is_same_v<T, double>)
    if (has_avx2()) return accumulate_span_avx2(main, grad, n, factor);
#endif
  return accumulate_span(main, grad, n, factor);
}

template <class T, bool kWrite>
bool multiply_norm_span(T* p, int64_t n, typename Element<T>::OpMath factor, double* sum_of_squares) {
  bool bad = false;
  double sum = 0;
  for (int64_t at = 0; at < n; at += kRun) {
    typename Element<T>::OpMath lanes[kLanes] = {};
    const int64_t length = std::min(kRun, n - at);
#if FASTAMP_X86
    if constexpr (!std::is_same_v<T, double>) {
      if (has_avx2()) {
        bad |= multiply_norm_run_avx2<T, kWrite>(p + at, length, factor, lanes);
      } else {
        bad |= multiply_norm_run<T, kWrite>(p + at, length, factor, lanes);
      }
    } else {
      bad |= multiply_norm_run<T, kWrite>(p + at, length, factor, lanes);
    }
#else
    bad |= multiply_norm_run<T, kWrite>(p + at, length, factor, lanes);
#endif
    for (auto lane : lanes) sum += lane;
  }
  *sum_of_squares = sum;
  return bad;
}

// ---- launchers ----------------------------------------------------------------------------------------------------

template <class Fn>
void dispatch(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn(float{});
    case DType::kFloat64: return fn(double{});
    case DType::kFloat16: return fn(F16{});
    case DType::kBFloat16: return fn(BF16{});
  }
}

// Many threads may find something; the flag in memory is written once, after them.
class FoundInf {
 public:
  explicit FoundInf(float* flag) : flag_(flag) {}
  ~FoundInf() {
    if (found_.load(std::memory_order_relaxed)) *flag_ = 1.0f;
  }
  void note(bool bad) {
    if (bad) found_.store(true, std::memory_order_relaxed);
  }

 private:
  float* flag_;
  std::atomic<bool> found_{false};
};

}  // namespace

void check(const TensorSpan& grads, float* found_inf, void*) {
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    FoundInf found(found_inf);
    Chunks(grads).for_each_segment([&](int64_t t, int64_t begin, int64_t end, int64_t) {
      found.note(check_run(static_cast<const T*>(grads.dense[t].data) + begin, end - begin));
    });
    for (int64_t s = 0; s < grads.num_strided; ++s) {
      const T* p = static_cast<const T*>(grads.strided[s].data);
      for_each_element(grads.strided[s], [&](int64_t at, int64_t) { found.note(check_span(p + at, 1)); });
    }
  });
}

void unscale(const TensorSpan& grads, const float* inv_scale, float* found_inf, void* stream) {
  const float factor = *inv_scale;
  if (factor == 1.0f) return check(grads, found_inf, stream);
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    FoundInf found(found_inf);
    Chunks(grads).for_each_segment([&](int64_t t, int64_t begin, int64_t end, int64_t) {
      found.note(multiply_run(static_cast<T*>(grads.dense[t].data) + begin, end - begin, factor));
    });
    for (int64_t s = 0; s < grads.num_strided; ++s) {
      T* p = static_cast<T*>(grads.strided[s].data);
      for_each_element(grads.strided[s], [&](int64_t at, int64_t) { found.note(multiply_span(p + at, 1, factor)); });
    }
  });
}

void unscale_norm(const TensorSpan& grads, const float* inv_scale, float* found_inf, const NormOutput& output, void*) {
  const float factor = *inv_scale;
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    FoundInf found(found_inf);
    auto run = [&](T* p, int64_t n, double* sum) {
      found.note(factor == 1.0f ? multiply_norm_span<T, false>(p, n, factor, sum)
                                : multiply_norm_span<T, true>(p, n, factor, sum));
    };
    const Chunks chunks(grads);
    // Walking chunks and tensors together, chunk + tensor grows by one from segment to segment: a place of its own
    // for each partial sum.
    chunks.for_each_segment([&](int64_t t, int64_t begin, int64_t end, int64_t chunk) {
      run(static_cast<T*>(grads.dense[t].data) + begin, end - begin, &output.partials[chunk + t]);
    });
    for (int64_t t = 0; t < grads.num_dense; ++t) {
      double sum = 0;
      if (grads.dense[t].numel)
        for (int64_t chunk = chunks.first_chunk(t); chunk <= chunks.last_chunk(t); ++chunk)
          sum += output.partials[chunk + t];
      output.sum_of_squares[grads.dense[t].index] = sum;
    }
    for (int64_t s = 0; s < grads.num_strided; ++s) {
      T* p = static_cast<T*>(grads.strided[s].data);
      double sum = 0;
      for_each_element(grads.strided[s], [&](int64_t at, int64_t) {
        double square;
        run(p + at, 1, &square);
        sum += square;
      });
      output.sum_of_squares[grads.strided[s].index] = sum;
    }
  });
  if (!output.finish) return;
  auto write = [&](void* to, int64_t at, double x) {
    if (output.float64) {
      static_cast<double*>(to)[at] = x;
    } else {
      static_cast<float*>(to)[at] = static_cast<float>(x);
    }
  };
  double total = 0;
  for (int64_t t = 0; t < output.count; ++t) {
    total += output.sum_of_squares[t];
    write(output.norms, t, std::sqrt(output.sum_of_squares[t]));
  }
  write(output.total, 0, std::sqrt(total));
}

void clip(const TensorSpan& grads, DeviceScalar coefficient, void*) {
  const double wide = coefficient.float64 ? *static_cast<const double*>(coefficient.data)
                                          : *static_cast<const float*>(coefficient.data);
  if (wide == 1.0) return;
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto factor = static_cast<typename Element<T>::OpMath>(wide);
    Chunks(grads).for_each_segment([&](int64_t t, int64_t begin, int64_t end, int64_t) {
      multiply_run(static_cast<T*>(grads.dense[t].data) + begin, end - begin, factor);
    });
    for (int64_t s = 0; s < grads.num_strided; ++s) {
      T* p = static_cast<T*>(grads.strided[s].data);
      for_each_element(grads.strided[s], [&](int64_t at, int64_t) { multiply_span(p + at, 1, factor); });
    }
  });
}

void accumulate(const TensorSpan& grads, const float* inv_scale, float* found_inf, void*) {
  const float factor = *inv_scale;
  dispatch(grads.dtype, [&](auto tag) {
    using T = decltype(tag);
    FoundInf found(found_inf);
    Chunks(grads).for_each_segment([&](int64_t t, int64_t begin, int64_t end, int64_t) {
      const TensorRef& ref = grads.dense[t];
      found.note(accumulate_run(static_cast<float*>(ref.data) + begin, static_cast<const T*>(ref.source) + begin,
                                end - begin, factor));
    });
    for (int64_t s = 0; s < grads.num_strided; ++s) {
      const StridedRef& ref = grads.strided[s];
      for_each_element(ref, [&](int64_t at, int64_t source_at) {
        found.note(accumulate_span(static_cast<float*>(ref.data) + at, static_cast<const T*>(ref.source) + source_at, 1,
                                   factor));
      });
    }
  });
}

}  // namespace fastamp::cpu
