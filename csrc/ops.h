// The boxed kernels that registration.cpp binds to their schemas, one section a source file.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

namespace fastamp {

// unscale.cpp
void unscale_boxed(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void check_boxed(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void unscale_norm_boxed(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void clip_boxed(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void accumulate_boxed(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);

// scale.cpp
void update_scale_boxed(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void clip_coefficient_boxed(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
std::vector<torch::stable::Tensor> scale_losses(std::vector<torch::stable::Tensor> losses, torch::stable::Tensor scale);

// storage.cpp
std::tuple<torch::stable::Tensor, torch::stable::Tensor> quantize_blockwise(torch::stable::Tensor x, std::string format,
                                                                            int64_t block_size, bool stochastic,
                                                                            std::optional<int64_t> seed, int64_t offset,
                                                                            std::optional<torch::stable::Tensor> base);
std::tuple<torch::stable::Tensor, torch::stable::Tensor> quantize_blockwise_stats(
    torch::stable::Tensor x, torch::stable::Tensor found_inf, torch::stable::Tensor amax, std::string format,
    int64_t block_size, bool stochastic, std::optional<int64_t> seed, int64_t offset,
    std::optional<torch::stable::Tensor> base);
torch::stable::Tensor dequantize_blockwise(torch::stable::Tensor payload, torch::stable::Tensor scales,
                                           std::vector<int64_t> shape, torch::headeronly::ScalarType dtype,
                                           std::optional<torch::stable::Tensor> base);
void quantize_blockwise_out(torch::stable::Tensor x, std::string format, int64_t block_size, bool stochastic,
                            std::optional<int64_t> seed, int64_t offset, std::optional<torch::stable::Tensor> base,
                            torch::stable::Tensor payload, torch::stable::Tensor scales);
void dequantize_blockwise_out(torch::stable::Tensor payload, torch::stable::Tensor scales, std::vector<int64_t> shape,
                              torch::headeronly::ScalarType dtype, std::optional<torch::stable::Tensor> base,
                              torch::stable::Tensor out);
torch::stable::Tensor pack_bits(torch::stable::Tensor mask);
std::tuple<torch::stable::Tensor, torch::stable::Tensor> pack_scaled_mask(torch::stable::Tensor x);
torch::stable::Tensor unpack_bits(torch::stable::Tensor payload, std::vector<int64_t> shape,
                                  std::optional<torch::stable::Tensor> value);

}  // namespace fastamp
