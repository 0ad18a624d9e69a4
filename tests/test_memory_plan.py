"""`fastamp.memory.plan`: the choice is exact, fits when it is run, and never gets slower with more budget."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_models import CNN, GPT, Stack
from torch import Tensor, nn

from fastamp.memory import DoesNotFit, NotTraceable, Plan, Planner, estimate, plan
from fastamp.memory._profile import BlockCost, StepCost, between, cheapest, front, least

pytestmark = pytest.mark.usefixtures("one_thread")


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(300, (4, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def whole(tokens) -> Planner:
    """Plans that never cut the batch."""
    torch.manual_seed(0)
    return Planner(Stack(), tokens, loss=_loss, targets=tokens, optimizer="sgd", micro_batches=False)


# --- the dynamic programme against trying everything ---


def _random_costs(draw: Callable[[int, int], int], blocks: int, options: int) -> dict[str, StepCost]:
    def block() -> BlockCost:
        return BlockCost(*(float(draw(1, 49)) for _ in range(3)), float(draw(1, 8)))

    return {
        f"option {n}": StepCost(10.0, tuple(block() for _ in range(blocks)), 7.0, 3.0, 1000.0) for n in range(options)
    }


def _peak_and_seconds(costs: dict[str, StepCost], chosen: tuple[str, ...]) -> tuple[float, float]:
    """By the definition of `BlockCost`, block after block."""
    any_option = next(iter(costs.values()))
    held = peak = any_option.standing
    seconds = any_option.outside
    for number, name in enumerate(chosen):
        block = costs[name].blocks[number]
        peak = max(peak, held + block.forward, held + block.backward)
        held += block.kept
        seconds += block.seconds
    return max(peak, held + any_option.after), seconds


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), blocks=st.integers(1, 5), options=st.integers(1, 3))
def test_the_choice_is_that_of_trying_everything(data, blocks, options):
    costs = _random_costs(lambda low, high: data.draw(st.integers(low, high)), blocks, options)
    everything = [_peak_and_seconds(costs, chosen) for chosen in itertools.product(costs, repeat=blocks)]
    budgets = {10, *(int(peak) + change for peak, _ in everything for change in (-1, 0, 1))}
    for budget in sorted(budgets):
        fitting = [seconds for peak, seconds in everything if peak <= budget]
        found = cheapest(costs, budget)
        if not fitting:
            assert found is None
        else:
            assert found.seconds == min(fitting) and found.peak <= budget
            assert _peak_and_seconds(costs, found.treatments) == (found.peak, found.seconds)
    smallest = least(costs)
    assert smallest.peak == min(peak for peak, _ in everything)
    assert smallest.seconds == min(seconds for peak, seconds in everything if peak == smallest.peak)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30), budget=st.integers(20, 300))
def test_a_smaller_budget_only_takes_the_first_choices_away(seed, budget):
    costs = _random_costs(random.Random(seed).randint, blocks=4, options=3)
    everything = list(front(costs, float("inf")))
    assert list(front(costs, budget)) == [choice for choice in everything if choice.peak <= budget]
    pairs = {_peak_and_seconds(costs, chosen) for chosen in itertools.product(costs, repeat=4)}
    unbeaten = {
        (peak, seconds)
        for peak, seconds in pairs
        if not any(p <= peak and s <= seconds and (p, s) != (peak, seconds) for p, s in pairs)
    }
    assert {(choice.peak, choice.seconds) for choice in everything} == unbeaten


def test_a_hundred_blocks_with_six_options_are_quick_to_choose():
    costs = _random_costs(random.Random(0).randint, blocks=100, options=6)
    assert cheapest(costs, 3000).peak <= 3000


def test_costs_between_two_batch_sizes():
    low, high = (StepCost(10, (BlockCost(4 * b, 6 * b, 8 * b + 5, b),), 3 * b, 1, 9 * b) for b in (1.0, 5.0))
    middle = between(low, high, 0.5)
    assert middle.blocks == (BlockCost(12, 18, 29, 3),) and middle.after == 9 and middle.standing == 10


# --- the plan of a real model ---


def _combinations(planner: Planner) -> dict[tuple[str, ...], int]:
    """The simulated peak of each combination of treatments."""
    every = itertools.product(planner.options, repeat=len(planner.blocks))
    return {chosen: planner._peak(1, dict(zip(planner.blocks, chosen, strict=True))) for chosen in every}


def test_costs_of_blocks_add_up_to_the_peaks_of_whole_steps(whole):
    costs = whole._costs_of(1)
    for chosen, peak in _combinations(whole).items():
        assert _peak_and_seconds(costs, chosen)[0] == pytest.approx(peak, rel=0.03)


def test_a_plan_is_the_fastest_of_all_that_fit_and_more_budget_is_never_slower(whole):
    costs, peaks = whole._costs_of(1), _combinations(whole)
    seconds = {chosen: _peak_and_seconds(costs, chosen)[1] + whole._variants.optimizer_seconds for chosen in peaks}
    before = float("inf")
    for budget in sorted({peak + change for peak in peaks.values() for change in (-1, 0, 100)}):
        fitting = [seconds[chosen] for chosen, peak in peaks.items() if peak <= budget]
        if not fitting:
            with pytest.raises(DoesNotFit):
                whole.plan(budget)
            continue
        found = whole.plan(budget)
        assert found.predicted_peak <= budget
        assert found.predicted_peak == peaks[tuple(found.treatments.values())]
        # Combinations that differ in which block is treated take the same time but for the rounding of sums.
        assert found.seconds == pytest.approx(min(fitting), rel=0.01)
        assert found.seconds <= before
        before = found.seconds
    assert set(found.treatments.values()) == {"keep"} and len({round(s, 6) for s in seconds.values()}) >= 3


@pytest.mark.parametrize("share", [0.7, 0.85])
def test_a_plan_run_for_real_has_the_predicted_peak(whole, share):
    keep = whole._peak(1, dict.fromkeys(whole.blocks, "keep"))
    found = whole.plan(int(share * keep))
    assert set(found.treatments.values()) == {"keep", "checkpoint"}
    run = found.verify(repeats=1)
    assert abs(run.peak - run.predicted_peak) <= 0.1 * run.peak
    assert run.peak <= 1.01 * found.budget
    assert run.predicted_seconds == found.seconds and 0.05 < run.seconds / found.seconds < 20  # a busy machine
    assert run.report.source == "measured"
    assert found.estimate().peak.bytes == pytest.approx(found.predicted_peak, rel=0.01)


def test_a_plan_of_a_gpt_that_stores_and_checkpoints_has_the_predicted_peak(tokens):
    torch.manual_seed(0)
    options = ("keep", "store:int8", "checkpoint:delta-int8")
    planner = Planner(
        GPT(blocks=2), tokens, loss=_loss, targets=tokens, optimizer="sgd", micro_batches=False, options=options
    )
    found = planner.plan(int(0.8 * planner._peak(1, dict.fromkeys(planner.blocks, "keep"))))
    assert set(found.treatments.values()) - {"keep"}
    run = found.verify(repeats=1)
    assert abs(run.peak - run.predicted_peak) <= 0.1 * run.peak and run.peak <= 1.01 * found.budget


def test_an_impossible_budget_says_the_least_and_that_is_possible(whole):
    with pytest.raises(DoesNotFit, match=r"budget: .* is less than the least that this step needs, .*\(") as raised:
        whole.plan("100kB")
    smallest = raised.value.least
    assert "3 blocks checkpoint" in str(raised.value) and "parameters" in str(raised.value)
    assert whole.plan(smallest).predicted_peak <= smallest
    with pytest.raises(DoesNotFit):
        whole.plan(smallest - 1)


def test_cutting_the_batch_fits_less(tokens):
    torch.manual_seed(0)
    model = Stack()
    planner = Planner(model, tokens, loss=_loss, targets=tokens, optimizer="sgd")
    keep = planner._peak(1, dict.fromkeys(planner.blocks, "keep"))
    found = planner.plan(int(0.5 * keep))
    assert found.accumulation > 1 and found.micro_batch * found.accumulation == 4
    run = found.verify(repeats=1)
    assert abs(run.peak - run.predicted_peak) <= 0.1 * run.peak
    pieces = list(found.split({"tokens": tokens, "weight": torch.ones(7)}))
    assert torch.equal(torch.cat([piece["tokens"] for piece in pieces]), tokens)
    assert len(pieces) == found.accumulation and all(piece["weight"].shape == (7,) for piece in pieces)
    times = [planner.plan(int(share * keep)).seconds for share in (0.4, 0.5, 0.75, 1.0)]
    assert times == sorted(times, reverse=True)


def test_apply_and_undo_change_memory_and_not_gradients(whole, tokens):
    torch.manual_seed(0)
    model = Stack()
    keep = whole._peak(1, dict.fromkeys(whole.blocks, "keep"))
    found = whole.plan(int(0.7 * keep))

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        _loss(model(tokens), tokens).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain, state = gradients(), list(model.state_dict())
    forwards = [dict(block.__dict__) for block in model.blocks]
    found.apply(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    assert list(model.state_dict()) == state
    treated = [block for block in model.blocks if "forward" in block.__dict__]
    assert len(treated) == list(found.treatments.values()).count("checkpoint")
    with pytest.raises(RuntimeError, match="applied already"):
        found.apply(model)
    found.undo()
    assert [dict(block.__dict__) for block in model.blocks] == forwards
    with pytest.raises(RuntimeError, match="not applied"):
        found.undo()
    with pytest.raises(ValueError, match=r"CNN has no module called 'blocks\.2'"):
        found.apply(CNN(blocks=2))


def test_the_words_of_a_plan(whole):
    keep = whole._peak(1, dict.fromkeys(whole.blocks, "keep"))
    found = whole.plan(int(0.8 * keep))
    text = str(found)
    assert "x the time of the step as it is" in text and "checkpoint" in text and "keep" in text
    assert isinstance(found, Plan) and found.as_dict()["treatments"] == found.treatments
    assert found.keep_peak == keep > found.predicted_peak


# --- other shapes of models ---


class _Shared(nn.Module):
    """Runs one block three times: no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack((64, 64)).blocks

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.blocks[1](x)


