// The boxed kernels that registration.cpp binds to their schemas, one section a source file.
#pragma once

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
std::vector<torch::stable::Tensor> scale_losses(std::vector<torch::stable::Tensor> losses,
                                                torch::stable::Tensor scale);

}  // namespace fastamp
