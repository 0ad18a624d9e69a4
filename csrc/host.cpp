// The Python module `_host`: gathers the gradients of an optimizer in C++ and calls the launchers of the ops library on
// them, without torch's dispatcher between. It is the fast twin of fastamp/_gradients.py, has the same interface and
// gives the same results. Unlike the ops library it is built against one torch.
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include "buckets.h"
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

// fn(launchers, stream) with the device current and, unless `brief`, other Python threads free to run.
template <class Fn>
void launch(c10::Device device, const Fn& fn, bool brief = false) {
  const Launchers* launchers = launchers_of(device.is_cuda());
  FASTAMP_CHECK(launchers, "this build of fastamp has no kernels for ", device.str());
  std::optional<py::gil_scoped_release> release;
  if (!brief) release.emplace();
  const c10::OptionalDeviceGuard guard(device.is_cuda() ? std::optional<c10::Device>(device) : std::nullopt);
  fn(launchers, launchers->current_stream(device.index()));
}

void count_write(c10::TensorImpl* tensor) {
  if (!tensor->is_inference()) tensor->bump_version();
}
void count_write(const at::Tensor& tensor) { count_write(tensor.unsafeGetTensorImpl()); }

// The gradients of one device.
struct DeviceGradients {
  explicit DeviceGradients(c10::Device device) : device(device) {}

  // Keeps the gradients alive. Until then they are borrowed from their parameters, which spares two locked instructions
  // each, and is safe only while this thread holds the GIL and runs no Python code.
  void own() {
    owned.reserve(grads.capacity());
    while (owned.size() < grads.size())
      owned.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(grads[owned.size()]));
  }

  c10::Device device;
  std::vector<c10::TensorImpl*> grads;
  std::vector<at::Tensor> owned;  // the first of them
  Buckets buckets;
};

// As Python writes it: "torch.float32".
std::string dtype_name(at::ScalarType type) {
  return py::str(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(type))));
}

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

// The tensor's Python object, or nullptr where Python has not seen it. What the slot offers depends on torch's version.
template <class Slot>
auto python_object(const Slot& slot, int) -> decltype(slot.load_pyobj()) {
  return slot.load_pyobj();
}
template <class Slot>
PyObject* python_object(const Slot& slot, long) {
  return slot.check_pyobj().value_or(nullptr);
}

// Whether a kernel can read the tensor's memory. All others take torch's own path: other layouts, wrappers (DTensor),
// tensors inside functorch transforms and more have dispatch keys of their own; Python subclasses that have none
// (__torch_function__) are told by their type.
bool is_plain(const at::Tensor& grad) {
  using c10::DispatchKey, c10::DispatchKeySet;
  constexpr DispatchKeySet kPlain =
      DispatchKeySet(DispatchKey::CPU) | DispatchKeySet(DispatchKey::CUDA) | DispatchKeySet(DispatchKey::AutogradCPU) |
      DispatchKeySet(DispatchKey::AutogradCUDA) | DispatchKeySet(DispatchKey::AutocastCPU) |
      DispatchKeySet(DispatchKey::AutocastCUDA) | DispatchKeySet(DispatchKey::ADInplaceOrView) |
      DispatchKeySet(DispatchKey::Conjugate) | DispatchKeySet(DispatchKey::Negative);
  const c10::TensorImpl* impl = grad.unsafeGetTensorImpl();
  if ((impl->key_set().raw_repr() & ~kPlain.raw_repr()) != 0 || (impl->is_cuda() && !launchers_of(true))) return false;
  PyObject* const object = python_object(*impl->pyobj_slot(), 0);
  return !object || THPVariable_CheckExact(object);
}

// The data of a one-element argument.
void* scalar(const at::Tensor& tensor, const char* name, c10::Device device, at::ScalarType dtype = at::kFloat) {
  FASTAMP_CHECK(is_plain(tensor) && tensor.scalar_type() == dtype && tensor.numel() == 1 && tensor.device() == device,
                name, " must hold one ", dtype_name(dtype), " element on ", device.str(), ", got ", tensor.numel(),
                " of ", dtype_name(tensor.scalar_type()), " on ", tensor.device().str());
  return tensor.data_ptr();
}

