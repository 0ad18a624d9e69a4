"""Training states saved at any point of an iteration by one scaler and resumed by another."""

from __future__ import annotations

import io
import itertools
import json

import pytest
import torch
from scaler_parity import DEVICES, assert_same
from torch import nn

import fastamp

KINDS = {"torch": torch.amp.GradScaler, "fastamp": fastamp.GradScaler}
POINTS = ("backward", "unscale_", "step", "update")
OVERFLOWS = (1, 4)


class Crash(Exception):
    pass


class Job:
    """A training job that can be saved, lost and started again from what was saved.

    parallel: makes of the model what is called for its loss. overflows: steps whose loss is infinite.
    """

    def __init__(self, kind, device="cpu", saved=None, parallel=lambda model: model, overflows=OVERFLOWS, **kwargs):
        torch.manual_seed(0)
        self.device = device
        self.overflows = overflows
        self.model = nn.Linear(8, 4).to(device)
        self.forward = parallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **kwargs)
        self.scaler = KINDS[kind](device, init_scale=1024.0, growth_interval=2)
        self.step = 0
        if saved is not None:
            state = torch.load(io.BytesIO(saved), map_location=device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            self.step = state["step"]

    def save(self):
        buffer = io.BytesIO()
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler")}
        torch.save({**state, "step": self.step}, buffer)
        return buffer.getvalue()

    def run(self, until, crash_at=None):
        """crash_at: (step, point) after which the job saves and dies."""
        try:
            while self.step < until:
                self.iteration(crash_at)
        except Crash:
            return self.save()
        return self.save()

    def iteration(self, crash_at):
        def reached(point):
            if crash_at == (self.step, point):
                # A job that has taken its step goes on with the next one.
                self.step += point in ("step", "update")
                raise Crash

        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step)).to(self.device)
        self.optimizer.zero_grad()
        loss = self.forward(x).square().mean() * (float("inf") if self.step in self.overflows else 1.0)
        self.scaler.scale(loss).backward()
        reached("backward")
        self.scaler.unscale_(self.optimizer)
        reached("unscale_")
        self.scaler.step(self.optimizer)
        reached("step")
        self.scaler.update()
        reached("update")
        self.step += 1

    def result(self):
        return [p.detach() for p in self.model.parameters()], self.scaler.state_dict()


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("step", [0, 1, 3], ids="step {}".format)
def test_a_crash_at_any_point_resumes_as_with_torchs_scaler(step, point, fused):
    results = []
    for first, second in itertools.product(KINDS, KINDS):
        saved = Job(first, fused=fused).run(6, crash_at=(step, point))
        resumed = Job(second, saved=saved, fused=fused)
        resumed.run(6)
        results.append(resumed.result())
    for result in results[1:]:
        assert_same(result, results[0])
    if point in ("backward", "unscale_", "update"):
        # Nothing was lost: the iteration runs again, or was complete.
        uninterrupted = Job("torch", fused=fused)
        uninterrupted.run(6)
        assert_same(results[0], uninterrupted.result())


def test_a_crash_between_step_and_update_loses_that_update_alone():
    saved = Job("fastamp").run(6, crash_at=(1, "step"))
    resumed = Job("fastamp", saved=saved)
    # The step at fault was skipped before the crash; the backoff for it was still to come.
    assert resumed.step == 2 and resumed.scaler.get_scale() == 1024.0
    resumed.run(6)
    whole = Job("fastamp")
    whole.run(6)
    assert resumed.scaler.get_scale() > whole.scaler.get_scale()


def test_resuming_at_every_step():
    whole = Job("torch")
    whole.run(6)
    saved = None
    for step, kind in enumerate(["fastamp", "torch", "fastamp", "fastamp", "torch", "fastamp"], 1):
        saved = Job(kind, saved=saved).run(step)
    assert_same(Job("fastamp", saved=saved).result(), whole.result())


@pytest.mark.parametrize("to", DEVICES)
@pytest.mark.parametrize("from_", DEVICES)
def test_states_move_between_devices(from_, to):
    saved = Job("fastamp", from_).run(3)
    resumed = Job("fastamp", to, saved=saved)
    assert resumed.scaler.state_dict() == torch.load(io.BytesIO(saved), weights_only=True)["scaler"]
    resumed.run(6)
    assert resumed.scaler._scale.device.type == to


def test_states_hold_plain_numbers():
    # Which is why they move between devices, and into JSON.
    job = Job("fastamp")
    job.scaler = fastamp.GradScaler("cpu", min_scale=2.0, hysteresis=3)
    job.run(3)
    state = job.scaler.state_dict()
    assert json.loads(json.dumps(state)) == state
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(state)
    assert torchs.state_dict().items() <= state.items()
