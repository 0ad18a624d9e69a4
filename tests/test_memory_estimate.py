"""`fastamp.memory.estimate` against what real steps allocate, and what it promises about its arguments."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import random
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from memory_checks import Measured, check_estimate, close
from memory_models import CNN, GPT, Block, allocated_peak, make, storage_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from fastamp.memory import MemoryReport, NotTraceable, _blocks, _held, estimate
from fastamp.memory._optimizers import NAMES
from fastamp.memory._trace import CATEGORIES

pytestmark = pytest.mark.usefixtures("one_thread")


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if y.sum() > 0 else -y


# --- against real runs ---


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("cnn", {}),
        ("bert", {}),
        ("gpt", {}),
        ("gpt", {"precision": "bf16-amp"}),
        ("cnn", {"precision": "bf16-amp"}),
        ("cnn", {"accumulation": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()) or "plain",
)
def test_saved_bytes_and_peak_are_those_of_a_real_step(kind, settings):
    check_estimate(kind, **settings)


def test_checkpointed_blocks_are_those_of_a_real_step():
    model, inputs, loss = make("gpt")
    plain = estimate(model, inputs, loss=loss)
    report = estimate(model, inputs, loss=loss, checkpoint=True)
    assert report.activations < plain.activations / 3
    assert report.peak.breakdown["recomputed"] > 0 or report.peak.phase == "forward"
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:
        block.forward = lambda x, inner=block.forward: checkpoint(inner, x, use_reentrant=False)
    real = Measured(model, inputs, loss, torch.optim.AdamW(model.parameters()))
    close(report.activations, real.saved)
    close(report.peak.bytes, real.peak())


def test_inference_peak_is_that_of_a_real_pass():
    model, inputs, _ = make("gpt")
    model.eval()
    report = estimate(model, inputs, mode="inference")
    with torch.no_grad():
        peak = storage_bytes(*model.parameters(), inputs) + allocated_peak(lambda: model(inputs))
    close(report.peak.bytes, peak)
    assert report.gradients == report.optimizer_states == report.activations == 0
    assert report.whole["outputs"] == model(inputs).nbytes


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int, hidden: int, **settings: Any) -> None:
        super().__init__()
        self.rnn = kind(width, hidden, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@pytest.mark.parametrize(
    "kind, width, hidden, shape, settings",
    [
        (nn.LSTM, 32, 64, (40, 8), {"num_layers": 2}),
        (nn.LSTM, 100, 40, (8, 30), {"batch_first": True, "bidirectional": True}),
        (nn.LSTM, 24, 100, (12, 130), {}),
        (nn.LSTM, 32, 64, (40, 8), {"proj_size": 16}),
        (nn.LSTM, 64, 256, (20, 16), {"bias": False}),
        (nn.GRU, 32, 64, (40, 8), {"num_layers": 2}),
        (nn.RNN, 32, 64, (40, 8), {"num_layers": 2}),
    ],
    ids="layers both_ways large_batch projected aligned gru rnn".split(),
)
def test_what_recurrent_layers_keep_is_that_of_a_real_step(kind, width, hidden, shape, settings):
    torch.manual_seed(0)
    model, x = _Recurrent(kind, width, hidden, **settings), torch.randn(*shape, width)
    real = Measured(model, x, Tensor.sum, torch.optim.SGD(model.parameters(), 1e-3))
    report = estimate(model, x, loss=Tensor.sum, optimizer="sgd")
    close(report.activations, real.saved, 0.02)
    close(report.peak.bytes, real.peak())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_nothing_in_inference(kind):
    model, x = _Recurrent(kind, 32, 64, num_layers=2), torch.randn(40, 8, 32)
    with torch.no_grad():
        peak = storage_bytes(*model.parameters(), x) + allocated_peak(lambda: model(x))
    close(estimate(model, x, mode="inference").peak.bytes, peak)


def test_what_is_not_known_of_cudnns_recurrent_layers_is_said():
    model, x = _Recurrent(nn.LSTM, 8, 8), torch.randn(4, 2, 8)
    said = {
        (device, mode): any("cuDNN's RNN" in note for note in estimate(model, x, device=device, mode=mode).notes)
        for device in ("cpu", "cuda")
        for mode in ("train", "inference")
    }
    assert said == {
        ("cpu", "train"): False,
        ("cpu", "inference"): False,
        ("cuda", "train"): True,
        ("cuda", "inference"): False,
    }


_RESIDENT = """
import sys
sys.path.insert(0, {tests!r})
import torch
from memory_models import GPT
from fastamp.memory import estimate
torch.set_num_threads(1)

