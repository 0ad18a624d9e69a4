"""NVTX ranges and the observers behind them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import fastamp
from fastamp import profiling
from fastamp.checkpointing import checkpoint


@pytest.fixture
def ranges(monkeypatch):
    """What the ranges would show: ("push", name) and ("pop", name)."""
    events, names = [], []

    def push(name):
        names.append(name)
        events.append(("push", name))

    def pop():
        events.append(("pop", names.pop()))

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    yield events
    profiling.disable_nvtx()
    assert names == []


def iteration(scaler, optimizer, unscale=False, clip=False):
    optimizer.zero_grad()
    scaler.scale(sum(p.sum() for group in optimizer.param_groups for p in group["params"])).backward()
    if unscale:
        scaler.unscale_(optimizer)
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()


def pushed(events):
    return [name.removeprefix("fastamp::") for kind, name in events if kind == "push"]


def optimizer(**kwargs):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, **kwargs)


def test_nothing_is_marked_until_asked_for(ranges):
    iteration(fastamp.GradScaler("cpu"), optimizer())
    assert ranges == [] and not profiling.nvtx_enabled()
    profiling.enable_nvtx()
    profiling.disable_nvtx()
    ranges.clear()
    iteration(fastamp.GradScaler("cpu"), optimizer())
    assert ranges == [] and not profiling.nvtx_enabled()


@pytest.mark.parametrize(
    ("kwargs", "calls", "expected"),
    [
        ({}, {}, ["unscale", "step", "update"]),
        ({}, {"unscale": True}, ["unscale", "step", "update"]),
        ({}, {"clip": True}, ["unscale", "step", "update"]),
        ({"fused": True}, {}, ["step", "check", "update"]),
        ({"fused": True}, {"unscale": True}, ["unscale", "step", "update"]),
    ],
    ids=["plain", "unscale_", "clip", "fused", "fused unscale_"],
)
def test_ranges_of_the_scaler(ranges, kwargs, calls, expected):
    profiling.enable_nvtx()
    profiling.enable_nvtx()
    assert profiling.nvtx_enabled()
    ranges.clear()
    iteration(fastamp.GradScaler("cpu"), optimizer(**kwargs), **calls)
    assert pushed(ranges) == expected


def test_ranges_of_storage(ranges):
    profiling.enable_nvtx()
    ranges.clear()
    x = torch.randn(64, 64, requires_grad=True)
    loss = checkpoint(torch.sin, x * 1, storage="bf16").sum()
    assert pushed(ranges) == ["pack"]
    loss.backward()
    assert pushed(ranges) == ["pack", "unpack"]


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, 1:30]], ids=["whole memory", "view"])
def test_ranges_of_store_activations(ranges, view):
    """Contiguous activations, whose memory is coded as it lies, and views take different ways."""
    profiling.enable_nvtx()
    ranges.clear()
    x = torch.randn(64, 64, requires_grad=True)
    with fastamp.store_activations("bf16"):
        loss = view(x * 1).sin().sum()
    assert pushed(ranges) == ["pack"]
    loss.backward()
    assert pushed(ranges) == ["pack", "unpack"]


def test_ranges_close_where_work_raises(ranges):
    profiling.enable_nvtx()

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError

    scaler = fastamp.GradScaler("cpu")
    with pytest.raises(KeyError):
        iteration(scaler, Broken([torch.nn.Parameter(torch.ones(3))], lr=0.1))
    assert pushed(ranges)[-1] == "step" and ranges[-1] == ("pop", "fastamp::step")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_without_nvtx_it_says_so():
    with pytest.raises(RuntimeError, match=r"has no NVTX .* need a CUDA build of torch"):
        profiling.enable_nvtx()
    assert not profiling.nvtx_enabled()


def test_environment_switches_ranges_on():
    # In a process of its own, since the environment is read at import.
    code = """
import warnings, torch
torch.cuda.nvtx.range_push = print
torch.cuda.nvtx.range_pop = lambda: None
from fastamp import profiling
print(profiling.nvtx_enabled())
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FASTAMP_NVTX": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.splitlines() == ["fastamp::enable_nvtx", "True"], run.stderr