Layout layout_of(const at::Tensor& grad, StridedRef* strided) {
  if (grad.is_contiguous()) return Layout::kDense;
  const at::Tensor real = grad.is_complex() ? at::view_as_real(grad.is_conj() ? grad.conj() : grad) : grad;
  return classify_layout(real.dim(), real.sizes().data(), real.strides().data(), nullptr, strided);
}

void add(DeviceGradients& to, const at::Tensor& grad, Py_ssize_t group, Py_ssize_t param) {
  DType dtype{};
  FASTAMP_CHECK(kernel_dtype(grad.scalar_type(), &dtype), "the gradient of params[", param, "] in group ", group,
                " must be a floating-point or complex tensor, got ", dtype_name(grad.scalar_type()));
  StridedRef strided;
  const Layout layout = layout_of(grad, &strided);
  FASTAMP_CHECK(layout != Layout::kOverlapping, "the gradient of params[", param, "] in group ", group,
                " overlaps itself in memory (an expanded tensor?): assign .contiguous() to .grad instead");
  FASTAMP_CHECK(layout != Layout::kTooManyDims, "the gradient of params[", param, "] in group ", group,
                " has gaps in more than ", kMaxDims, " dimensions: assign .contiguous() to .grad instead");
  const c10::TensorImpl* impl = grad.unsafeGetTensorImpl();
  const int64_t numel = grad.is_complex() ? 2 * impl->numel() : impl->numel();
  const auto index = static_cast<int32_t>(to.grads.size());
  // What data_ptr() gives, without its virtual calls.
  void* const data = numel == 0 ? nullptr
                                : static_cast<char*>(impl->unsafe_storage().mutable_data()) +
                                      impl->storage_offset() * static_cast<int64_t>(impl->itemsize());
  Bucket& bucket = to.buckets.by_dtype[static_cast<size_t>(dtype)];
  if (layout == Layout::kDense || numel == 0) {
    if (bucket.dense.empty()) bucket.dense.reserve(to.grads.capacity() - to.grads.size());
    __builtin_prefetch(data);
    bucket.dense.push_back({data, nullptr, numel, index});
  } else {
    strided.data = data;
    strided.source = nullptr;
    strided.numel = numel;
    strided.index = index;
    bucket.strided.push_back(strided);
  }
  to.grads.push_back(grad.unsafeGetTensorImpl());
  ++to.buckets.count;
}

// The gradients of a list of parameters, each found in steps. A gradient is a chain of dependent loads away from the
// list, and after a backward pass nearly all of them miss the caches: while one parameter is taken, one load is started
// for each of some that follow, and its result kept for the next step. No Python code may run between two calls.
class GradientWalk {
 public:
  GradientWalk(PyObject* const* params, Py_ssize_t begin, Py_ssize_t end) : params_(params), begin_(begin), end_(end) {
    for (Py_ssize_t i = begin - 5 * kStep; i < begin; ++i) start_loads(i);
  }

  // The gradient of params[i], undefined if it has none; nullptr if only Python can tell. i counts up from `begin`.
  const at::Tensor* at(Py_ssize_t i) {
    start_loads(i);
    return slot(i).grad;
  }

 private:
  static constexpr Py_ssize_t kStep = 4;
  static constexpr size_t kSlots = 32;  // more than parameters are under way

  struct Slot {
    const c10::TensorImpl* param;
    const at::Tensor* grad;
  };
  Slot& slot(Py_ssize_t i) { return slots_[static_cast<size_t>(i) % kSlots]; }
  bool contains(Py_ssize_t i) const { return i >= begin_ && i < end_; }