def status(field):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(field)) * 1024

model, tokens = GPT(width=128), torch.randint(300, (32, 128))
model(tokens[:1, :8]).sum().backward()
model.zero_grad()
before = status("VmRSS")
report = estimate(model, tokens, optimizer="sgd")
after_estimate = status("VmHWM")
open("/proc/self/clear_refs", "w").write("5")
start = status("VmRSS")
model(tokens).sum().backward()
print(report.peak.bytes - report.parameters.bytes, after_estimate - before, status("VmHWM") - start)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of the resident set needs Linux")
def test_resident_memory_grows_by_the_estimate_and_not_while_estimating():
    code = _RESIDENT.format(tests=str(Path(__file__).parent))
    # Without these, glibc keeps freed memory for later and so hides where the peak is.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=settings)
    estimated, while_estimating, real = map(int, done.stdout.split())
    assert estimated > 100e6
    assert abs(real - estimated) < 0.2 * estimated
    assert while_estimating < 0.2 * estimated + 60e6  # what importing and tracing itself takes


# --- optimizers ---


_SETTINGS = {"lbfgs": {"history_size": 3}}  # small, so that a few steps fill it


def _step_for_real(name: str, model: nn.Module, inputs: Tensor) -> int:
    trained = [p for p in model.parameters() if name != "muon" or p.ndim == 2]
    optimizer = NAMES[name](trained, **_SETTINGS.get(name, {}))

    def closure():
        optimizer.zero_grad()
        value = model(inputs).pow(2).mean()
        value.backward()
        return value

    for _ in range(8 if name == "lbfgs" else 1):
        optimizer.step(closure)
    tensors = []
    for state in optimizer.state.values():
        for value in state.values():
            tensors += [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]
    return storage_bytes(*tensors)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"sparseadam"}))
def test_states_of_every_torch_optimizer_are_its_own(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 40))
    inputs = torch.randn(16, 60)
    report = estimate(
        model,
        inputs,
        optimizer=functools.partial(NAMES[name], **_SETTINGS[name]) if name in _SETTINGS else name,
    )
    real = _step_for_real(name, model, inputs)
    assert report.optimizer_states == pytest.approx(real, rel=0.02, abs=64)
    assert not any("unknown" in note for note in report.notes)


def test_states_of_sparse_adam():
    table = nn.Embedding(100, 32, sparse=True)
    tokens = torch.randint(100, (7,))
    report = estimate(table, tokens, optimizer=torch.optim.SparseAdam)
    assert report.optimizer_states == 2 * table.weight.nbytes


class _SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 64, sparse=True)
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sparse_gradients_are_counted(accumulation):
    torch.manual_seed(0)
    model, tokens = _SparseTable(), torch.randint(300, (8, 40))
    settings = {"optimizer": "sgd", "loss": lambda output: output.pow(2).sum(), "accumulation": accumulation}
    report = estimate(model, tokens, **settings)
    # An entry for each token, repeated ones too; the sum of two has those of both.
    entries = accumulation * tokens.numel() * (64 * 4 + 8)
    assert report.gradients == entries + storage_bytes(*model.head.parameters())
    assert estimate(model, tokens, **settings, device="cuda").gradients == report.gradients
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    real = Measured(model, tokens, settings["loss"], optimizer, micro_batches=accumulation)
    close(report.peak.bytes, real.peak())


def test_copies_of_sparse_gradients_have_their_entries():
    model, tokens = _SparseTable(), torch.randint(300, (8, 40))

    def temporaries(optimizer: Callable[..., torch.optim.Optimizer]) -> int:
        report = estimate(model, tokens, optimizer=optimizer)
        assert not any("unknown" in note for note in report.notes)
        at = CATEGORIES.index("temporaries")
        return max(sample.bytes[at] for sample in report.timeline if sample.phase == "optimizer")

    entries = tokens.numel() * (64 * 4 + 8)
    assert temporaries(torch.optim.SGD) < entries <= temporaries(functools.partial(torch.optim.SGD, maximize=True))
    assert temporaries(torch.optim.Adagrad) >= entries  # coalesced: at most so many


