"""fastamp._host over many steps: no memory is lost, reference counts are what they were, also where it raises half-way.

The same file runs under AddressSanitizer: docs/verification.md has the command."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

import fastamp
from fastamp import _library

pytestmark = pytest.mark.skipif(
    _library.host is None, reason=f"the host module is not loaded: {_library.host_problem or 'it is'}"
)

CPU = torch.device("cpu")
STEPS = 100_000
# AddressSanitizer's malloc keeps no such count; it has checks of its own.
UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def allocated_bytes() -> int:
    """What malloc has given out and not got back."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("this C library does not tell how much is allocated")
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


class Setting:
    """Two groups: gradients of three dtypes, one with gaps, one sparse, one of a subclass, one missing."""

    class Wrapped(torch.Tensor):
        pass

    def __init__(self) -> None:
        grads = [
            torch.ones(5),
            torch.ones(6).half(),
            torch.ones(4, 6).double()[:, 1:3],
            torch.eye(2).to_sparse(),
            torch.ones(3).as_subclass(self.Wrapped),
            None,
        ]
        self.params = []
        for grad in grads:
            dtype = torch.float32 if grad is None else grad.dtype
            param = torch.nn.Parameter(torch.zeros(() if grad is None else grad.shape, dtype=dtype))
            param.grad = grad
            self.params.append(param)
        self.groups = [{"params": self.params[:2]}, {"params": tuple(self.params[2:])}]
        self.found, self.half, self.one = torch.zeros(()), torch.tensor(0.5), torch.tensor(1.0)

    def reference_counts(self) -> list[int]:
        objects: list[object] = [*self.params, *self.groups, self.found, self.half, self.one, CPU]
        objects += [p.grad for p in self.params if p.grad is not None] + [group["params"] for group in self.groups]
        return [sys.getrefcount(item) for item in objects]


