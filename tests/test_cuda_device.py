"""What only a GPU can show: streams, CUDA graphs, synchronisation, the allocator, pinned memory, huge tensors.

The op tests run on the GPU too (their `cuda` backend); compare_backends.py compares it with the emulated one.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from backends import why_missing
from op_inputs import DTYPES, all_same_bits, random_values, same_bits, scalar
from torch import Tensor

import fastamp
from fastamp import ops
from fastamp.checkpointing import checkpoint

pytestmark = pytest.mark.skipif(bool(why_missing("cuda")), reason=why_missing("cuda") or "there is a GPU")

FORMATS = ["int8", "int4", "fp8_e4m3", "fp8_e5m2"]
# Lets everything queued behind it on a stream wait: some 50 ms.
SLEEP_CYCLES = 10**8


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


# ---- calls of the ops: inputs, and a function that returns what it computes


class Call:
    """inputs: made anew for a seed, always of the same shapes.  run: takes them, returns new tensors."""

    def __init__(self, inputs: Callable[[torch.Generator], list[Tensor]], run: Callable[[list[Tensor]], list[Tensor]]):
        self._inputs, self.run = inputs, run

    def inputs(self, seed: int, device: torch.device) -> list[Tensor]:
        return [moved(tensor, device) for tensor in self._inputs(torch.Generator().manual_seed(seed))]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """With its gaps, which `to` would close."""
    if tensor._base is None:
        return tensor.to(device)
    return tensor._base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def gradient_list(rng: torch.Generator) -> list[Tensor]:
    """found_inf, the factor, then gradients of all dtypes, one of them too large for one block, one with gaps."""
    sizes = [1, 17, 4097, 300_001, 5, 70_000, 33, 8193]
    grads = [random_values(size, DTYPES[i % 4], rng) for i, size in enumerate(sizes)]
    if int(torch.randint(0, 2, (1,), generator=rng)):
        grads[3][123_456] = float("inf")
    factor = torch.rand((), generator=rng) + 0.25
    return [torch.zeros(()), factor, *grads, random_values(40 * 70, torch.float32, rng).view(40, 70)[:, 3:60]]


def activation(rng: torch.Generator) -> list[Tensor]:
    return [random_values(100_003, torch.bfloat16, rng)]


def scale_state(rng: torch.Generator) -> list[Tensor]:
    overflow = torch.randint(0, 2, (), generator=rng).float()
    return [torch.tensor(1024.0), torch.tensor(1, dtype=torch.int32), overflow, torch.zeros(())]


def quantize(format: str, stochastic: bool) -> Callable[[list[Tensor]], list[Tensor]]:
    def run(inputs: list[Tensor]) -> list[Tensor]:
        payload, scales = ops.quantize_blockwise(inputs[0], format, 128, stochastic, 7, 0)
        decoded = ops.dequantize_blockwise(payload, scales, inputs[0].shape, inputs[0].dtype)
        return [payload.view(torch.uint8), scales, decoded]

    return run


def masks(inputs: list[Tensor]) -> list[Tensor]:
    mask = inputs[0] > 0
    packed = ops.pack_bits(mask)
    scaled, value = ops.pack_scaled_mask(mask.half() * 1.25)
    return [packed, ops.unpack_bits(packed, mask.shape), scaled, ops.unpack_bits(scaled, mask.shape, value)]


def returns(call: Callable[[list[Tensor]], object]) -> Callable[[list[Tensor]], list[Tensor]]:
    """For ops that return nothing, a tensor or several."""

    def run(inputs: list[Tensor]) -> list[Tensor]:
        result = call(inputs)
        return [result] if isinstance(result, Tensor) else list(result or ())  # type: ignore[call-overload]

    return run


CALLS = {
    "unscale_": Call(gradient_list, returns(lambda i: ops.unscale_(i[2:], i[0], i[1]))),
    "check_": Call(gradient_list, returns(lambda i: ops.check_(i[2:], i[0]))),
    "unscale_norm_": Call(gradient_list, returns(lambda i: ops.unscale_norm_(i[2:], i[0], i[1]))),
    "clip_": Call(gradient_list, returns(lambda i: ops.clip_(i[2:], i[1]))),
    "clip_coefficient": Call(gradient_list, returns(lambda i: ops.clip_coefficient(i[1], 0.5))),
    "scale_losses": Call(gradient_list, returns(lambda i: ops.scale_losses(i[2:], i[1]))),
    "accumulate_": Call(
        lambda rng: [*gradient_list(rng)[:2], *(random_values(70_001, d, rng) for d in (torch.float32, torch.half))],
        returns(lambda i: ops.accumulate_([i[2]], [i[3]], i[0], i[1])),
    ),
    "update_scale_": Call(scale_state, returns(lambda i: ops.update_scale_(i[0], i[1], i[2:], 2.0, 0.5, 2))),
    "masks": Call(activation, masks),
    **{f"quantize {f}": Call(activation, quantize(f, False)) for f in FORMATS},
    "quantize int8 stochastic": Call(activation, quantize("int8", True)),
}
IN_PLACE = ["unscale_", "check_", "clip_", "accumulate_", "update_scale_"]


def computed(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """All that a call writes: its results, and its inputs after it."""
    return [*call.run(inputs), *inputs]


def refill(static: list[Tensor], fresh: list[Tensor]) -> None:
    for target, source in zip(static, fresh, strict=True):
        target.copy_(source)


# ---- streams


@pytest.mark.parametrize("name", CALLS)
def test_work_goes_to_the_current_stream(device, name):
    """The inputs are written behind a pause on a side stream. On any other stream the op would read zeros."""
    call = CALLS[name]
    fresh = call.inputs(1, device)
    expected = [t.clone() for t in computed(call, [t.clone() for t in fresh])]
    static = [torch.zeros_like(t) for t in fresh]
    call.run([torch.ones_like(t) for t in fresh])  # whatever a first call makes once
    torch.cuda.synchronize()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        call.run([torch.ones_like(t) for t in fresh])
        torch.cuda._sleep(SLEEP_CYCLES)
        refill(static, fresh)
        found = computed(call, static)
        assert not side.query(), "the op waited for the device, or the pause was too short to tell"
    side.synchronize()
    assert all_same_bits(found, expected)


def test_streams_do_not_share_what_the_norm_counts_blocks_with(device):
    """Norms on two streams at a time, from two threads: each launch finishes when its own blocks have."""
    call = CALLS["unscale_norm_"]
    inputs = {seed: call.inputs(seed, device) for seed in (0, 1)}
    expected = {seed: [t.clone() for t in call.run([t.clone() for t in given])] for seed, given in inputs.items()}
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for _ in range(100):
                    if not all_same_bits(call.run([t.clone() for t in inputs[seed]]), expected[seed]):
                        wrong.append(seed)
        except Exception as error:  # which would end only this thread
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_another_device_than_the_current(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    call = CALLS[name]
    expected = computed(call, call.inputs(2, torch.device("cuda:0")))
    with torch.cuda.device(0):
        found = computed(call, call.inputs(2, torch.device("cuda:1")))
        assert torch.cuda.current_device() == 0
    assert all(t.device.index == 1 for t in found)
    assert all_same_bits(found, expected)


def test_host_tensors_among_device_tensors_are_refused(device):
    grad, found = torch.ones(5, device=device), torch.zeros((), device=device)
    for grads, found_inf, inv_scale in (
        ([grad], found, torch.tensor(0.5)),
        ([grad], torch.zeros(()), torch.tensor(0.5, device=device)),
        ([grad, torch.ones(5)], found, torch.tensor(0.5, device=device)),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ops.unscale_(grads, found_inf, inv_scale)
    assert grad.tolist() == [1.0] * 5 and found.item() == 0.0


# ---- CUDA graphs


@pytest.mark.parametrize("name", CALLS)
def test_graph_replays_what_was_captured(device, name):
    call = CALLS[name]
    static = call.inputs(0, device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.run([t.clone() for t in static])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.run(static)
    for seed in (1, 2, 3):
        fresh = call.inputs(seed, device)
        expected = computed(call, [t.clone() for t in fresh])
        refill(static, fresh)
        graph.replay()
        assert all_same_bits([*results, *static], expected), f"replay of seed {seed}"


# Those whose step reads found_inf on the device.
CAPTURABLE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, capturable=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True, capturable=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


class Training:
    """A small model, its optimizer without host syncs, a scaler, and static inputs."""

    def __init__(self, device: torch.device, optimizer: str = "AdamW", half: bool = False) -> None:
        torch.manual_seed(0)
        self.half = half
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
        self.optimizer = CAPTURABLE[optimizer](self.model.parameters())
        self.scaler = fastamp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
        self.x, self.y = torch.randn(16, 32, device=device), torch.randn(16, 8, device=device)

    def step(self, clip: bool) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16, enabled=self.half):
            loss = torch.nn.functional.mse_loss(self.model(self.x), self.y)
        self.scaler.scale(loss).backward()
        if clip:
            self.scaler.clip_grad_norm_(self.optimizer, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> list[Tensor]:
        scaler = self.scaler
        return [
            *(p.detach().clone() for p in self.model.parameters()),
            scaler._scale.clone(),
            scaler._growth_tracker.clone(),
        ]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16 autocast"])
@pytest.mark.parametrize("optimizer", CAPTURABLE)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
def test_whole_training_steps_in_a_graph(device, clip, optimizer, half):
    eager, captured = (Training(device, optimizer, half) for _ in range(2))
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            captured.step(clip)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        eager.step(clip)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step(clip)
    for step in range(4):
        if step == 2:  # an overflow: the step is skipped and the scale backed off
            eager.x.fill_(float("inf"))
            captured.x.copy_(eager.x)
        if step == 3:
            eager.x.fill_(0.5)
            captured.x.copy_(eager.x)
        eager.step(clip)
        graph.replay()
        assert all_same_bits(captured.state(), eager.state()), f"step {step}"
    assert captured.scaler._scale.item() == 1024.0  # 2048 after three clean steps, halved by the overflow


# ---- no waiting, no growth


@contextlib.contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_check_for_synchronising_works(device):
    with pytest.raises(RuntimeError, match="synchronizing"), synchronising_is_an_error():
        torch.ones((), device=device).item()


@pytest.mark.parametrize("name", CALLS)
def test_ops_do_not_synchronise(device, name):
    call = CALLS[name]
    inputs = call.inputs(3, device)
    call.run(inputs)
    with synchronising_is_an_error():
        call.run(inputs)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
def test_training_steps_do_not_synchronise(device, clip):
    training = Training(device)
    training.step(clip)
    with synchronising_is_an_error():
        for _ in range(3):
            training.step(clip)


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_storing_activations_does_not_synchronise(device, offload):
    model, x = blocks(device), torch.randn(64, 256, device=device)
    for attempt in range(2):  # the first pins memory
        with synchronising_is_an_error() if attempt else contextlib.nullcontext():
            with fastamp.store_activations("int8", offload=offload):
                loss = model(x).sum()
            loss.backward()


@pytest.mark.parametrize("name", CALLS)
def test_memory_does_not_grow(device, name):
    call = CALLS[name]
    inputs = call.inputs(4, device)
    call.run(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(50):
        call.run(inputs)
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    if name in IN_PLACE:
        assert after["allocation.all.allocated"] == before["allocation.all.allocated"]


# ---- launches


def test_one_launch_for_a_list_of_one_dtype(device):
    """As the emulator records it, and nothing of torch's beside it: no fill, no copy."""
    grads = [torch.ones(100, device=device) for _ in range(300)]
    found, factor = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    ops.unscale_(grads, found, factor)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.unscale_(grads, found, factor)
        torch.cuda.synchronize()
    events = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in events if "Synchronize" not in name and "Context" not in name]
    if not kernels:
        pytest.skip("the profiler sees no kernels on this machine")
    assert len([name for name in kernels if "unscale_kernel" in name]) == 1 and len(kernels) == 1, kernels