  void start_loads(Py_ssize_t i) {
    if (const Py_ssize_t at = i + 5 * kStep; at < end_) __builtin_prefetch(params_[at]);
    if (const Py_ssize_t at = i + 4 * kStep; contains(at)) {
      slot(at).param =
          THPVariable_CheckExact(params_[at]) ? THPVariable_Unpack(params_[at]).unsafeGetTensorImpl() : nullptr;
      __builtin_prefetch(slot(at).param);
    }
    if (const Py_ssize_t at = i + 3 * kStep; contains(at) && slot(at).param)
      __builtin_prefetch(slot(at).param->autograd_meta());
    if (const Py_ssize_t at = i + 2 * kStep; contains(at)) {
      // at::Tensor::grad() would first make sure that a warning about non-leaf tensors is not due.
      slot(at).grad = slot(at).param ? &slot(at).param->grad() : nullptr;
      if (slot(at).grad) {
        const auto* lines = reinterpret_cast<const char*>(slot(at).grad->unsafeGetTensorImpl());
        for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(lines + line);
      }
    }
    if (const Py_ssize_t at = i + kStep; contains(at) && slot(at).grad && slot(at).grad->defined()) {
      const c10::TensorImpl* grad = slot(at).grad->unsafeGetTensorImpl();
      __builtin_prefetch(grad->unsafe_storage().unsafeGetStorageImpl());
      __builtin_prefetch(python_object(*grad->pyobj_slot(), 0));
    }
  }

  PyObject* const* params_;
  Py_ssize_t begin_, end_;
  Slot slots_[kSlots];
};

class GradientBuckets {
 public:
  explicit GradientBuckets(const py::iterable& param_groups) : GradientBuckets(param_groups, Borrowed{}) { own(); }