def test_blocks_that_are_no_stack_are_treated_alike():
    model, x = _Shared(), torch.randn(2, 32, 32)
    planner = Planner(model, x, optimizer=None, micro_batches=False)
    keep = planner._peak(1, dict.fromkeys(planner.blocks, "keep"))
    found = planner.plan(int(0.8 * keep))
    assert set(found.treatments.values()) == {"checkpoint"} and found.predicted_peak <= 0.8 * keep
    assert any("treated alike" in note for note in found.notes)
    assert set(planner.plan(keep).treatments.values()) == {"keep"}


def test_a_model_without_blocks_can_still_be_cut():
    model, x = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)), torch.randn(64, 8)
    with pytest.raises(DoesNotFit):
        plan(model, x, 1000)
    whole = estimate(model, x, optimizer="sgd").peak.bytes
    found = plan(model, x, int(0.6 * whole), optimizer="sgd")
    assert found.accumulation > 1 and not found.treatments
    assert any("no repeated blocks" in note for note in found.notes)


def test_offload_is_planned_for_a_gpu_and_moves_bytes_to_the_host(tokens):
    model = Stack()
    kept = estimate(model, tokens, optimizer=None, device="cuda")
    planner = Planner(model, tokens, optimizer=None, device="cuda", options=("keep", "offload"), micro_batches=False)
    found = planner.plan(int(0.85 * kept.peak.bytes))
    assert "offload" in found.treatments.values()
    report = found.estimate()
    moved = report.other_devices["host (offloaded)"]
    assert kept.activations - report.activations == pytest.approx(moved, rel=0.2) and moved > 0
    found.apply(model)
    torch.manual_seed(0)
    model(tokens).sum().backward()
    offloaded = [p.grad.clone() for p in model.parameters()]
    found.undo()
    model.zero_grad()
    torch.manual_seed(0)
    model(tokens).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(offloaded, model.parameters(), strict=True))


