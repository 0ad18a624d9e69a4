// A mixed-precision training loop in C++: libtorch for the model, fastamp's kernels for what a gradient scaler does.
// Prints the loss and the scale of each step.
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include <torch/torch.h>

#include <fastamp/launchers.h>

// What torch.amp.GradScaler is in Python, for the float32 parameters of one optimizer.
class GradScaler {
 public:
  GradScaler(torch::Device device, float init_scale)
      : launchers_(fastamp_launchers(device.is_cuda())),
        device_(device),
        scale_(torch::full({}, init_scale, device)),
        growth_tracker_(torch::zeros({}, torch::dtype(torch::kInt32).device(device))),
        found_inf_(torch::zeros({}, device)) {
    TORCH_CHECK(launchers_ && launchers_->version == fastamp::kLaunchersVersion, "no kernels for ", device);
  }

  torch::Tensor scale(const torch::Tensor& loss) const { return loss * scale_; }

  // Unscales the gradients, and steps unless one of them is not finite. Returns whether it stepped.
  bool step(torch::optim::Optimizer& optimizer) {
    std::vector<fastamp::TensorRef> refs;
    for (auto& group : optimizer.param_groups()) {
      for (auto& parameter : group.params()) {
        torch::Tensor grad = parameter.grad();
        if (!grad.defined()) continue;
        TORCH_CHECK(grad.is_non_overlapping_and_dense() && grad.scalar_type() == torch::kFloat32);
        refs.push_back({grad.data_ptr(), nullptr, grad.numel(), int32_t(refs.size())});
      }
    }
    const fastamp::TensorSpan grads = {fastamp::DType::kFloat32, refs.data(), int64_t(refs.size()), nullptr, 0};
    const torch::Tensor inv_scale = scale_.reciprocal();
    found_inf_.zero_();
    launchers_->unscale(grads, inv_scale.data_ptr<float>(), found_inf_.data_ptr<float>(), stream());
    const bool finite = found_inf_.item<float>() == 0.0f;
    if (finite) optimizer.step();
    return finite;
  }

  void update() {
    launchers_->update_scale({scale_.data_ptr<float>(), growth_tracker_.data_ptr<int32_t>(), nullptr, 2.0, 0.5, 3, 1,
                              0.0f, std::numeric_limits<float>::infinity(), 1, {found_inf_.data_ptr<float>()}},
                             stream());
  }

  float current() const { return scale_.item<float>(); }

 private:
  void* stream() const { return launchers_->current_stream(device_.index() < 0 ? 0 : device_.index()); }

  const fastamp::Launchers* launchers_;
  torch::Device device_;
  torch::Tensor scale_, growth_tracker_, found_inf_;
};

int main() {
  torch::manual_seed(0);
  const torch::Device device(torch::cuda::is_available() && fastamp_launchers(1) ? torch::kCUDA : torch::kCPU);
  // One after another: C++ leaves the order in which arguments draw their random weights open.
  torch::nn::Sequential model;
  model->push_back(torch::nn::Linear(16, 64));
  model->push_back(torch::nn::ReLU());
  model->push_back(torch::nn::Linear(64, 1));
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  GradScaler scaler(device, 65536.0f);
  const torch::Tensor x = torch::randn({64, 16}).to(device), y = x.sum(1, true).sin();
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = torch::mse_loss(model->forward(x), y);
    // Step 3 overflows: it is skipped and halves the scale.
    scaler.scale(step == 3 ? loss * std::numeric_limits<float>::infinity() : loss).backward();
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    std::printf("step %d: loss %.6f, scale %g%s\n", step, loss.item<float>(), scaler.current(),
                stepped ? "" : ", skipped");
  }
  return 0;
}