def test_sgd_and_adam_are_told_apart():
    model, inputs = nn.Linear(256, 256), torch.randn(2, 256)
    weights = storage_bytes(*model.parameters())
    states = {
        name: estimate(model, inputs, optimizer=optimizer).optimizer_states
        for name, optimizer in {
            "sgd": "sgd",
            "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
            "adamw": torch.optim.AdamW,
            "amsgrad": torch.optim.Adam(model.parameters(), amsgrad=True),
            "none": None,
        }.items()
    }
    assert states == {
        "sgd": 0,
        "momentum": weights,
        "adamw": 2 * weights + 8,
        "amsgrad": 3 * weights + 8,
        "none": 0,
    }


def test_an_optimizers_own_groups_settings_and_state_are_left_alone():
    model, inputs = nn.Linear(32, 32), torch.randn(2, 32)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "amsgrad": True}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    report = estimate(model, inputs, optimizer=optimizer)
    assert report.optimizer_states == 2 * model.weight.nbytes + 3 * model.bias.nbytes + 8
    assert not optimizer.state and optimizer.param_groups[0]["params"][0] is model.weight
    assert scheduler.last_epoch == 0
    assert "foreach" in optimizer.param_groups[0] and optimizer.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("runs", ["simulated", "measured"])
def test_hooks_of_an_optimizer_do_not_see_steps_that_are_none_of_the_programs(runs):
    model = nn.Linear(8, 8) if runs == "simulated" else _Branches()
    inputs, called = torch.randn(2, model.in_features if runs == "simulated" else 4), []

    def hook(optimizer, args, kwargs) -> None:
        called.append(optimizer)

    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    of_all = [register_optimizer_step_pre_hook(hook), register_optimizer_step_post_hook(hook)]
    try:
        report = estimate(model, inputs, optimizer=optimizer, fallback="measure")
        assert report.optimizer_states > 0 and not called
        optimizer.step()
        assert len(called) == 4  # they are back
    finally:
        for handle in of_all:
            handle.remove()


class _Picky(torch.optim.Optimizer):
    """Decides by a value, which fake tensors do not have."""

    def __init__(self, params, fail: bool = False) -> None:
        super().__init__(params, {"fail": fail})

    def step(self, closure=None):
        for group in self.param_groups:
            if group["fail"]:
                raise RuntimeError("needs its own hardware")
            for p in group["params"]:
                if bool((p.grad.abs().max() >= 0).logical_and(p.grad.sum() < 1e30)):
                    self.state[p]["half"] = p.detach().half()


def test_an_unknown_optimizer_is_counted_by_a_real_step_or_named():
    model, inputs = nn.Linear(64, 64), torch.randn(2, 64)
    report = estimate(model, inputs, optimizer=_Picky)
    assert report.optimizer_states == storage_bytes(*model.parameters()) // 2
    assert any("_Picky were counted after one real step" in note for note in report.notes)
    report = estimate(model, inputs, optimizer=lambda params: _Picky(params, fail=True))
    assert report.optimizer_states == 0
    assert any("_Picky are unknown" in note and "needs its own hardware" in note for note in report.notes)
    assert "unknown" in str(report)


# --- what is trained ---


class _LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()


def test_frozen_lora_and_full_training_are_told_apart():
    full = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    inputs = torch.randn(4, 128)
    everything = estimate(full, inputs)
    assert "Full training" in everything.regime and everything.parameters.frozen_bytes == 0

    full[0].requires_grad_(False)
    full[1].requires_grad_(False)
    head_only = estimate(full, inputs, mode="finetune")
    assert head_only.gradients == storage_bytes(full[2].weight, full[2].bias)
    assert head_only.optimizer_states == pytest.approx(2 * head_only.gradients, abs=16)
    assert head_only.activations < everything.activations  # nothing below the first trained layer is kept
    assert head_only.regime.startswith("Fine-tuning")

    lora = nn.Sequential(*(_LoRA(nn.Linear(128, 128).requires_grad_(False), 4) for _ in range(3)))
    adapters = estimate(lora, inputs, mode="finetune")
    trained = sum(p.nbytes for p in lora.parameters() if p.requires_grad)
    assert adapters.gradients == trained == adapters.parameters.trainable_bytes
    assert adapters.parameters.adapter_rank == 4 and "LoRA-style fine-tuning (rank 4)" in adapters.regime
    assert adapters.parameters.frozen_bytes == 3 * storage_bytes(full[0].weight, full[0].bias)


def _frozen_below(model: nn.Module) -> None:
    """All but the last block and the head."""
    model.requires_grad_(False)
    for part in (list(model.modules())[-1], _stack(model)[-1]):
        part.requires_grad_(True)