  // Without own(), for a caller that is done with the gradients, or calls it, before Python code may run.
  struct Borrowed {};
  GradientBuckets(const py::iterable& param_groups, Borrowed) {
    static PyObject* const key = PyUnicode_InternFromString("params");
    const py::object groups = as_sequence(param_groups, "the parameter groups must be a sequence of dicts");
    for (Py_ssize_t g = 0; g < PySequence_Fast_GET_SIZE(groups.ptr()); ++g) {
      const auto group = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(groups.ptr(), g));
      // Other classes run code of their own, and a list made for this call may be all that keeps its tensors.
      bool ordinary = PyDict_CheckExact(group.ptr());
      if (!ordinary) own();
      const py::object params = py::reinterpret_steal<py::object>(PyObject_GetItem(group.ptr(), key));
      if (!params) throw py::error_already_set();
      ordinary = ordinary && (PyList_CheckExact(params.ptr()) || PyTuple_CheckExact(params.ptr()));
      if (!ordinary) own();
      take_all(as_sequence(params, "a parameter group's \"params\" must be a sequence of tensors"), g);
      if (!ordinary) own();
    }
  }

  void own() {
    for (auto& d : by_device_) d.own();
  }

  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> found;
    for (const auto& d : by_device_) found.push_back(d.device);
    return found;
  }
  const std::vector<at::Tensor>& grads(c10::Device device) const { return on(device).owned; }
  const std::vector<at::Tensor>& other() const { return other_; }
  const std::vector<std::pair<Py_ssize_t, Py_ssize_t>>& other_at() const { return other_at_; }
  py::object first_fp16() const {
    return fp16_group_ < 0 ? py::object(py::none()) : py::make_tuple(fp16_group_, fp16_param_);
  }
  int64_t count() const { return count_; }
  bool all_on(c10::Device device) const {
    return other_.empty() && by_device_.size() == 1 && by_device_[0].device == device;
  }
  bool has_fp16() const { return fp16_group_ >= 0; }
  // Whether the work of a pass takes microseconds, less than other threads could use.
  bool brief(c10::Device device) const {
    const Launchers* launchers = launchers_of(device.is_cuda());
    return launchers && on(device).buckets.within(launchers->one_thread_elements);
  }

  void unscale(c10::Device device, const at::Tensor& inv_scale, const at::Tensor& found_inf, bool brief = false) const {
    const DeviceGradients& g = on(device);
    const auto* inv = static_cast<const float*>(scalar(inv_scale, "inv_scale", device));
    auto* found = static_cast<float*>(scalar(found_inf, "found_inf", device));
    auto run = [&](const Launchers* l, void* stream) {
      g.buckets.for_each_in_turn(l->one_thread_elements,
                                 [&](const TensorSpan& span, bool) { l->unscale(span, inv, found, stream); });
    };
    launch(device, run, brief);
    count_writes(g.grads);
    count_write(found_inf);
  }

  void check(c10::Device device, const at::Tensor& found_inf, bool brief = false) const {
    const DeviceGradients& g = on(device);
    auto* found = static_cast<float*>(scalar(found_inf, "found_inf", device));
    auto run = [&](const Launchers* l, void* stream) {
      g.buckets.for_each([&](const TensorSpan& span, bool) { l->check(span, found, stream); });
    };
    launch(device, run, brief);
    count_write(found_inf);
  }

  std::pair<at::Tensor, at::Tensor> unscale_norm(c10::Device device, const at::Tensor& inv_scale,
                                                 const at::Tensor& found_inf) const {
    const DeviceGradients& g = on(device);
    const bool repeats = g.buckets.repeats();
    if (repeats) unscale(device, inv_scale, found_inf);  // the norm is of what all of the list's divisions leave
    const at::Tensor factor = repeats ? at::ones({}, inv_scale.options()) : inv_scale;
    const auto* inv = static_cast<const float*>(scalar(factor, "inv_scale", device));
    auto* found = static_cast<float*>(scalar(found_inf, "found_inf", device));
    const auto count = static_cast<int64_t>(g.grads.size());
    bool float64 = true;
    g.buckets.for_each([&](const TensorSpan& span, bool) { float64 &= span.dtype == DType::kFloat64; });
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
    launch(device, [&](const Launchers* l, void* stream) {
      auto zeros = [&] { return at::zeros({1}, options.dtype(at::kInt)); };
      // Never destroyed: at interpreter exit the CUDA context may be gone before static destructors run.
      static auto& tickets = *new TicketCache<at::Tensor>;
      const at::Tensor ticket =
          l->is_capturing(stream) ? zeros() : tickets.get(device.is_cuda() ? device.index() : -1, stream, zeros);
      output.ticket = static_cast<unsigned*>(ticket.data_ptr());
      g.buckets.for_each([&](const TensorSpan& span, bool last) {
        output.finish = last;
        l->unscale_norm(span, inv, found, output, stream);
      });
    });
    count_writes(g.grads);
    count_write(found_inf);
    return {total, norms};
  }

  void clip(c10::Device device, const at::Tensor& coefficient) const {
    const DeviceGradients& g = on(device);
    const bool float64 = coefficient.scalar_type() == at::kDouble;
    const void* by = scalar(coefficient, "coefficient", device, float64 ? at::kDouble : at::kFloat);
    launch(device, [&](const Launchers* l, void* stream) {
      g.buckets.for_each_in_turn(l->one_thread_elements,
                                 [&](const TensorSpan& span, bool) { l->clip(span, {by, float64}, stream); });
    });
    count_writes(g.grads);
  }

 private:
  static py::object as_sequence(const py::object& object, const char* message) {
    const py::object sequence = py::reinterpret_steal<py::object>(PySequence_Fast(object.ptr(), message));
    if (!sequence) throw py::error_already_set();
    return sequence;
  }

  void take_all(const py::object& params, Py_ssize_t group) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params.ptr());) {
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(params.ptr());
      GradientWalk walk(PySequence_Fast_ITEMS(params.ptr()), i, size);
      const at::Tensor* grad = nullptr;
      for (; i < size && (grad = walk.at(i)); ++i)
        if (grad->defined()) take(*grad, group, i, size - i);
      // Asking Python may change anything, the list of parameters too.
      if (i < size) {
        own();
        take_from_subclass(PySequence_Fast_GET_ITEM(params.ptr(), i), group, i);
        ++i;
      }
    }
  }

  // A parameter's class may have its own idea of `grad`: Python is asked.
  void take_from_subclass(PyObject* param, Py_ssize_t group, Py_ssize_t index) {
    if (!THPVariable_Check(param)) {
      PyErr_Format(PyExc_AssertionError, "expected param to be torch.Tensor, got %s", Py_TYPE(param)->tp_name);
      throw py::error_already_set();
    }
    const py::object grad = py::reinterpret_borrow<py::object>(param).attr("grad");
    if (grad.is_none()) return;
    if (!THPVariable_Check(grad.ptr())) {
      PyErr_Format(PyExc_TypeError, "the gradient of params[%zd] in group %zd must be a tensor, got %s", index, group,
                   Py_TYPE(grad.ptr())->tp_name);
      throw py::error_already_set();
    }
    take(THPVariable_Unpack(grad.ptr()), group, index, 1);
    own();  // before the Python object goes
  }

  // `expected` is how many more gradients may come.
  void take(const at::Tensor& grad, Py_ssize_t group, Py_ssize_t param, Py_ssize_t expected) {
    ++count_;
    if (fp16_group_ < 0 && grad.scalar_type() == at::kHalf) {
      fp16_group_ = group;
      fp16_param_ = param;
    }
    if (!is_plain(grad)) {
      other_.push_back(grad);
      other_at_.emplace_back(group, param);
      return;
    }
    for (auto& d : by_device_)
      if (d.device == grad.device()) return add(d, grad, group, param);
    by_device_.emplace_back(grad.device());
    by_device_.back().grads.reserve(expected);
    add(by_device_.back(), grad, group, param);
  }

  const DeviceGradients& on(c10::Device device) const {
    for (const auto& d : by_device_)
      if (d.device == device) return d;
    throw py::key_error("no gradients on " + device.str());
  }

  // In-place writes, as autograd counts them.
  static void count_writes(const std::vector<c10::TensorImpl*>& grads) {
    // A counter is bumped with a locked instruction, which waits for its cache line before anything else may go on.
    // Reading a few counters first lets their lines come together.
    constexpr size_t kTogether = 16;
    for (size_t begin = 0; begin < grads.size(); begin += kTogether) {
      const size_t end = std::min(begin + kTogether, grads.size());
      for (size_t i = begin; i < end; ++i)
        if (!grads[i]->is_inference()) static_cast<void>(grads[i]->version_counter().current_version());
      for (size_t i = begin; i < end; ++i) count_write(grads[i]);
    }
  }

  std::vector<DeviceGradients> by_device_;
  std::vector<at::Tensor> other_;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> other_at_;
  Py_ssize_t fp16_group_ = -1, fp16_param_ = -1;
  int64_t count_ = 0;
};

