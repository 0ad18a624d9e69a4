// Calls every launcher of a table for every dtype and format, on a stream of the caller's choice. For the emulator's
// dry run, which records launches and touches no memory.
#include <vector>

#include "launchers.h"

using namespace fastamp;

extern "C" __attribute__((visibility("default"))) void launch_everything(const Launchers* launchers, void* stream) {
  alignas(16) static double memory[8];
  auto* const floats = reinterpret_cast<float*>(memory);
  auto* const bytes = reinterpret_cast<uint8_t*>(memory);
  const int64_t numel = 100;
  const std::vector<TensorRef> dense(1400, TensorRef{memory, memory, numel, 0});  // a large table, then a small one
  StridedRef strided{memory, memory, numel, 0, 1, {numel}, {2}, {2}};
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const TensorSpan span{dtype, dense.data(), static_cast<int64_t>(dense.size()), &strided, 1};
    NormOutput norms{memory, memory, reinterpret_cast<unsigned*>(memory), memory, memory, 1401, false, true};
    launchers->unscale(span, floats, floats, stream);
    launchers->check(span, floats, stream);
    launchers->unscale_norm(span, floats, floats, norms, stream);
    launchers->clip(span, {memory, false}, stream);
    launchers->scale_losses(span, false, floats, stream);
    if (element_size(dtype) == 2) launchers->scale_losses(span, true, floats, stream);
    launchers->pack_scaled_mask({dtype, memory, numel, bytes, memory, reinterpret_cast<uint64_t*>(memory)}, stream);
    for (const void* value : {static_cast<const void*>(nullptr), static_cast<const void*>(memory)})
      launchers->unpack_bits({dtype, value, memory, numel, bytes}, stream);
    if (dtype == DType::kFloat64) continue;
    launchers->accumulate(span, floats, floats, stream);
    for (const StorageFormat format :
         {StorageFormat::kInt8, StorageFormat::kInt4, StorageFormat::kFp8E4M3, StorageFormat::kFp8E5M2}) {
      Quantize quantize{};
      quantize.dtype = dtype;
      quantize.x = memory;
      quantize.numel = numel;
      quantize.format = format;
      quantize.block_size = 128;
      quantize.payload = bytes;
      quantize.scales = floats;
      for (const bool stochastic : {false, true}) {
        quantize.stochastic = stochastic;
        launchers->quantize(quantize, stream);
      }
      launchers->dequantize({dtype, memory, nullptr, numel, format, 128, bytes, floats}, stream);
    }
  }
  launchers->update_scale(ScaleUpdate{}, stream);
  launchers->clip_coefficient({memory, false}, 1.0, memory, stream);
  launchers->clip_coefficient({memory, true}, 1.0, memory, stream);
  launchers->pack_bits(bytes, numel, bytes, stream);
}
