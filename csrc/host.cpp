// The Python module `_host`: gathers the gradients of an optimizer in C++ and calls the launchers of the ops library on
// them, without torch's dispatcher between. It is the fast twin of fastamp/_gradients.py, has the same interface and
// gives the same results. Unlike the ops library it is built against one torch.
#include <array>
#include <string>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include "check.h"
#include "launchers.h"
#include "layout.h"
#include "ticket.h"

namespace py = pybind11;

namespace fastamp {
namespace {

const Launchers* launchers_of(bool cuda, const Launchers* set = nullptr) {
  static std::array<const Launchers*, 2> table{};
  if (set) table[cuda] = set;
  return table[cuda];
}

// Takes the addresses of the launcher tables (fastamp_launchers) of the loaded ops library; 0 where there is none.
void bind(uintptr_t cpu_table, uintptr_t cuda_table) {
  for (const bool cuda : {false, true}) {
    const auto* table = reinterpret_cast<const Launchers*>(cuda ? cuda_table : cpu_table);
    if (!table) continue;
    FASTAMP_CHECK(table->version == kLaunchersVersion, "fastamp._host was built for version ", kLaunchersVersion,
                  " of the launcher table, and the ops library has version ", table->version);
    launchers_of(cuda, table);
  }
}

// The gradients of one device.
struct DeviceGradients {
  explicit DeviceGradients(c10::Device device) : device(device) {}

  const Launchers* launchers() const { return launchers_of(device.is_cuda()); }

  // fn(span, last) for each dtype that has gradients.
  template <class Fn>
  void for_each_span(const Fn& fn) const {
    int last = -1;
    for (int d = 0; d < 4; ++d)
      if (!dense[d].empty() || !strided[d].empty()) last = d;
    for (int d = 0; d <= last; ++d) {
      if (dense[d].empty() && strided[d].empty()) continue;
      fn(TensorSpan{static_cast<DType>(d), dense[d].data(), static_cast<int64_t>(dense[d].size()), strided[d].data(),
                    static_cast<int64_t>(strided[d].size())},
         d == last);
    }
  }

  c10::Device device;
  std::vector<at::Tensor> grads;  // keeps what the references below point to
  std::array<std::vector<TensorRef>, 4> dense;
  std::array<std::vector<StridedRef>, 4> strided;
};

bool kernel_dtype(at::ScalarType type, DType* dtype) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat: *dtype = DType::kFloat32; return true;
    case at::kDouble:
    case at::kComplexDouble: *dtype = DType::kFloat64; return true;
    case at::kHalf: *dtype = DType::kFloat16; return true;
    case at::kBFloat16: *dtype = DType::kBFloat16; return true;
    default: return false;
  }
}

// Whether the tensor's Python object, if it has one yet, is of a subclass: one may override only __torch_function__, of
// which C++ knows nothing.
bool is_python_subclass(const at::Tensor& tensor) {
  PyObject* const object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && !THPVariable_CheckExact(object);
}

// Whether a kernel can read the tensor's memory. All others take torch's own path.
bool is_plain(const at::Tensor& grad) {
  return !is_python_subclass(grad) && grad.layout() == at::kStrided &&
         !grad.unsafeGetTensorImpl()->is_python_dispatch() && !grad.is_nested() && !grad.is_quantized() &&
         (grad.is_cpu() || (grad.is_cuda() && launchers_of(true)));
}

Layout layout_of(const at::Tensor& grad, StridedRef* strided) {
  if (grad.is_contiguous()) return Layout::kDense;
  const at::Tensor real = grad.is_complex() ? at::view_as_real(grad.is_conj() ? grad.conj() : grad) : grad;
  return classify_layout(real.dim(), real.sizes().data(), real.strides().data(), nullptr, strided);
}

void add(DeviceGradients& to, const at::Tensor& grad, Py_ssize_t group, Py_ssize_t param) {
  DType dtype{};
  FASTAMP_CHECK(kernel_dtype(grad.scalar_type(), &dtype), "the gradient of params[", param, "] in group ", group,
                " must be a floating-point or complex tensor, got ", c10::toString(grad.scalar_type()));
  StridedRef strided;
  const Layout layout = layout_of(grad, &strided);
  FASTAMP_CHECK(layout != Layout::kOverlapping, "the gradient of params[", param, "] in group ", group,
                " overlaps itself in memory (an expanded tensor?): assign .contiguous() to .grad instead");
  FASTAMP_CHECK(layout != Layout::kTooManyDims, "the gradient of params[", param, "] in group ", group,
                " has gaps in more than ", kMaxDims, " dimensions: assign .contiguous() to .grad instead");
  const int64_t numel = grad.is_complex() ? 2 * grad.numel() : grad.numel();
  const auto index = static_cast<int32_t>(to.grads.size());
  void* const data = grad.data_ptr();
  const auto d = static_cast<size_t>(dtype);
  if (layout == Layout::kDense || numel == 0) {
    to.dense[d].push_back({data, nullptr, numel, index});
  } else {
    strided.data = data;
    strided.source = nullptr;
    strided.numel = numel;
    strided.index = index;
    to.strided[d].push_back(strided);
  }
  to.grads.push_back(grad);
}