// The whole of the common case in one call: if all gradients are plain and on found_inf's device, unscales them (or
// checks them, without inv_scale) and returns None. Else returns the buckets, with nothing written.
py::object unscale_on_one_device(const py::iterable& param_groups, const std::optional<at::Tensor>& inv_scale,
                                 const at::Tensor& found_inf, bool allow_fp16) {
  GradientBuckets buckets(param_groups, GradientBuckets::Borrowed{});
  const c10::Device device = found_inf.device();
  if (!buckets.all_on(device) || (!allow_fp16 && buckets.has_fp16())) {
    buckets.own();
    return py::cast(std::move(buckets));
  }
  const bool brief = buckets.brief(device);
  if (!brief) buckets.own();
  if (inv_scale) {
    buckets.unscale(device, *inv_scale, found_inf, brief);
  } else {
    buckets.check(device, found_inf, brief);
  }
  return py::none();
}

// fastamp.ops.update_scale_ and clip_coefficient without torch's dispatcher, for GradScaler.
void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker, const std::vector<at::Tensor>& found_infs,
                  double growth_factor, double backoff_factor, int64_t growth_interval, std::optional<double> min_scale,
                  std::optional<double> max_scale, int64_t hysteresis,
                  const std::optional<at::Tensor>& hysteresis_tracker) {
  const c10::Device device = scale.device();
  ScaleUpdate update{};
  update.scale = static_cast<float*>(scalar(scale, "scale", device));
  update.growth_tracker = static_cast<int32_t*>(scalar(growth_tracker, "growth_tracker", device, at::kInt));
  update.growth_factor = growth_factor;
  update.backoff_factor = backoff_factor;
  update.growth_interval = growth_interval;
  update.set_limits(min_scale, max_scale);
  update.hysteresis = static_cast<int32_t>(hysteresis);
  if (hysteresis_tracker)
    update.hysteresis_left = static_cast<int32_t*>(scalar(*hysteresis_tracker, "hysteresis_tracker", device, at::kInt));
  FASTAMP_CHECK(!found_infs.empty() && found_infs.size() <= kMaxFoundInfs, "found_infs must hold 1 to ", kMaxFoundInfs,
                " tensors, got ", found_infs.size());
  for (const at::Tensor& found_inf : found_infs)
    update.found_infs[update.num_found_infs++] = static_cast<const float*>(scalar(found_inf, "found_inf", device));
  launch(device, [&](const Launchers* l, void* stream) { l->update_scale(update, stream); });
  count_write(scale);
  count_write(growth_tracker);
  if (hysteresis_tracker) count_write(*hysteresis_tracker);
}