def _frozen_in_between(model: nn.Module) -> None:
    """Gradients pass through frozen blocks to what trains below them."""
    for block in _stack(model):
        block.requires_grad_(False)


def _adapters_only(model: nn.Module) -> None:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("qkv", "up", "down", "linear1", "linear2"):
                setattr(module, name, _LoRA(child, 4))


def _stack(model: nn.Module) -> list[nn.Module]:
    return [dict(model.named_modules())[name] for name in _blocks.find_blocks(model)]


@pytest.mark.parametrize(
    "kind, prepare, settings",
    [
        ("gpt", _frozen_below, {}),
        ("bert", _frozen_below, {"precision": "bf16-amp"}),
        ("cnn", _frozen_below, {}),
        ("gpt", _frozen_in_between, {}),
        ("cnn", _frozen_in_between, {"accumulation": 2}),
        ("gpt", _adapters_only, {}),
        ("gpt", _adapters_only, {"precision": "bf16-amp"}),
        ("bert", _adapters_only, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_saved_bytes_and_peak_of_fine_tuning_are_those_of_a_real_step(kind, prepare, settings):
    tuned = check_estimate(kind, prepare=prepare, mode="finetune", **settings)
    model, inputs, loss = make(kind)
    full = estimate(model, inputs, loss=loss, **settings)
    assert tuned.optimizer_states < full.optimizer_states and tuned.gradients < full.gradients
    assert tuned.peak.bytes < full.peak.bytes or prepare is _adapters_only
    assert ("LoRA-style" in tuned.regime) is (prepare is _adapters_only)


def test_finetune_insists_on_frozen_parameters_and_training_on_others():
    model, inputs = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(ValueError, match="mode='finetune' expects frozen parameters, and all 2 require gradients"):
        estimate(model, inputs, mode="finetune")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of Linear requires gradients"):
        estimate(model, inputs)
    assert estimate(model, inputs, mode="inference").gradients == 0


def test_precision_changes_parameters_or_activations():
    model, inputs = GPT(blocks=1), torch.randint(300, (8, 64))
    plain = estimate(model, inputs, optimizer="sgd")
    half = estimate(model, inputs, optimizer="sgd", precision="bf16")
    amp = estimate(model, inputs, optimizer="sgd", precision="fp16-amp")
    assert half.parameters.bytes * 2 == plain.parameters.bytes == amp.parameters.bytes
    assert half.gradients * 2 == plain.gradients == amp.gradients
    assert half.activations < amp.activations < plain.activations
    assert estimate(model, inputs, optimizer="sgd", precision=torch.bfloat16).peak.bytes == half.peak.bytes


def test_gradients_are_there_at_the_peak_from_the_second_micro_batch_on():
    model, inputs = GPT(blocks=1), torch.randint(300, (2, 32))
    once, twice = (estimate(model, inputs, optimizer="sgd", accumulation=n) for n in (1, 2))
    assert twice.peak.breakdown["gradients"] == twice.gradients > once.peak.breakdown["gradients"]
    assert estimate(model, inputs, optimizer="sgd", accumulation=7).peak.bytes == twice.peak.bytes


def test_tied_weights_count_once():
    model = GPT()
    report = estimate(model, torch.randint(300, (1, 8)), optimizer=None)
    assert report.parameters.bytes == storage_bytes(*model.parameters()) == report.whole["parameters"]


# --- the report ---


def test_breakdown_adds_up_and_says_where():
    model, inputs, loss = make("gpt")
    report = estimate(model, inputs, loss=loss)
    assert sum(report.peak.breakdown.values()) == report.peak.bytes
    assert sum(report.activations_by_module.values()) == report.activations == sum(report.activations_by_kind.values())
    assert max(sum(sample.bytes) for sample in report.timeline) == report.peak.bytes
    assert report.peak.phase in ("forward", "backward")
    assert report.whole["optimizer states"] == pytest.approx(2 * report.parameters.bytes, rel=0.01)
    assert report.first_step_peak is not None and report.first_step_peak < report.peak.bytes
    assert {"dropout", "softmax", "normalization", "matrix product", "activation function"} <= set(
        report.activations_by_kind
    )
    deep = report.by_module(2)
    assert deep["blocks.0"] == sum(b for n, b in report.activations_by_module.items() if n.startswith("blocks.0"))
    text = str(report)
    assert "The peak falls in" in text and "optimizer states" in text and "CUDA caching allocator" in text
    assert report.cuda.requested == report.peak.bytes <= report.cuda.allocated <= report.cuda.reserved
    assert report.cuda.reserved % (2 << 20) == 0


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_timeline_ends_with_the_step(mode):
    """Not with the end of its simulation, where the parameters go too."""
    model, inputs = GPT(blocks=1), torch.randint(300, (2, 16))
    report = estimate(model, inputs, mode=mode, optimizer=None)
    last = dict(zip(CATEGORIES, report.timeline[-1].bytes, strict=True))
    assert last["parameters"] == report.parameters.bytes
    assert last["outputs"] == (model(inputs).nbytes if mode == "inference" else 0)


def test_peak_of_a_large_optimizer_step_falls_there():
    model = nn.Linear(512, 512)
    report = estimate(model, torch.randn(1, 512), device="cuda")  # foreach: scratch for all parameters at once
    assert report.peak.phase == "optimizer" and report.temporaries_at_peak >= model.weight.nbytes


def test_cuda_kernels_keep_masks_as_bools_and_no_attention_matrix():
    model, inputs = GPT(blocks=1, dropout=0.1), torch.randint(300, (2, 64))
    cpu, cuda = (estimate(model, inputs, optimizer=None, device=device) for device in ("cpu", "cuda"))
    attention = 2 * 4 * 64 * 64 * 4  # one block's batch x heads x time x time floats
    assert cpu.activations_by_kind["softmax"] == attention and "softmax" not in cuda.activations_by_kind
    hidden = 2 * 64 * 64
    assert cuda.activations_by_kind["dropout"] == 2 * hidden  # two bool masks
    assert cpu.activations_by_kind["dropout"] > 4 * 2 * hidden
    # CUDA's autocast normalises in float32, the CPU's in the type that comes.
    chain, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)), torch.randn(32, 64)
    kept = {d: estimate(chain, x, precision="bf16-amp", device=d) for d in ("cpu", "cuda")}
    assert kept["cuda"].activations >= kept["cpu"].activations + 2 * x.numel()
    x = torch.ones(8, requires_grad=True)
    assert "NativeDropout" not in type(F.dropout(x, 0.5).grad_fn).__name__  # CPU tensors are back on their own way


# --- the model is left as it was ---


class _Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.table = torch.arange(8.0)
        self.calls = 0
        self.cache: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.norm(x) * self.table
        self.cache["last"] = self.last
        self.seen.append(self.last)
        random.random()
        return self.rnn(F.dropout(self.last[:, None]))[0]


def _snapshot(model: nn.Module) -> list[object]:
    found: list[object] = [id(p) for p in model.parameters()] + [id(b) for b in model.buffers()]
    for module in model.modules():
        found += [sorted(module.__dict__), [id(w) for w in getattr(module, "_flat_weights", [])]]
    return [*found, model.calls, dict(model.cache), list(model.seen), id(model.table)]


@pytest.mark.parametrize("fails", [False, True], ids=["completes", "fails"])
def test_the_model_and_random_states_are_left_alone(fails):
    model, inputs = _Stateful(), torch.randn(4, 8)
    before, statistics = _snapshot(model), model.norm.running_mean.clone()
    rng, python_rng = torch.get_rng_state(), random.getstate()
    if fails:
        with pytest.raises(NotTraceable):
            estimate(model, inputs, loss=lambda output: output.nonzero().float().sum())
    else:
        estimate(model, inputs)
    assert _snapshot(model) == before
    assert torch.equal(model.norm.running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), rng) and random.getstate() == python_rng
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    model(inputs).sum().backward()


