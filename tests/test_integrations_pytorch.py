"""Plain PyTorch: the page of documentation, and the loops of PyTorch's own tutorials next to torch's scaler."""

from __future__ import annotations

import pytest
import torch
from doc_pages import run_page
from scaler_parity import assert_same
from torch import nn

import fastamp


def test_page():
    names = run_page("integrations/pytorch")
    assert names["scaler"].get_scale() == 65536.0 and not names["scaler"].step_was_skipped
    assert names["scheduler"].last_epoch == 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=generator) for _ in range(count)]


def typical(scaler, model, optimizer):
    """https://docs.pytorch.org/docs/stable/notes/amp_examples.html, each of its loops."""
    for x in batches(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def clipping(scaler, model, optimizer):
    for x in batches(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(optimizer)
        scaler.update()


def accumulation(scaler, model, optimizer):
    for i, x in enumerate(batches(8)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).square().mean() / 4
        scaler.scale(loss).backward()
        if (i + 1) % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def gradient_penalty(scaler, model, optimizer):
    for x in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).square().mean()
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        penalty = sum((grad * inverse).square().sum() for grad in scaled).sqrt()
        scaler.scale(loss + penalty).backward()
        scaler.step(optimizer)
        scaler.update()


def two_losses(scaler, model, optimizer):
    second = torch.optim.SGD([model[0].weight], lr=0.01)
    first = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    for x in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(x)
            loss0, loss1 = y.square().mean(), (y - 1).square().mean()
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        scaler.update()


def own_function(scaler, model, optimizer):
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    for x in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = Square.apply(model(x)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    "loop", [typical, clipping, accumulation, gradient_penalty, two_losses, own_function], ids=lambda f: f.__name__
)
def test_tutorial_loops_are_bit_identical(loop):
    results = []
    for make in (torch.amp.GradScaler, fastamp.GradScaler):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        # So large that some float16 gradients overflow.
        scaler = make("cpu", init_scale=2.0**20, growth_interval=2)
        loop(scaler, model, optimizer)
        results.append((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    assert_same(dict(results[0][0]), dict(results[1][0]))
    assert_same(results[0][1:], results[1][1:])
