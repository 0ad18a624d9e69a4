"""update_scale_, clip_coefficient, scale_losses: against torch's own operators and fastamp.reference."""

from __future__ import annotations

import pytest
import torch
from op_inputs import DTYPES, dtype_id, random_values, same_bits, scalar

import fastamp.ops
from fastamp import reference


def tracker(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.1, 0.9), (3.0, 1 / 3)], ids=str)
def test_update_has_torchs_bits(backend, factors, rng):
    growth, backoff = factors
    ours, ours_tracker = scalar(65536.0, backend.device), tracker(0, backend.device)
    theirs, theirs_tracker = torch.tensor(65536.0), tracker(0, torch.device("cpu"))
    for overflow in (torch.rand(400, generator=rng) < 0.15).tolist():
        found = [scalar(0.0, backend.device), scalar(float(overflow), backend.device)]
        backend.ops.update_scale_(ours, ours_tracker, found, growth, backoff, 3)
        torch._amp_update_scale_(theirs, theirs_tracker, torch.tensor(float(overflow)), growth, backoff, 3)
        assert same_bits(ours, theirs) and ours_tracker.item() == theirs_tracker.item()


def test_update_stops_at_the_largest_float(backend):
    """torch does not let the scale grow to infinity."""
    scale, successes = scalar(3e38, backend.device), tracker(0, backend.device)
    backend.ops.update_scale_(scale, successes, [scalar(0.0, backend.device)], 2.0, 0.5, 1)
    assert scale.item() == torch.tensor(3e38).item() and successes.item() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"min_scale": 1.0},
        {"max_scale": 2.0**17},
        {"hysteresis": 3},
        {"min_scale": 16.0, "max_scale": 2.0**16, "hysteresis": 2},
    ],
    ids=str,
)
def test_update_with_options(backend, options, rng):
    state = {}
    for name, ops, device in (
        ("ours", backend.ops, backend.device),
        ("reference", reference, torch.device("cpu")),
    ):
        state[name] = (
            ops,
            device,
            scalar(65536.0, device),
            tracker(0, device),
            tracker(options.get("hysteresis", 1), device),
        )
    scales = set()
    for overflow in (torch.rand(300, generator=rng) < 0.4).tolist():
        for ops, device, scale, successes, left in state.values():
            extra = {"hysteresis_tracker": left} if "hysteresis" in options else {}
            ops.update_scale_(scale, successes, [scalar(float(overflow), device)], 2.0, 0.5, 2, **options, **extra)
        ours, expected = (entry[2:] for entry in state.values())
        assert [t.item() for t in ours] == [t.item() for t in expected]
        scales.add(ours[0].item())
    assert min(scales) >= options.get("min_scale", 0) and max(scales) <= options.get("max_scale", float("inf"))


def test_hysteresis_waits_for_overflows_in_a_row(backend):
    scale, successes, left = (
        scalar(1024.0, backend.device),
        tracker(0, backend.device),
        tracker(2, backend.device),
    )
    seen = []
    for overflow in (1, 0, 1, 1, 1, 0, 1):
        backend.ops.update_scale_(
            scale,
            successes,
            [scalar(float(overflow), backend.device)],
            2.0,
            0.5,
            1000,
            hysteresis=2,
            hysteresis_tracker=left,
        )
        seen.append(scale.item())
    assert seen == [1024.0, 1024.0, 1024.0, 512.0, 256.0, 256.0, 256.0]


def test_any_found_inf_counts(backend):
    for place in (0, 100, 255):
        found = [scalar(0.0, backend.device) for _ in range(256)]
        found[place].fill_(1.0)
        scale = scalar(8.0, backend.device)
        backend.ops.update_scale_(scale, tracker(0, backend.device), found, 2.0, 0.5, 10)
        assert scale.item() == 4.0


