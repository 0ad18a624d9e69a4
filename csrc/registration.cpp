// Every op's schema: the table of contents of the library. What an op does is said in fastamp/ops.py; how its kernel
// is called, in the header of its name.
//
// The emulated build (tests/cuda_emulator) compiles the same files with FASTAMP_EMULATED: its ops live in a namespace
// of their own, are registered for CPU tensors, and run the CUDA kernels on the CPU.
#include <Python.h>

#include "ops.h"
#include "tensor_list.h"

#ifndef FASTAMP_NAMESPACE
#define FASTAMP_NAMESPACE fastamp
#endif

#if defined(USE_CUDA) || defined(FASTAMP_EMULATED)
#define FASTAMP_HAS_CUDA_KERNELS 1
#endif

STABLE_TORCH_LIBRARY(FASTAMP_NAMESPACE, m) {
  m.def("unscale_(Tensor(a!)[] grads, Tensor(b!) found_inf, Tensor inv_scale) -> ()");
  m.def("check_(Tensor[] grads, Tensor(a!) found_inf) -> ()");
  m.def("unscale_norm_(Tensor(a!)[] grads, Tensor(b!) found_inf, Tensor inv_scale) -> (Tensor, Tensor)");
  m.def("clip_(Tensor(a!)[] grads, Tensor coefficient) -> ()");
  m.def("accumulate_(Tensor(a!)[] main_grads, Tensor[] grads, Tensor(b!) found_inf, Tensor inv_scale) -> ()");
  m.def(
      "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor[] found_infs, float growth_factor, "
      "float backoff_factor, int growth_interval, float? min_scale=None, float? max_scale=None, int hysteresis=1, "
      "Tensor(c!)? hysteresis_tracker=None) -> ()");
  m.def("clip_coefficient(Tensor total_norm, float max_norm) -> Tensor");
  m.def("scale_losses(Tensor[] losses, Tensor scale) -> Tensor[]");
  m.def(
      "quantize_blockwise(Tensor x, str format='int8', int block_size=128, bool stochastic=False, int? seed=None, "
      "int offset=0, Tensor? base=None) -> (Tensor, Tensor)");
  m.def(
      "quantize_blockwise_stats_(Tensor x, Tensor(a!) found_inf, Tensor(b!) amax, str format='int8', "
      "int block_size=128, bool stochastic=False, int? seed=None, int offset=0, Tensor? base=None) "
      "-> (Tensor, Tensor)");
  m.def(
      "dequantize_blockwise(Tensor payload, Tensor scales, SymInt[] shape, ScalarType dtype, Tensor? base=None) "
      "-> Tensor");
  m.def(
      "quantize_blockwise.out(Tensor x, str format='int8', int block_size=128, bool stochastic=False, int? seed=None, "
      "int offset=0, Tensor? base=None, *, Tensor(a!) payload, Tensor(b!) scales) -> ()");
  m.def(
      "dequantize_blockwise.out(Tensor payload, Tensor scales, SymInt[] shape, ScalarType dtype, Tensor? base=None, *, "
      "Tensor(a!) out) -> ()");
  m.def("pack_bits(Tensor mask) -> Tensor");
  m.def("pack_scaled_mask(Tensor x) -> (Tensor, Tensor)");
  m.def("unpack_bits(Tensor payload, SymInt[] shape, Tensor? value=None) -> Tensor");
}

namespace {

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("unscale_", &fastamp::unscale_boxed);
  m.impl("check_", &fastamp::check_boxed);
  m.impl("unscale_norm_", &fastamp::unscale_norm_boxed);
  m.impl("clip_", &fastamp::clip_boxed);
  m.impl("accumulate_", &fastamp::accumulate_boxed);
  m.impl("update_scale_", &fastamp::update_scale_boxed);
  m.impl("clip_coefficient", &fastamp::clip_coefficient_boxed);
  m.impl("scale_losses", TORCH_BOX(&fastamp::scale_losses));
  m.impl("quantize_blockwise", TORCH_BOX(&fastamp::quantize_blockwise));
  m.impl("quantize_blockwise_stats_", TORCH_BOX(&fastamp::quantize_blockwise_stats));
  m.impl("dequantize_blockwise", TORCH_BOX(&fastamp::dequantize_blockwise));
  m.impl("quantize_blockwise.out", TORCH_BOX(&fastamp::quantize_blockwise_out));
  m.impl("dequantize_blockwise.out", TORCH_BOX(&fastamp::dequantize_blockwise_out));
  m.impl("pack_bits", TORCH_BOX(&fastamp::pack_bits));
  m.impl("pack_scaled_mask", TORCH_BOX(&fastamp::pack_scaled_mask));
  m.impl("unpack_bits", TORCH_BOX(&fastamp::unpack_bits));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(FASTAMP_NAMESPACE, CPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(FASTAMP_NAMESPACE, CUDA, m) { register_kernels(m); }
// No kernel takes sparse tensors: registered here, the ops' own checks say so, and what to do.
STABLE_TORCH_LIBRARY_IMPL(FASTAMP_NAMESPACE, SparseCPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(FASTAMP_NAMESPACE, SparseCUDA, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(FASTAMP_NAMESPACE, SparseCsrCPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(FASTAMP_NAMESPACE, SparseCsrCUDA, m) { register_kernels(m); }

namespace fastamp {
namespace {

#ifdef FASTAMP_HAS_CUDA_KERNELS
void* current_cuda_stream([[maybe_unused]] int32_t device_index) {
  void* stream = nullptr;
#ifdef USE_CUDA
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
#endif
  return stream;
}
#endif

#define FASTAMP_LAUNCHERS(ns, current_stream, is_capturing, one_thread)                \
  {kLaunchersVersion, current_stream,    is_capturing,          one_thread,            \
   &ns::unscale,      &ns::check,        &ns::unscale_norm,     &ns::clip,             \
   &ns::accumulate,   &ns::update_scale, &ns::clip_coefficient, &ns::scale_losses,     \
   &ns::quantize,     &ns::dequantize,   &ns::pack_bits,        &ns::pack_scaled_mask, \
   &ns::unpack_bits}
#ifndef FASTAMP_EMULATED
void* no_stream(int32_t) { return nullptr; }
bool never_capturing(void*) { return false; }
const Launchers cpu_launchers = FASTAMP_LAUNCHERS(cpu, no_stream, never_capturing, kMinChunkElements);
#endif
#ifdef FASTAMP_HAS_CUDA_KERNELS
const Launchers cuda_launchers = FASTAMP_LAUNCHERS(cuda, current_cuda_stream, &cuda::is_capturing, 0);
#endif
#undef FASTAMP_LAUNCHERS

}  // namespace
}  // namespace fastamp

const fastamp::Launchers* fastamp_launchers(int cuda) {
#if defined(FASTAMP_EMULATED)
  return &fastamp::cuda_launchers;
#elif defined(FASTAMP_HAS_CUDA_KERNELS)
  return cuda ? &fastamp::cuda_launchers : &fastamp::cpu_launchers;
#else
  return cuda ? nullptr : &fastamp::cpu_launchers;
#endif
}

// The library is loaded as a Python module, so that Python's import system finds it; all it holds are the ops
// registered above.
// Weak, because a C++ program that links the library (fastamp.library_path()) brings no Python.
#pragma weak PyModule_Create2
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__ops() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_ops", "fastamp's operators", -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