@dataclasses.dataclass
class _Layer:
    keys: deque[Tensor] = dataclasses.field(default_factory=lambda: deque(maxlen=4))
    last: Tensor | None = None


class _Cache:
    """What a library keeps keys and values in: no module, no container."""

    __slots__ = ("__dict__", "length", "table")

    def __init__(self) -> None:
        self.layers = collections.defaultdict(_Layer)
        self.table = torch.arange(4.0)
        self.length = 0


class _Pair(NamedTuple):
    scale: Tensor
    notes: list[Tensor]


class _Caching(nn.Module):
    """Stores what it computes in all sorts of places, and computes with tensors that lie in others."""

    shared: ClassVar[dict[str, Tensor]] = {}
    newest: ClassVar[Tensor | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.unregistered = [nn.Linear(4, 4)]
        self.cache = _Cache()
        self.ordered = collections.OrderedDict(scale=torch.ones(4))
        self.nested = {"rows": [[torch.ones(4)], (torch.ones(4), {"deep": torch.ones(4)})]}
        self.pair = _Pair(torch.ones(4), [])
        self.options = types.SimpleNamespace(calls=0)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        first, (second, deeper) = self.nested["rows"]
        x = self.inner(x) * self.cache.table * self.ordered["scale"] * first[0] * second * deeper["deep"]
        x = self.unregistered[0](x * self.pair.scale)
        layer = self.cache.layers["first"]
        layer.keys.append(x)
        layer.last = x
        self.cache.length += 1
        self.cache.extra = x
        self.ordered["last"] = self.shared["last"] = _Caching.newest = first[0] = x
        deeper["more"] = [x]
        self.pair.notes.append(x)
        self.options.calls += 1
        self.options.last = x
        return x


def _reach(model: _Caching) -> list[object]:
    """All that it holds, with tensors by identity."""
    cache, layers = model.cache, model.cache.layers
    held = [
        *(value for layer in layers.values() for value in (list(layer.keys), layer.last)),
        [cache.length, cache.table, sorted(cache.__dict__), list(layers)],
        [list(model.ordered.items()), model.nested, model.pair, model.options, dict(model.shared), _Caching.newest],
        [id(p) for p in model.unregistered[0].parameters()],
    ]
    return [id(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in pytree.tree_leaves(held)]


@pytest.mark.parametrize("before", [0, 1], ids=["unused", "used"])
@pytest.mark.parametrize("fails", [False, True], ids=["completes", "fails"])
def test_whatever_a_step_stores_is_taken_out_again(before, fails):
    model, x = _Caching(), torch.randn(2, 4)
    for _ in range(before):
        model(x)
    held = _reach(model)
    expected = model.unregistered[0].weight
    if fails:
        with pytest.raises(NotTraceable):
            estimate(model, x, loss=lambda output: output.nonzero().float().sum())
    else:
        estimate(model, x)
    assert _reach(model) == held
    assert model.unregistered[0].weight is expected and expected.grad is None
    model(x).sum().backward()
    assert not any(isinstance(t, FakeTensor) for t in (model.ordered["last"], model.cache.extra, expected.grad))
    _Caching.shared.clear()
    _Caching.newest = None


def test_tensors_within_containers_and_objects_are_simulated_on_the_devices_type():
    """In the parameters' type, as those that lie in attributes."""
    report = estimate(_Caching(), torch.randn(2, 4), precision="bf16", optimizer=None)
    assert all(holder.largest.endswith("bfloat16") for holder in report.peak.holders if holder.category != "inputs")
    _Caching.shared.clear()
    _Caching.newest = None


def test_what_a_loss_and_an_optimizer_store_is_taken_out_again():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = {"losses": []}

        def forward(self, output: Tensor) -> Tensor:
            self.seen["losses"].append(output.sum())
            return self.seen["losses"][-1]

    class Averaging(torch.optim.SGD):
        """Keeps an average of each parameter outside its state."""

        def __init__(self, params, lr: float) -> None:
            super().__init__(params, lr)
            self.averages: dict[str, list[Tensor]] = {"all": []}

        def step(self, closure=None):
            super().step(closure)
            self.averages["all"] += [p.detach().clone() for group in self.param_groups for p in group["params"]]

    model, loss = nn.Linear(4, 4), Loss()
    optimizer = Averaging(model.parameters(), 0.1)
    for each in (loss, loss.forward):
        estimate(model, torch.randn(2, 4), loss=each, optimizer=optimizer)
    assert loss.seen == {"losses": []} and optimizer.averages == {"all": []}


def test_a_model_that_holds_a_great_deal_is_simulated_in_reasonable_time(monkeypatch):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    model.records = [types.SimpleNamespace(number=n, tags=[n]) for n in range(100_000)]
    model.numbers = list(range(2_000_000))
    start = time.process_time()
    report = estimate(model, x)
    assert time.process_time() - start < 20
    assert not report.notes and len(model.numbers) == 2_000_000
    monkeypatch.setattr(_held, "_MOST", 1000)
    assert any("holds more objects than were looked into" in note for note in estimate(model, x).notes)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("model", [nn.Linear(4, 4), _Branches()], ids=["simulated", "measured"])
def test_a_caller_without_gradients_is_told_of_a_step_with_them(off, model):
    settings = {"optimizer": "sgd", "fallback": "measure"}
    expected = estimate(model, torch.ones(2, 4), **settings)
    with off():
        report = estimate(model, torch.ones(2, 4), **settings)
        assert not torch.is_grad_enabled()
    assert report.peak.bytes == expected.peak.bytes and report.gradients == expected.gradients > 0


def test_a_model_made_under_inference_mode_is_simulated():
    with torch.inference_mode():
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
    expected = estimate(nn.Linear(4, 4), torch.ones(2, 4))
    assert estimate(model, x).peak.bytes == expected.peak.bytes


def test_a_model_too_large_for_any_machine_is_estimated():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 17, 1 << 17, bias=False) for _ in range(8)))
    report = estimate(model, torch.empty(4, 1 << 17, device="meta"), optimizer="adamw")
    weights = 8 * (1 << 34) * 4
    assert report.parameters.bytes == weights and report.optimizer_states == pytest.approx(2 * weights, rel=1e-6)
    assert report.device == "cuda"