# --- bad input ---


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (ValueError, {"budget": "ten"}, "budget must be a size"),
        (ValueError, {"budget": -5}, "budget must be a positive"),
        (TypeError, {"budget": None}, "budget must be a number of bytes"),
        (ValueError, {"options": ("keep", "shrink")}, "unknown treatment 'shrink'"),
        (
            ValueError,
            {"options": ("keep", "checkpoint:int3")},
            "unknown format in the treatment 'checkpoint:int3'; formats are exact",
        ),
        (TypeError, {"options": "keep"}, "options must be a sequence of treatments"),
        (ValueError, {"options": ("offload",)}, "'offload' moves activations to host memory"),
        (ValueError, {"mode": "inference"}, "inference keeps nothing to plan for"),
        (ValueError, {"margin": 1.5}, "margin must be a fraction"),
        (ValueError, {"blocks": ["nowhere"]}, "blocks: no module of Linear is called 'nowhere'"),
        (ValueError, {"targets": torch.ones(1)}, r"targets go to loss\(output, targets\)"),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[:40],
)
def test_bad_arguments_are_named(kind, arguments, message):
    call = {"budget": "1GB", **arguments}
    with pytest.raises(kind, match=message):
        plan(nn.Linear(2, 2), torch.randn(1, 2), call.pop("budget"), **call)


def test_a_plan_of_a_meta_model_cannot_be_verified():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found = plan(model, torch.empty(2, 8), "1GB")
    with pytest.raises(NotTraceable, match="no real parameters"):
        found.verify()