// p.grad. Where the parameter's class may have its own idea of `grad`, Python is asked.
at::Tensor grad_of(PyObject* param) {
  if (THPVariable_CheckExact(param)) return THPVariable_Unpack(param).grad();
  const py::object grad = py::reinterpret_borrow<py::object>(param).attr("grad");
  return grad.is_none() ? at::Tensor() : THPVariable_Unpack(grad.ptr());
}

class GradientBuckets {
 public:
  explicit GradientBuckets(const py::iterable& param_groups) {
    static PyObject* const key = PyUnicode_InternFromString("params");
    Py_ssize_t group_index = 0;
    for (const py::handle group : param_groups) {
      const py::object params = py::reinterpret_steal<py::object>(PyObject_GetItem(group.ptr(), key));
      if (!params) throw py::error_already_set();
      const py::object fast = py::reinterpret_steal<py::object>(
          PySequence_Fast(params.ptr(), "a parameter group's \"params\" must be a sequence of tensors"));
      if (!fast) throw py::error_already_set();
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.ptr()); ++i) {
        PyObject* const param = PySequence_Fast_GET_ITEM(fast.ptr(), i);
        if (!THPVariable_Check(param)) {
          PyErr_Format(PyExc_AssertionError, "expected param to be torch.Tensor, got %s", Py_TYPE(param)->tp_name);
          throw py::error_already_set();
        }
        const at::Tensor grad = grad_of(param);
        if (grad.defined()) take(grad, group_index, i);
      }
      ++group_index;
    }
  }

  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> found;
    for (const auto& d : by_device_) found.push_back(d.device);
    return found;
  }
  const std::vector<at::Tensor>& grads(c10::Device device) const { return on(device).grads; }
  const std::vector<at::Tensor>& other() const { return other_; }
  py::object first_fp16() const {
    return fp16_group_ < 0 ? py::object(py::none()) : py::make_tuple(fp16_group_, fp16_param_);
  }
  int64_t count() const { return count_; }

  void unscale(c10::Device device, const at::Tensor& inv_scale, const at::Tensor& found_inf) const {
    const DeviceGradients& g = on(device);
    const auto* inv = static_cast<const float*>(scalar(inv_scale, "inv_scale", g));
    auto* found = static_cast<float*>(scalar(found_inf, "found_inf", g));
    launch(g, [&](const Launchers* l, void* stream) {
      g.for_each_span([&](const TensorSpan& span, bool) { l->unscale(span, inv, found, stream); });
    });
    count_writes(g.grads);
    found_inf.unsafeGetTensorImpl()->bump_version();
  }

  void check(c10::Device device, const at::Tensor& found_inf) const {
    const DeviceGradients& g = on(device);
    auto* found = static_cast<float*>(scalar(found_inf, "found_inf", g));
    launch(g, [&](const Launchers* l, void* stream) {
      g.for_each_span([&](const TensorSpan& span, bool) { l->check(span, found, stream); });
    });
    found_inf.unsafeGetTensorImpl()->bump_version();
  }

  std::pair<at::Tensor, at::Tensor> unscale_norm(c10::Device device, const at::Tensor& inv_scale,
                                                 const at::Tensor& found_inf) const {
    const DeviceGradients& g = on(device);
    const auto* inv = static_cast<const float*>(scalar(inv_scale, "inv_scale", g));
    auto* found = static_cast<float*>(scalar(found_inf, "found_inf", g));
    const auto count = static_cast<int64_t>(g.grads.size());
    bool float64 = true;
    g.for_each_span([&](const TensorSpan& span, bool) { float64 &= span.dtype == DType::kFloat64; });
    const at::TensorOptions options = at::TensorOptions().device(device);
    const at::ScalarType dtype = float64 ? at::kDouble : at::kFloat;
    at::Tensor total = at::empty({}, options.dtype(dtype)), norms = at::empty({count}, options.dtype(dtype));
    const at::Tensor workspace = at::empty({2 * count + kMaxNormBlocks}, options.dtype(at::kDouble));
    NormOutput output{};
    output.sum_of_squares = workspace.data_ptr<double>();
    output.partials = output.sum_of_squares + count;
    output.norms = norms.data_ptr();
    output.total = total.data_ptr();
    output.count = count;
    output.float64 = float64;
    launch(g, [&](const Launchers* l, void* stream) {
      auto zeros = [&] { return at::zeros({1}, options.dtype(at::kInt)); };
      // Never destroyed: at interpreter exit the CUDA context may be gone before static destructors run.
      static auto& tickets = *new TicketCache<at::Tensor>;
      const at::Tensor ticket =
          l->is_capturing(stream) ? zeros() : tickets.get(device.is_cuda() ? device.index() : -1, stream, zeros);
      output.ticket = static_cast<unsigned*>(ticket.data_ptr());
      g.for_each_span([&](const TensorSpan& span, bool last) {
        output.finish = last;
        l->unscale_norm(span, inv, found, output, stream);
      });
    });
    count_writes(g.grads);
    found_inf.unsafeGetTensorImpl()->bump_version();
    return {total, norms};
  }

  void clip(c10::Device device, const at::Tensor& coefficient) const {
    const DeviceGradients& g = on(device);
    const bool float64 = coefficient.scalar_type() == at::kDouble;
    const void* by = scalar(coefficient, "coefficient", g, float64 ? at::kDouble : at::kFloat);
    launch(g, [&](const Launchers* l, void* stream) {
      g.for_each_span([&](const TensorSpan& span, bool) { l->clip(span, {by, float64}, stream); });
    });
    count_writes(g.grads);
  }

 private:
  void take(const at::Tensor& grad, Py_ssize_t group, Py_ssize_t param) {
    ++count_;
    if (fp16_group_ < 0 && grad.scalar_type() == at::kHalf) {
      fp16_group_ = group;
      fp16_param_ = param;
    }
    if (!is_plain(grad)) {
      other_.push_back(grad);
      return;
    }
    for (auto& d : by_device_)
      if (d.device == grad.device()) return add(d, grad, group, param);
    by_device_.emplace_back(grad.device());
    add(by_device_.back(), grad, group, param);
  }

  const DeviceGradients& on(c10::Device device) const {
    for (const auto& d : by_device_)
      if (d.device == device) return d;
    throw py::key_error("no gradients on " + device.str());
  }

  static void* scalar(const at::Tensor& tensor, const char* name, const DeviceGradients& on,
                      at::ScalarType dtype = at::kFloat) {
    FASTAMP_CHECK(tensor.scalar_type() == dtype && tensor.numel() == 1 && tensor.device() == on.device, name,
                  " must hold one ", c10::toString(dtype), " element on ", on.device.str(), ", got ", tensor.numel(),
                  " of ", c10::toString(tensor.scalar_type()), " on ", tensor.device().str());
    return tensor.data_ptr();
  }

  // fn(launchers, stream) with the gradients' device current and other Python threads free to run.
  template <class Fn>
  static void launch(const DeviceGradients& on, const Fn& fn) {
    const py::gil_scoped_release release;
    const c10::OptionalDeviceGuard guard(on.device.is_cuda() ? std::optional<c10::Device>(on.device) : std::nullopt);
    fn(on.launchers(), on.launchers()->current_stream(on.device.index()));
  }

  // In-place writes, as autograd counts them.
  static void count_writes(const std::vector<at::Tensor>& grads) {
    for (const at::Tensor& g : grads)
      if (!g.is_inference()) g.unsafeGetTensorImpl()->bump_version();
  }

  std::vector<DeviceGradients> by_device_;
  std::vector<at::Tensor> other_;
  Py_ssize_t fp16_group_ = -1, fp16_param_ = -1;
  int64_t count_ = 0;
};

}  // namespace
}  // namespace fastamp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using fastamp::GradientBuckets;
  m.def("bind", &fastamp::bind, py::arg("cpu_table"), py::arg("cuda_table"));
  py::class_<GradientBuckets>(m, "GradientBuckets",
                              "The gradients of an optimizer, sorted by device: see fastamp._gradients.")
      .def(py::init<const py::iterable&>(), py::arg("param_groups"))
      .def_property_readonly("devices", &GradientBuckets::devices)
      .def_property_readonly("other", &GradientBuckets::other)
      .def_property_readonly("first_fp16", &GradientBuckets::first_fp16)
      .def_property_readonly("count", &GradientBuckets::count)
      .def("grads", &GradientBuckets::grads, py::arg("device"))
      .def("unscale", &GradientBuckets::unscale, py::arg("device"), py::arg("inv_scale"), py::arg("found_inf"))
      .def("check", &GradientBuckets::check, py::arg("device"), py::arg("found_inf"))
      .def("unscale_norm", &GradientBuckets::unscale_norm, py::arg("device"), py::arg("inv_scale"),
           py::arg("found_inf"))
      .def("clip", &GradientBuckets::clip, py::arg("device"), py::arg("coefficient"));
}