def test_more_found_infs_than_a_launch_takes():
    found = [torch.zeros(()) for _ in range(700)]
    found[699] = torch.ones(1)
    scale = torch.tensor(8.0)
    fastamp.ops.update_scale_(scale, tracker(0, torch.device("cpu")), found, 2.0, 0.5, 10)
    assert scale.item() == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_clip_coefficient_has_torchs_bits(backend, dtype, rng):
    norms = torch.cat(
        [
            torch.rand(200, generator=rng, dtype=dtype) * 10,
            torch.tensor([0.0, 1e-30, float("inf"), float("nan"), 1.0, 1e30], dtype=dtype),
        ]
    )
    for norm in norms.to(backend.device):
        for max_norm in (1.0, 0.1, 5, 0.0, 1e-3, float("inf")):
            expected = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            assert same_bits(backend.ops.clip_coefficient(norm, max_norm), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_scale_losses_has_torchs_bits(backend, dtype, rng):
    losses = [
        random_values(n, dtype, rng).reshape(shape).to(backend.device)
        for n, shape in ((1, ()), (1, (1,)), (77, (7, 11)), (0, (0,)), (9000, (90, 100)))
    ]
    losses += [losses[2].t(), losses[4][:, ::3], losses[1].expand(6)]
    scale = scalar(65536.0, backend.device)
    for ours, loss in zip(backend.ops.scale_losses(losses, scale), losses, strict=True):
        # torch's on the CPU: on CUDA it first rounds the scale to the loss's dtype, and 65536 to infinity.
        assert same_bits(ours, loss.cpu() * scale.cpu())


def test_scale_losses_is_differentiable():
    losses = [torch.tensor(2.0, dtype=torch.float16, requires_grad=True), torch.randn(3, requires_grad=True)]
    scaled = fastamp.ops.scale_losses(losses, torch.tensor(1024.0))
    (scaled[0] + scaled[1].sum()).backward()
    assert losses[0].grad.dtype == torch.float16 and losses[0].grad.item() == 1024.0
    assert torch.equal(losses[1].grad, torch.full((3,), 1024.0))
    torch.library.opcheck(torch.ops.fastamp.scale_losses.default, (losses, torch.tensor(2.0)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(scale=torch.ones(2)), "scale must hold one torch.float32"),
        (dict(scale=torch.ones((), dtype=torch.float64)), "scale must hold one torch.float32"),
        (dict(growth_tracker=torch.zeros((), dtype=torch.int64)), "growth_tracker must hold one torch.int32"),
        (dict(found_infs=[]), "found_infs must hold 1 to 256"),
        (
            dict(found_infs=[torch.zeros(()), torch.zeros((), dtype=torch.float16)]),
            r"found_infs\[1\] must hold one torch.float32",
        ),
        (dict(growth_interval=0), "growth_interval must be between 1"),
        (dict(growth_interval=-3), "growth_interval must be between 1"),
        (dict(min_scale=4.0, max_scale=2.0), "min_scale must not be above max_scale"),
        (dict(hysteresis=0), "hysteresis must be between 1"),
        (dict(hysteresis=2), "needs hysteresis_tracker"),
    ],
)
def test_update_refuses_bad_input(arguments, message):
    good = dict(
        scale=torch.tensor(8.0),
        growth_tracker=tracker(1, torch.device("cpu")),
        found_infs=[torch.ones(())],
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=10,
    )
    with pytest.raises(RuntimeError, match=message):
        fastamp.ops.update_scale_(**(good | arguments))
    assert good["scale"].item() == 8.0 and good["growth_tracker"].item() == 1


def test_other_bad_input():
    with pytest.raises(RuntimeError, match="max_norm must be a number, got NaN"):
        fastamp.ops.clip_coefficient(torch.tensor(1.0), float("nan"))
    with pytest.raises(RuntimeError, match=r"total_norm must hold one torch\.float32"):
        fastamp.ops.clip_coefficient(torch.ones(2), 1.0)
    with pytest.raises(RuntimeError, match=r"losses\[0\] must be a strided floating-point tensor, got torch.int64"):
        fastamp.ops.scale_losses([torch.tensor(1)], torch.tensor(2.0))


def test_opcheck():
    scale, successes, left = (
        torch.tensor(8.0),
        tracker(0, torch.device("cpu")),
        tracker(2, torch.device("cpu")),
    )
    torch.library.opcheck(
        torch.ops.fastamp.update_scale_.default,
        (scale, successes, [torch.ones(())], 2.0, 0.5, 10, None, None, 2, left),
    )
    torch.library.opcheck(torch.ops.fastamp.clip_coefficient.default, (torch.tensor(3.0), 1.0))
