"""`estimate(store=...)` and `estimate(checkpoint=..., store=...)` against what real steps hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_models import GPT, allocated_peak, make, storage_bytes
from torch import Tensor, nn

import fastamp
from fastamp.memory import _blocks, estimate, track

pytestmark = pytest.mark.usefixtures("one_thread")


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


def _treat(model: nn.Module, treatment: Callable[..., Any]) -> None:
    """Has `treatment(forward, *args)` run each repeated block, as a user would write it by hand."""
    modules = dict(model.named_modules())
    for name in _blocks.find_blocks(model):
        block = modules[name]
        block.forward = lambda *args, inner=block.forward, **kwargs: treatment(inner, *args, **kwargs)


def _stored(form: str) -> Callable[..., Any]:
    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with fastamp.store_activations(form):
            return forward(*args, **kwargs)

    return run


def _checkpointed(form: str) -> Callable[..., Any]:
    return lambda forward, *args, **kwargs: fastamp.checkpoint(forward, *args, storage=form, **kwargs)


def _step_of(model: nn.Module, inputs: Tensor, loss: Callable[[Tensor], Tensor], autocast: bool) -> Any:
    optimizer = _sgd(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(inputs)
            value = loss(output)
        value.backward()
        del output, value
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's states
    return step, optimizer


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("cnn", {"store": "int8"}),
        ("bert", {"store": "int8"}),
        ("bert", {"checkpoint": True, "store": "int8"}),
        ("gpt", {"store": "exact"}),
        ("gpt", {"store": "bf16"}),
        ("gpt", {"store": "int8", "precision": "bf16-amp"}),
        ("gpt", {"checkpoint": True, "store": "int8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_stored_activations_and_peak_are_those_of_a_real_step(kind, settings):
    model, inputs, loss = make(kind)
    report = estimate(model, inputs, optimizer=_sgd, loss=loss, **settings)
    form = settings["store"]
    _treat(model, _checkpointed(form) if "checkpoint" in settings else _stored(form))
    step, optimizer = _step_of(model, inputs, loss, "precision" in settings)
    with track(model, optimizer, inputs=inputs, rss_every=None) as real:
        step()
    assert report.activations == pytest.approx(real.activations, rel=0.1)
    assert report.peak.bytes == pytest.approx(real.peak.bytes, rel=0.1)
    assert report.optimizer_states == pytest.approx(real.optimizer_states, rel=0.01)


def test_the_peak_with_storage_is_the_allocators():
    model, inputs, loss = make("gpt")
    plain = estimate(model, inputs, optimizer=_sgd, loss=loss)
    report = estimate(model, inputs, optimizer=_sgd, loss=loss, store="int8")
    assert report.activations < plain.activations / 2 and report.peak.bytes < 0.7 * plain.peak.bytes
    _treat(model, _stored("int8"))
    step, optimizer = _step_of(model, inputs, loss, False)
    states = [t for state in optimizer.state.values() for t in state.values()]
    peak = storage_bytes(*model.parameters(), inputs, *states) + allocated_peak(step)
    assert report.peak.bytes == pytest.approx(peak, rel=0.1)


def test_formats_by_name_of_module():
    model, tokens = GPT(blocks=3), torch.randint(300, (4, 64))
    settings = {"optimizer": None, "checkpoint": {"blocks.2": "bf16"}, "store": {"blocks.0": "int8"}}
    report = estimate(model, tokens, **settings)
    assert "1 blocks checkpoint:bf16, 1 blocks store:int8" in report.title
    deep = report.by_module(2)
    assert deep["blocks.0"] < deep["blocks.1"] / 2
    assert "blocks.2" not in deep or deep["blocks.2"] < deep["blocks.0"]


def test_differences_are_kept_in_the_bytes_of_their_format():
    """A chain of checkpointed blocks whose inputs are stored relative to one another."""
    torch.manual_seed(0)
    model, tokens = GPT(blocks=4), torch.randint(300, (4, 64))
    treatments = dict.fromkeys(_blocks.find_blocks(model), "checkpoint:delta-int4")
    report = estimate(model, tokens, optimizer="sgd", checkpoint={"blocks.*": "delta-int4"})
    undo = _blocks.apply(model, treatments)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with track(model, optimizer, inputs=tokens, rss_every=None) as real:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    undo()
    assert report.activations == pytest.approx(real.activations, rel=0.1)
    assert report.peak.bytes == pytest.approx(real.peak.bytes, rel=0.1)


def test_differences_need_a_checkpoint():
    with pytest.raises(ValueError, match="coded along a stack of checkpointed blocks: pass checkpoint= too"):
        estimate(GPT(blocks=2), torch.zeros(1, 8, dtype=torch.long), store="delta-int8")