at::Tensor clip_coefficient(const at::Tensor& total, double max_norm) {
  const bool float64 = total.scalar_type() == at::kDouble;
  const void* data = scalar(total, "total_norm", total.device(), float64 ? at::kDouble : at::kFloat);
  at::Tensor coefficient = at::empty({}, total.options());
  launch(total.device(), [&](const Launchers* l, void* stream) {
    l->clip_coefficient({data, float64}, max_norm, coefficient.data_ptr(), stream);
  });
  return coefficient;
}

}  // namespace
}  // namespace fastamp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using fastamp::GradientBuckets;
  m.attr("built_for_torch") = py::make_tuple(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);
  m.def("bind", &fastamp::bind, py::arg("cpu_table"), py::arg("cuda_table"));
  m.def("unscale_on_one_device", &fastamp::unscale_on_one_device, py::arg("param_groups"), py::arg("inv_scale"),
        py::arg("found_inf"), py::arg("allow_fp16"));
  m.def("update_scale_", &fastamp::update_scale);
  m.def("clip_coefficient", &fastamp::clip_coefficient, py::arg("total_norm"), py::arg("max_norm"));
  py::class_<GradientBuckets>(m, "GradientBuckets",
                              "The gradients of an optimizer, sorted by device: see fastamp._gradients.")
      .def(py::init<const py::iterable&>(), py::arg("param_groups"))
      .def_property_readonly("devices", &GradientBuckets::devices)
      .def_property_readonly("other", &GradientBuckets::other)
      .def_property_readonly("other_at", &GradientBuckets::other_at)
      .def_property_readonly("first_fp16", &GradientBuckets::first_fp16)
      .def_property_readonly("count", &GradientBuckets::count)
      .def("grads", &GradientBuckets::grads, py::arg("device"))
      .def(
          "unscale",
          [](const GradientBuckets& b, c10::Device device, const at::Tensor& inv_scale, const at::Tensor& found_inf) {
            b.unscale(device, inv_scale, found_inf);
          },
          py::arg("device"), py::arg("inv_scale"), py::arg("found_inf"))
      .def(
          "check",
          [](const GradientBuckets& b, c10::Device device, const at::Tensor& found_inf) { b.check(device, found_inf); },
          py::arg("device"), py::arg("found_inf"))
      .def("unscale_norm", &GradientBuckets::unscale_norm, py::arg("device"), py::arg("inv_scale"),
           py::arg("found_inf"))
      .def("clip", &GradientBuckets::clip, py::arg("device"), py::arg("coefficient"));
}