# --- bad input ---


def test_a_model_that_fake_tensors_cannot_run_names_its_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(_Branches()))
    with pytest.raises(NotTraceable, match=r"module '1.0' \(_Branches\) .* reads a value") as raised:
        estimate(model, torch.randn(2, 4))
    assert raised.value.module == "1.0"
    report = estimate(model, torch.randn(2, 4), fallback="measure")
    assert report.source == "measured" and report.optimizer_states > 0 and report.gradients > 0
    assert any("'1.0'" in note for note in report.notes)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(NotTraceable, match="no real parameters"):
        estimate(model.to("meta"), torch.randn(2, 4), fallback="measure")


@pytest.mark.parametrize("fallback", ["raise", "measure"])
def test_a_models_own_mistake_is_named_and_not_tried_for_real(fallback):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    with pytest.raises(NotTraceable, match=r"module '1' \(Linear\) raised RuntimeError: .*5, 4") as raised:
        estimate(model, torch.randn(2, 4), fallback=fallback)
    assert not raised.value.fake_tensors_are_the_limit and "fake" not in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)


class _Calls(nn.Module):
    """`function` of what a layer gives, which is added to the input."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        result = self.function(y)
        return y + result if isinstance(result, Tensor) else y


@torch.library.custom_op("fastamp_tests::without_fake", mutates_args=())
def _without_fake(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("fastamp_tests::unfinished_fake", mutates_args=())
def _unfinished_fake(x: Tensor) -> Tensor:
    return x.clone()


@_unfinished_fake.register_fake
def _(x: Tensor) -> Tensor:
    raise NotImplementedError("which shapes there are is for the device to say")


@torch.library.custom_op("fastamp_tests::wrong_fake", mutates_args=())
def _wrong_fake(x: Tensor) -> Tensor:
    return x.clone()


@_wrong_fake.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x).view(7)


def _hides_its_cause(x: Tensor) -> None:
    try:
        x.sum().item()
    except RuntimeError:
        raise ValueError("the scale is no number") from None


@pytest.mark.parametrize(
    "function, limit",
    [
        (lambda x: x.sum().item(), True),
        (lambda x: bool(x.sum() > 0), True),
        (lambda x: x[x > 0].sum(), True),
        (lambda x: x.detach().numpy(), True),
        (lambda x: bytes(x.untyped_storage()), True),
        (lambda x: torch.ops.fastamp_tests.without_fake(x.detach()), True),
        (lambda x: torch.ops.fastamp_tests.unfinished_fake(x.detach()), True),
        (lambda x: torch.ops.fastamp_tests.wrong_fake(x.detach()), True),
        (lambda x: x.detach().to_mkldnn().to_dense(), True),
        (_hides_its_cause, True),
        (lambda x: x @ torch.ones(5, 3), False),
        (lambda x: x.view(7), False),
        (lambda x: x[9], False),
        (lambda x: {}["layer"], False),
        (lambda x: x.nonexistent(), False),
    ],
    ids="item bool mask numpy storage custom unfinished wrong opaque hidden matmul view index key attribute".split(),
)
def test_limits_of_fake_tensors_and_mistakes_are_told_apart(function, limit):
    model, x = _Calls(function), torch.randn(2, 4)
    with pytest.raises(NotTraceable, match=r"the model \(_Calls\)") as raised:
        estimate(model, x, optimizer="sgd")
    assert raised.value.fake_tensors_are_the_limit is limit
    if limit:
        assert estimate(model, x, optimizer="sgd", fallback="measure").source == "measured"
    else:
        with pytest.raises(type(raised.value.__cause__)):  # and real tensors meet the same
            model(x)


def test_torchscript_can_only_be_measured():
    script = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(NotTraceable, match="TorchScript"):
        estimate(script, torch.randn(2, 4))


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (TypeError, {"model": 3}, "model must be an nn.Module, got int"),
        (ValueError, {"mode": "eval"}, "mode must be one of train, finetune, inference, got 'eval'"),
        (ValueError, {"precision": "fp8"}, "precision must be one of fp32"),
        (ValueError, {"optimizer": "adamx"}, "optimizer must be one of torch.optim"),
        (TypeError, {"optimizer": 3}, "optimizer must be an optimizer"),
        (
            ValueError,
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            "group 0 holds 2 parameters",
        ),
        (TypeError, {"optimizer": lambda params: 3}, "gave int, not an optimizer"),
        (TypeError, {"accumulation": 1.5}, "accumulation must be a number of micro-batches, got float"),
        (ValueError, {"accumulation": 0}, "accumulation must be at least 1, got 0"),
        (TypeError, {"loss": "mse"}, "loss must be a function"),
        (ValueError, {"device": "tpu0"}, "device"),
        (ValueError, {"device": "mps"}, 'device must be "cpu" or "cuda"'),
        (ValueError, {"fallback": "guess"}, "fallback must be"),
        (ValueError, {"checkpoint": True}, "no repeated blocks were found in Linear"),
        (ValueError, {"model": CNN(), "checkpoint": "layers.*"}, "no module of CNN is called 'layers.\\*'"),
        (TypeError, {"model": CNN(), "checkpoint": 2.5}, "checkpoint must be True, a number or module names"),
        (ValueError, {"model": CNN(), "checkpoint": 0}, "checkpoint must be True, a positive number"),
        (ValueError, {"model": CNN(), "store": "int3"}, "store: unknown format 'int3'; formats are exact"),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[:40],
)
def test_bad_arguments_are_named(kind, arguments, message):
    call = {"model": nn.Linear(2, 2), "example_inputs": torch.randn(1, 2), **arguments}
    with pytest.raises((kind, RuntimeError) if "tpu" in str(arguments) else kind, match=message):
        estimate(call.pop("model"), call.pop("example_inputs"), **call)


def test_every_second_block_and_patterns():
    model, inputs = (
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))),
        torch.randn(2, 8),
    )
    plain, every, second, named = (
        estimate(model, inputs, optimizer=None, checkpoint=c).activations for c in (None, True, 2, ["0", "2"])
    )
    assert every < second == named < plain


def test_inputs_as_keywords_and_tuples():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16, 2, 0.0)

        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
            y = self.block(x) * scale
            return {"loss": (y * mask).mean() if mask is not None else y.mean(), "logits": y}

    model, x, mask = Two(), torch.randn(2, 8, 16), torch.ones(2, 8, 16)
    by_name = estimate(model, {"x": x, "mask": mask, "scale": 2.0}, optimizer=None)
    by_place = estimate(model, (x, mask, 2.0), optimizer=None)
    assert isinstance(by_name, MemoryReport) and by_name.peak.bytes == by_place.peak.bytes
    assert by_name.whole["inputs"] == x.nbytes + mask.nbytes


def test_capturable_steps_have_the_states_of_others():
    """As CUDA graphs need them; they cannot run on the CPU that simulates them."""
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    reports = [
        estimate(model, x, optimizer=torch.optim.AdamW(model.parameters(), capturable=capturable), device=device)
        for capturable in (False, True)
        for device in ("cpu", "cuda")
    ]
    assert len({report.peak.breakdown["optimizer states"] for report in reports}) <= 2
    assert all(report.peak.breakdown["optimizer states"] >= 2 * 4 * 65 * 64 for report in reports)


def test_threads_take_turns():
    """A simulation changes its model in place, and torch's bookkeeping is the process's."""
    models = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))) for _ in range(3)]
    alone = estimate(models[0], torch.randn(4, 32)).peak.bytes
    found: list[object] = []

    def work(model: nn.Module) -> None:
        try:
            found.append(estimate(model, torch.randn(4, 32)).peak.bytes)
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 6
    assert all(type(p) is nn.Parameter and not p.is_meta for model in models for p in model.parameters())