def assert_nothing_is_lost(setting: Setting, step: Callable[[], object], steps: int) -> None:
    for _ in range(steps // 20 + 1):  # caches fill, the heap settles
        step()
    gc.collect()
    counts, objects, allocated = setting.reference_counts(), len(gc.get_objects()), allocated_bytes()
    nones = sys.getrefcount(None)
    for _ in range(steps):
        step()
    gc.collect()
    assert setting.reference_counts() == counts
    assert abs(sys.getrefcount(None) - nones) < steps // 2  # others come and go by the hundred
    assert len(gc.get_objects()) - objects < 200  # _scalars keeps a pool of up to 64 zeros
    # malloc gives 32 bytes at least. Python takes its own memory in arenas of up to a MiB, a few of which may come.
    assert UNDER_ASAN or allocated_bytes() - allocated < max(16 * steps, 64 * 1024)


def passes(setting: Setting) -> None:
    buckets = _library.host.GradientBuckets(setting.groups)
    buckets.unscale(CPU, setting.one, setting.found)
    buckets.check(CPU, setting.found)
    buckets.clip(CPU, setting.one)
    assert buckets.count == 5 and len(buckets.other) == 2 and buckets.devices == [CPU]
    assert buckets.first_fp16 == (0, 1)


def norm(setting: Setting) -> None:
    total, norms = _library.host.GradientBuckets(setting.groups).unscale_norm(CPU, setting.one, setting.found)
    assert norms.numel() == 3 and total.dtype == torch.float32


def scalars(setting: Setting) -> None:
    tracker = torch.zeros((), dtype=torch.int32)
    _library.host.update_scale_(setting.one, tracker, [setting.found], 1.0, 1.0, 5, None, None, 1, None)
    _library.host.clip_coefficient(setting.half, 2.0)
    assert _library.host.unscale_on_one_device(setting.groups, setting.one, setting.found, True) is not None
    assert _library.host.unscale_on_one_device(setting.groups[:1], setting.one, setting.found, True) is None


@pytest.mark.parametrize("step", [passes, norm, scalars], ids=lambda step: step.__name__)
def test_no_memory_is_lost_in_100_000_steps(step):
    setting = Setting()
    # At inv_scale 1 nothing is written, so that the values stay what they are.
    assert_nothing_is_lost(setting, lambda: step(setting), STEPS if step is not norm else STEPS // 2)


def test_no_memory_is_lost_by_a_scaler():
    setting = Setting()
    setting.params[3].grad = setting.params[4].grad = None
    optimizer = torch.optim.SGD(setting.params, lr=0.0)
    scaler = fastamp.GradScaler("cpu", init_scale=1.0, growth_interval=2**30, allow_fp16_grads=True)
    scaler.scale(torch.ones(()))

    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        scaler.update()

    assert_nothing_is_lost(setting, step, 2000)


# ---- where it raises half-way


class RaisesOnGrad(torch.Tensor):
    @property
    def grad(self) -> torch.Tensor:
        raise KeyError("no gradient today")


def raises_between_groups(setting: Setting) -> Iterator[dict]:
    yield setting.groups[0]
    raise ZeroDivisionError("half-way")


class RaisesInside(list):
    def __getitem__(self, key: object) -> object:
        raise LookupError("a group that cannot be read")


def with_gradient(setting: Setting, grad: torch.Tensor) -> list[dict]:
    param = torch.nn.Parameter(torch.zeros(grad.shape), requires_grad=False)
    if not grad.dtype.is_floating_point:
        param = torch.zeros(grad.shape, dtype=grad.dtype)
    param.grad = grad
    return [*setting.groups, {"params": [param]}]


FAILURES: dict[str, tuple[type[BaseException], Callable[[Setting], object]]] = {
    "integer gradient": (RuntimeError, lambda s: with_gradient(s, torch.ones(2, dtype=torch.int64))),
    "overlapping gradient": (RuntimeError, lambda s: with_gradient(s, torch.ones(1).expand(4))),
    "no tensor": (AssertionError, lambda s: [*s.groups, {"params": [s.params[0], "text"]}]),
    "no params": (KeyError, lambda s: [*s.groups, {}]),
    "params is no sequence": (TypeError, lambda s: [*s.groups, {"params": 3}]),
    "grad raises": (KeyError, lambda s: [*s.groups, {"params": [torch.ones(2).as_subclass(RaisesOnGrad)]}]),
    "iterator raises": (ZeroDivisionError, raises_between_groups),
    "group raises": (LookupError, lambda s: [*s.groups, RaisesInside()]),
    "not iterable": (TypeError, lambda s: 3),
}


@pytest.mark.parametrize("case", FAILURES)
def test_gathering_that_fails_half_way_loses_nothing(case):
    error, groups = FAILURES[case]
    setting = Setting()
    makes = [
        lambda g: _library.host.GradientBuckets(g),
        lambda g: _library.host.unscale_on_one_device(g, setting.half, setting.found, True),
    ]
    if case == "not iterable":  # pybind11 prints all arguments, and printing a tensor takes a millisecond
        makes.pop()

    def step() -> None:
        for make in makes:
            try:
                make(groups(setting))
            except error:
                continue
            raise AssertionError(f"{case} was not refused")

    before = [None if p.grad is None else p.grad.to_dense().clone() for p in setting.params]
    assert_nothing_is_lost(setting, step, 2500)
    for param, old in zip(setting.params, before, strict=True):
        assert old is None or torch.equal(param.grad.to_dense(), old)
    assert setting.found.item() == 0.0


def test_passes_that_refuse_their_arguments_lose_nothing():
    setting = Setting()
    double, two, meta = torch.zeros((), dtype=torch.float64), torch.zeros(2), torch.zeros((), device="meta")

    def step() -> None:
        buckets = _library.host.GradientBuckets(setting.groups)
        for call in (
            lambda: buckets.unscale(CPU, double, setting.found),
            lambda: buckets.unscale(CPU, setting.half, two),
            lambda: buckets.unscale(torch.device("cuda", 0), setting.half, setting.found),
            lambda: buckets.check(CPU, meta),
            lambda: buckets.unscale_norm(CPU, two, setting.found),
            lambda: buckets.clip(CPU, two),
            lambda: buckets.clip(CPU, "text"),
            lambda: _library.host.update_scale_(two, two, [], 2.0, 0.5, 1, None, None, 1, None),
            lambda: _library.host.clip_coefficient(two, 1.0),
        ):
            try:
                call()
            except (RuntimeError, KeyError, TypeError):
                continue
            raise AssertionError("a bad argument was not refused")

    assert_nothing_is_lost(setting, step, 1000)


# ---- who keeps what alive


def test_gradients_die_with_the_last_that_holds_them():
    param = torch.nn.Parameter(torch.zeros(5))
    param.grad = torch.ones(5)
    storage = torch.multiprocessing.reductions.StorageWeakRef(param.grad.untyped_storage())
    grad = weakref.ref(param.grad)
    buckets = _library.host.GradientBuckets([{"params": [param]}])
    held = buckets.grads(CPU)
    assert held[0] is param.grad
    param.grad = None
    del held
    gc.collect()
    assert not storage.expired() and buckets.grads(CPU)[0].tolist() == [1.0] * 5
    del buckets
    gc.collect()
    assert storage.expired() and grad() is None


def group_with_code(drop: Callable[[], None]) -> list[dict]:
    class Group(dict):
        def __getitem__(self, key: object) -> object:
            drop()
            return super().__getitem__(key)

    return [Group(params=[])]


def sequence_with_code(drop: Callable[[], None]) -> list[dict]:
    class Params(list):
        def __iter__(self) -> Iterator:
            drop()
            return super().__iter__()

    return [{"params": Params()}]


def parameter_with_code(drop: Callable[[], None]) -> list[dict]:
    class Parameter(torch.Tensor):
        @property
        def grad(self) -> None:
            drop()

    return [{"params": [torch.zeros(2).as_subclass(Parameter)]}]


def only_in_its_list(drop: Callable[[], None]) -> list[dict]:
    """Nothing but a list that the group makes holds the parameter and its gradient; code runs later."""

    class Group(dict):
        def __getitem__(self, key: object) -> object:
            param = torch.nn.Parameter(torch.zeros(3))
            param.grad = torch.ones(3)
            return [param]

    return [Group(), *group_with_code(drop)]


@pytest.mark.parametrize("numel", [3, 40_000], ids=["brief", "long"])
@pytest.mark.parametrize("later", [group_with_code, sequence_with_code, parameter_with_code, only_in_its_list])
def test_code_that_runs_while_gradients_are_gathered_takes_none_away(later, numel):
    """Gradients that the code drops are unscaled all the same, and not what takes their place in memory."""
    params = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(8)]
    for param in params:
        param.grad = torch.ones(numel)
    memory = [param.grad.detach() for param in params]
    made = []

    def drop() -> None:
        for param in params:
            param.grad = None
        made.extend(torch.zeros(3) for _ in range(32))

    groups = [{"params": params}, *later(drop)]
    assert _library.host.unscale_on_one_device(groups, torch.tensor(0.5), torch.zeros(()), False) is None
    assert all(torch.equal(grad, torch.full((numel,), 0.5)) for grad in memory)
    assert [tensor._version for tensor in made] == [0] * len(made)


def test_buckets_do_not_keep_parameters_or_groups_alive():
    param = torch.nn.Parameter(torch.zeros(5))
    param.grad = torch.ones(5)
    buckets = _library.host.GradientBuckets([{"params": [param]}])
    died = weakref.ref(param)
    del param
    gc.collect()
    assert died() is None and buckets.grads(CPU)[0].tolist() == [1.0] * 5


def test_a_module_built_for_another_torch_is_not_used():
    """It would load, and read tensors by the other torch's layout."""
    program = (
        "import warnings, torch; torch.__version__ = '2.99.0+cpu'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from fastamp import _library\n"
        "print(_library.host, *(str(w.message) for w in caught))"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "FASTAMP_HOST": "1"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("None ") and "was built for torch 2." in shown and "this is torch 2.99.0+cpu" in shown
    assert "Rebuild with" in shown
