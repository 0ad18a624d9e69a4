// The launchers of one kind of device as a table of functions. The ops library exports it (fastamp_launchers), so that
// the Python host module and C++ programs call the same code as the ops, without torch's dispatcher between.
#pragma once

#include "scale.h"
#include "storage.h"
#include "unscale.h"

namespace fastamp {

// Raised whenever a signature or a struct of the table changes: a caller built against another version must not
// call through it.
constexpr int32_t kLaunchersVersion = 3;

struct Launchers {
  int32_t version;
  void* (*current_stream)(int32_t device_index);  // torch's; nullptr for CPU
  bool (*is_capturing)(void* stream);             // into a CUDA graph
  int64_t one_thread_elements;                    // a span of up to so many is written by one thread
  decltype(&cpu::unscale) unscale;
  decltype(&cpu::check) check;
  decltype(&cpu::unscale_norm) unscale_norm;
  decltype(&cpu::clip) clip;
  decltype(&cpu::accumulate) accumulate;
  decltype(&cpu::update_scale) update_scale;
  decltype(&cpu::clip_coefficient) clip_coefficient;
  decltype(&cpu::scale_losses) scale_losses;
  decltype(&cpu::quantize) quantize;
  decltype(&cpu::dequantize) dequantize;
  decltype(&cpu::pack_bits) pack_bits;
  decltype(&cpu::pack_scaled_mask) pack_scaled_mask;
  decltype(&cpu::unpack_bits) unpack_bits;
};

}  // namespace fastamp

// The table for CPU (cuda = 0) or CUDA (cuda = 1) memory; nullptr where the library was built without CUDA.
extern "C" __attribute__((visibility("default"))) const fastamp::Launchers* fastamp_launchers(int cuda);
