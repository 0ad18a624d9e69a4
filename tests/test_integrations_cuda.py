"""accelerate, transformers.Trainer and Lightning in float16 on a GPU, where they make or take a scaler by themselves.
The bodies are those of test_integrations_accelerate.py and test_integrations_lightning.py."""

from __future__ import annotations

import pytest
import torch
from backends import why_missing
from scaler_parity import assert_same
from torch import nn

import fastamp

pytestmark = [
    pytest.mark.skipif(bool(why_missing("cuda")), reason=why_missing("cuda") or "there is a GPU"),
    pytest.mark.filterwarnings("ignore"),
]


# ---- accelerate and transformers ---------------------------------------------------------------------------


@pytest.fixture
def accelerate_tests():
    """The module; skips where accelerate is not installed."""
    import test_integrations_accelerate as tests

    tests.forget_devices()
    yield tests
    tests.forget_devices()


def accelerated(fused, clip):
    """Eight steps of an Accelerator whose scaler is whatever it finds as torch's."""
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs

    torch.manual_seed(0)
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=3)]
    )
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped = []
    for number in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(accelerator.device)
        loss = model(x).float().square().mean() * (float("inf") if number in (2, 5) else 1.0)
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    parameters = [p.detach() for p in model.parameters()]
    return (parameters, accelerator.scaler.state_dict(), scheduler.get_last_lr()), skipped, accelerator.scaler


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_accelerator_in_float16(accelerate_tests, fused, clip):
    # Of a fused optimizer's skips stock accelerate does not know, and lets the schedule go on.
    expected, _, stock = accelerated(False, clip)
    accelerate_tests.forget_devices()
    with fastamp.patched():
        result, skipped, ours = accelerated(fused, clip)
    assert type(stock) is torch.amp.GradScaler and isinstance(ours, fastamp.GradScaler)
    assert skipped == [number in (2, 5) for number in range(8)]
    assert result[1] == expected[1] and result[1]["scale"] == 256.0
    assert result[2] == expected[2] == [0.01 * 0.5**6]
    for found, truth in zip(result[0], expected[0], strict=True):
        if fused:
            torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
        else:
            assert_same(found, truth)


def distance(a, b):
    return sum((x - y).float().norm() ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


@pytest.mark.parametrize("options", [{}, {"optim": "adamw_torch"}], ids=["default optimizer", "unfused"])
def test_trainer_in_float16(accelerate_tests, options, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"use_cpu": False, "fp16": True, "max_grad_norm": 1.0, "learning_rate": 1e-3, **options}

    def train(**changes):
        accelerate_tests.forget_devices()
        return accelerate_tests.train_with_trainer(tmp_path, **{**options, **changes})

    start, _ = train(learning_rate=0.0)
    expected, theirs = train()
    with fastamp.patched(min_scale=2.0):
        result, ours = train()
    assert ours["min_scale"] == 2.0 and "min_scale" not in theirs
    assert ours["scale"] == theirs["scale"] and ours["_growth_tracker"] == theirs["_growth_tracker"]
    # Attention's backward pass on a GPU may add up in another order each time.
    assert distance(result, expected) < 0.05 * distance(start, expected)
    with fastamp.patched(storage="int8"):
        coded, _ = train()
    assert 0 < distance(coded, expected) < 0.5 * distance(start, expected)


# ---- Lightning ---------------------------------------------------------------------------------------------


@pytest.fixture
def lightning_tests():
    """The module; skips where Lightning is not installed."""
    import test_integrations_lightning as tests

    return tests


def scaler_of(make, tests):
    return make("cuda", **tests.SETTINGS)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_lightnings_trainer(lightning_tests, fused):
    tests = lightning_tests

    def fit(plugin, make, **kwargs):
        model = tests.Model(fused=fused and plugin is not tests.Stock, overflows=(1, 4))
        return tests.fit(plugin("16-mixed", "cuda", scaler_of(make, tests)), model, accelerator="gpu", **kwargs)

    expected = fit(tests.Stock, torch.amp.GradScaler)
    result = fit(tests.MixedPrecision, fastamp.GradScaler)
    assert result[1] == expected[1] and expected[1]["scale"] != tests.SETTINGS["init_scale"]
    clipped = fit(tests.Stock, torch.amp.GradScaler, gradient_clip_val=0.05)
    ours = fit(tests.MixedPrecision, fastamp.GradScaler, gradient_clip_val=0.05)
    assert ours[1] == clipped[1]
    for mine, truth in zip([*result[0], *ours[0]], [*expected[0], *clipped[0]], strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-5)


def test_fabric(lightning_tests):
    tests = lightning_tests

    def loop(plugin, make, fused, clip=None):
        return tests.fabric_loop(plugin("16-mixed", "cuda", scaler_of(make, tests)), fused, clip, accelerator="gpu")

    for fused in (False, True):
        expected = loop(tests.StockFabric, torch.amp.GradScaler, fused)
        assert_same(loop(tests.FabricMixedPrecision, fastamp.GradScaler, fused), expected)
    clip = {"max_norm": 0.05}
    expected = loop(tests.StockFabric, torch.amp.GradScaler, False, clip)
    result = loop(tests.FabricMixedPrecision, fastamp.GradScaler, True, clip)
    assert result[1] == expected[1]
    for mine, truth in zip(result[0], expected[0], strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-5)