def test_norms_have_the_same_bits_every_time(device):
    call = CALLS["unscale_norm_"]
    seen = set()
    for _ in range(20):
        total, norms = call.run(call.inputs(5, device))
        seen.add((total.item(), *norms.tolist()))
    assert len(seen) == 1


# ---- storage of activations


def blocks(device: torch.device, width: int = 256, count: int = 4) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(count):
        layers += [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
    return torch.nn.Sequential(*layers).to(device)


class Measured:
    """Gradients of a forward and backward, and device bytes: held between the two, and at most."""

    def __init__(self, device: torch.device, run: Callable[[torch.nn.Sequential, Tensor], Tensor], region=None) -> None:
        model, x = blocks(device), torch.randn(2048, 256, device=device, generator=_seeded(device))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with region() if region else contextlib.nullcontext():  # what is made once
            loss = run(model, x).sum()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.zero_()
        del loss
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with region() if region else contextlib.nullcontext() as self.stats:
            loss = run(model, x).sum()
        torch.cuda.synchronize()
        self.held = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - before
        self.grads = [parameter.grad for parameter in model.parameters()]


def _seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def plain(model: torch.nn.Sequential, x: Tensor) -> Tensor:
    return model(x)


def checkpointed(model: torch.nn.Sequential, x: Tensor, **kwargs) -> Tensor:
    layers = list(model)
    for at in range(0, len(layers), 3):
        x = checkpoint(torch.nn.Sequential(*layers[at : at + 3]), x, **kwargs)
    return x


def test_checkpoint_takes_less_memory_and_gives_the_same_gradients(device):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        kept, recomputed = Measured(device, plain), Measured(device, checkpointed)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all_same_bits(recomputed.grads, kept.grads)
    assert recomputed.held < kept.held / 3 and recomputed.peak < kept.peak


def test_stored_activations_take_less_memory(device):
    kept = Measured(device, plain)
    for format, most in (("bf16", 0.6), ("int8", 0.4)):
        stored = Measured(device, plain, lambda format=format: fastamp.store_activations(format))
        assert stored.held < most * kept.held, format
        assert stored.peak < kept.peak, format
        for found, expected in zip(stored.grads, kept.grads, strict=True):
            assert (found - expected).norm() < 0.05 * expected.norm()


def test_offloaded_activations_leave_the_device_and_come_back(device):
    kept = Measured(device, plain)
    offloaded = Measured(device, plain, lambda: fastamp.store_activations("exact", offload="cpu"))
    assert offloaded.stats.offloaded > 0.8 * kept.held
    assert all_same_bits(offloaded.grads, kept.grads)
    # At most two copies are on their way when forward ends; the largest saved tensor is 8 MiB.
    assert offloaded.held <= kept.held - offloaded.stats.offloaded + 3 * 8 * 2**20


def test_offloaded_buffers_are_pinned_and_used_again(device):
    from fastamp import _offload

    tensors = [torch.randn(1000, 1000, device=device) for _ in range(4)]
    copies = [_offload.HostCopy([t]) for t in tensors]
    buffers = {c.buffer.data_ptr() for c in copies}
    assert all(c.buffer.is_pinned() for c in copies)
    assert all(torch.equal(c.unpack(), t) for c, t in zip(copies, tensors, strict=True))
    del copies
    gc.collect()
    again = [_offload.HostCopy([t + 1]) for t in tensors]
    assert {c.buffer.data_ptr() for c in again} == buffers
    assert all(torch.equal(c.unpack(), t + 1) for c, t in zip(again, tensors, strict=True))


def test_offload_from_a_side_stream(device):
    """What a side stream computes is copied after it has been computed, and read back there."""
    x = torch.randn(512, 1024, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        leaf = x.clone().requires_grad_()
        with fastamp.store_activations("exact", offload="cpu"):
            y = (leaf * 2).sin().square()
        y.sum().backward()
    side.synchronize()
    expected = x.clone().requires_grad_()
    (expected * 2).sin().square().sum().backward()
    assert same_bits(leaf.grad, expected.grad)


# ---- sizes


@pytest.mark.parametrize("numel", [2**31 + 5, 2**32 + 5])
def test_more_elements_than_32_bits_count(device, numel):
    free, _ = torch.cuda.mem_get_info()
    if free < 5 * numel:
        pytest.skip(f"this GPU has {free >> 30} GiB free")
    grad = torch.full((numel,), 6.0, dtype=torch.float16, device=device)
    grad[-1], grad[2**31 - 1] = -4.0, 8.0
    found, factor = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    total, _ = ops.unscale_norm_([grad], found, factor)
    assert found.item() == 0.0
    assert grad[-1].item() == -2.0 and grad[2**31 - 1].item() == 4.0
    assert all(bool((part == 3.0).all()) for part in (grad[: 2**31 - 1], grad[2**31 : -1]))
    exact = (9.0 * (numel - 2) + 4.0 + 16.0) ** 0.5
    assert total.item() == pytest.approx(exact, rel=1e-6)
    grad[-1] = float("nan")
    ops.check_([grad], found)
    assert found.item() == 1.0
    grad[-1] = 3.0
    payload, scales = ops.quantize_blockwise(grad)
    assert int(payload[-1]) == 127 and scales.numel() == (numel + 127) // 128
    assert bool((scales == scales[0]).sum() >= scales.numel() - 1)


# ---- the package on this machine


def test_the_self_check_covers_the_gpu(capsys):
    from fastamp import _diagnostics

    assert _diagnostics.main() == 0
    assert "unscale_ on cuda right" in capsys.readouterr().out


def test_scaler_has_torchs_bits_on_the_gpu(device):
    torch.manual_seed(1)
    start = [torch.nn.Parameter(torch.randn(n, device=device)) for n in (3, 1000, 40_001)]
    seen = []
    for scaler_type in (fastamp.GradScaler, torch.amp.GradScaler):
        params = copy.deepcopy(start)
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = scaler_type("cuda", init_scale=4096.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            loss = sum((p * (i + 1)).square().sum() for i, p in enumerate(params))
            scaler.scale(loss if step != 3 else loss * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append([*(p.detach() for p in params), scalar(scaler.get_scale(), device)])
    assert all_same_bits(*seen)
