"""Every torch optimizer in every implementation, third-party optimizers by their protocols, and schedulers."""

from __future__ import annotations

import inspect
import unittest.mock
import warnings

import pytest
import torch
from backends import why_missing
from scaler_parity import assert_same, skip_if_torch_refuses
from torch import Tensor, nn

import fastamp

OVERFLOWS = (0, 3)
STEPS = 6
needs_gpu = pytest.mark.skipif(bool(why_missing("cuda")), reason=why_missing("cuda") or "there is a GPU")


def implementations() -> dict[str, tuple[type, dict]]:
    """Every optimizer class in torch.optim, with every choice of foreach and fused that it takes."""
    found = {}
    for name, cls in sorted(vars(torch.optim).items()):
        if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
            continue
        parameters = inspect.signature(cls).parameters
        found[f"{name}-single"] = cls, {"foreach": False} if "foreach" in parameters else {}
        if "foreach" in parameters:
            found[f"{name}-foreach"] = cls, {"foreach": True}
        if "fused" in parameters:
            found[f"{name}-fused"] = cls, {"fused": True}
    return found


IMPLEMENTATIONS = implementations()


class Scorer(nn.Module):
    """Gradients of several shapes, among them a sparse one for SparseAdam; Muon takes matrices only."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(5, 7), (16, 3)] if kind.__name__ in ("Muon", "SparseAdam") else [(5, 7), (16, 3), (33,), ()]
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)
        self.sparse = kind is torch.optim.SparseAdam

    def forward(self, step: int) -> Tensor:
        losses = []
        for weight in self.weights:
            if self.sparse:
                rows = torch.tensor([step % 5, 1, 1], device=weight.device)
                losses.append(nn.functional.embedding(rows, weight, sparse=True).square().sum())
            else:
                losses.append((weight.sin() * (step + 1.3)).square().sum())
        return torch.stack(losses).sum()


def train(make_scaler, kind: type, kwargs: dict, explicit: bool, device: str):
    model = Scorer(kind).to(device)
    optimizer = kind(model.parameters(), **kwargs)
    scaler = make_scaler(device, init_scale=3.0 * 1024, growth_factor=3.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        factor = float("inf") if step in OVERFLOWS else 1.0
        scaler.scale(model(step) * factor).backward()
        if explicit:
            scaler.unscale_(optimizer)
        closure = []
        if kind is torch.optim.LBFGS:
            closure = [lambda step=step: model(step).detach()]
        scaler.step(optimizer, *closure)
        scaler.update()
    return [p.detach() for p in model.parameters()], optimizer.state_dict(), scaler.state_dict()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_-step"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bit_identical_to_torchs_scaler(name, explicit, device):
    kind, kwargs = IMPLEMENTATIONS[name]
    kwargs = {"lr": 0.01, **kwargs}
    if name.endswith("-fused"):
        skip_if_torch_refuses(lambda p: kind(p, **kwargs), device)
    expected = train(torch.amp.GradScaler, kind, kwargs, explicit, device)
    result = train(fastamp.GradScaler, kind, kwargs, explicit, device)
    assert_same(result, expected, name)
    start = [p.detach() for p in Scorer(kind).parameters()]
    assert not all(torch.equal(a.cpu(), b) for a, b in zip(result[0], start, strict=True))
    assert result[2]["scale"] != 3.0 * 1024


def train_in_half(make_scaler, kind: type, kwargs: dict, device: str):
    """Under float16 autocast, from a scale so large that gradients of the first steps overflow by themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 8, bias=False)).to(device)
    optimizer = kind(model.parameters(), **kwargs)
    scaler = make_scaler(device, init_scale=2.0**23)
    x = torch.randn(32, 64).to(device)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer, *([loss.detach] if kind is torch.optim.LBFGS else []))
        scaler.update()
    return [p.detach() for p in model.parameters()], optimizer.state_dict(), scaler.state_dict()


# SparseAdam takes no dense gradients.
@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if not name.startswith("SparseAdam")])
@needs_gpu
def test_float16_autocast_on_cuda_is_bit_identical(name):
    kind, kwargs = IMPLEMENTATIONS[name]
    kwargs = {"lr": 0.01, **kwargs}
    if name.endswith("-fused"):
        skip_if_torch_refuses(lambda p: kind(p, **kwargs), "cuda")
    expected = train_in_half(torch.amp.GradScaler, kind, kwargs, "cuda")
    result = train_in_half(fastamp.GradScaler, kind, kwargs, "cuda")
    assert_same(result, expected, name)
    assert 2.0**17 < result[2]["scale"] < 2.0**23, "some steps overflow, some do not"


def test_the_list_has_all_implementations():
    names = {name.partition("-")[0] for name in IMPLEMENTATIONS}
    assert {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "LBFGS", "SparseAdam", "Adafactor", "Rprop"} <= names
    fused = {name for name in IMPLEMENTATIONS if name.endswith("-fused")}
    assert {"SGD-fused", "Adam-fused", "AdamW-fused", "Adagrad-fused"} <= fused


# ---- third-party optimizers, by their protocols ------------------------------------------------------------


class ApexStyle(torch.optim.Optimizer):
    """As apex's and TransformerEngine's capturable FusedAdam: takes the scaler as a keyword and asks it, through
    methods with an underscore, for the scale and for what it found."""

    _step_supports_amp_scaling = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        for group in self.param_groups:
            # apex asks once a group.
            device = group["params"][0].device
            found_inf = grad_scaler._check_inf_per_device(self)[device]
            inverse = grad_scaler._get_scale_async().double().reciprocal().float()
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(torch.where(found_inf.reshape(()) != 0, 0.0, group["lr"] * inverse * p.grad.nan_to_num()))


class ApexLambStyle(ApexStyle):
    """As apex's FusedMixedPrecisionLamb: writes its own found_inf into the scaler's books."""

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        states = grad_scaler._per_optimizer_states[id(self)]
        found = torch.zeros(1)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    found += (~p.grad.isfinite()).any()
        states["found_inf_per_device"] = {torch.device("cpu"): found.clamp(max=1.0)}
        inverse = grad_scaler._get_scale_async().double().reciprocal().float()
        if not found:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * inverse * p.grad)


class AttributeStyle(torch.optim.Optimizer):
    """As torch's own fused optimizers: reads grad_scale and found_inf from its attributes."""

    _step_supports_amp_scaling = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad if grad_scale is None else p.grad / grad_scale
                p.sub_(torch.where(found_inf == 1, 0.0, group["lr"] * grad.nan_to_num()))


class EightBitStyle(torch.optim.Optimizer):
    """As bitsandbytes' 8-bit optimizers: state in uint8, quantised by blocks; gradients read by a kernel of its
    own, so that they have to arrive unscaled."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["state1"] = torch.full_like(p, 128, dtype=torch.uint8)
                    state["absmax1"] = torch.ones(())
                momentum = (state["state1"].float() - 128) / 127 * state["absmax1"] * 0.9 + p.grad.float()
                state["absmax1"] = momentum.abs().max().clamp(min=1e-12)
                state["state1"] = (momentum / state["absmax1"] * 127 + 128).round().to(torch.uint8)
                p.sub_(group["lr"] * momentum.to(p.dtype))


class Lookahead:
    """An optimizer around another one, no torch.optim.Optimizer itself."""

    def __init__(self, params, lr=0.1, **kwargs):
        self.optimizer = torch.optim.SGD(params, lr=lr, **kwargs)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def state_dict(self):
        return {"count": self.count, "inner": self.optimizer.state_dict()}

    @torch.no_grad()
    def step(self, closure=None):
        result = self.optimizer.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                p.copy_(slow.lerp_(p, 0.5))
        return result


class ReplacesStep(torch.optim.SGD):
    """Puts another `step` on the instance while it runs, as schedulers and accelerate do."""

    def __init__(self, params, lr=0.1, **kwargs):
        super().__init__(params, lr=lr, **kwargs)
        inner = self.step
        self.calls = 0

        def step(*args, **kwargs):
            self.calls += 1
            return inner(*args, **kwargs)

        self.step = step


def train_custom(make_scaler, make_optimizer, explicit):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(5, 7), (300,)]]
    optimizer = make_optimizer(params)
    scaler = make_scaler("cpu", init_scale=3.0 * 1024, growth_factor=3.0, growth_interval=2)
    outcomes = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum((p.sin() * (step + 1.3)).square().sum() for p in params)
        scaler.scale(loss * (float("inf") if step in OVERFLOWS else 1.0)).backward()
        if explicit:
            scaler.unscale_(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            outcomes.append(scaler.step(optimizer))
        scaler.update()
    return [p.detach() for p in params], optimizer.state_dict(), scaler.state_dict(), outcomes


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_-step"])
@pytest.mark.parametrize(
    "make",
    [
        AttributeStyle,
        EightBitStyle,
        Lookahead,
        lambda params: Lookahead(params, fused=True),
        ReplacesStep,
        lambda params: ReplacesStep(params, fused=True),
    ],
    ids=["attributes", "8-bit", "wrapper", "wrapper of fused", "replaced step", "replaced fused step"],
)
def test_protocols_are_bit_identical_to_torchs_scaler(make, explicit):
    expected = train_custom(torch.amp.GradScaler, make, explicit)
    result = train_custom(fastamp.GradScaler, make, explicit)
    assert_same(result, expected)
    assert result[2]["scale"] != 3.0 * 1024


@pytest.mark.parametrize("make", [ApexStyle, ApexLambStyle])
def test_apex_protocols_are_bit_identical_to_torchs_scaler(make):
    expected = train_custom(torch.amp.GradScaler, make, False)
    result = train_custom(fastamp.GradScaler, make, False)
    assert_same(result, expected)
    with pytest.warns(FutureWarning, match="stop passing itself as a keyword argument"):
        p = nn.Parameter(torch.ones(3))
        scaler = fastamp.GradScaler("cpu")
        scaler.scale(p.sum()).backward()
        scaler.step(make([p]))


@pytest.mark.parametrize("make", [ApexStyle, ApexLambStyle, AttributeStyle])
def test_a_skip_inside_the_optimizer_is_seen(make):
    p = nn.Parameter(torch.ones(3))
    optimizer = make([p])
    scaler = fastamp.GradScaler("cpu")
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(p.sum() * factor).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.step_was_skipped)
    assert seen == [False, True, False] and scaler.get_scale() == 2.0**15


def test_half_precision_gradients_are_refused_by_name():
    layer = nn.Linear(3, 2, dtype=torch.float16)
    optimizer = EightBitStyle(list(layer.named_parameters()))
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(layer(torch.ones(1, 3, dtype=torch.float16)).sum()).backward()
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients. Parameter 0 \('weight'\) of group 0"):
        scaler.step(optimizer)


# ---- schedulers --------------------------------------------------------------------------------------------


def iterate(scaler, optimizers, factor):
    for optimizer in optimizers:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            scaler.scale(sum(p.sum() for p in group["params"]) * factor).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)


def sgd(**kwargs):
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0, **kwargs)


@pytest.mark.parametrize("before_update", [False, True], ids=["after update", "before update"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_schedule_stands_still_on_a_skipped_step(fused, before_update, recwarn):
    optimizer = sgd(fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = fastamp.GradScaler("cpu")
    advanced = []
    for factor in (float("inf"), 1.0, float("nan"), 1.0):
        iterate(scaler, [optimizer], factor)
        if not before_update:
            scaler.update()
        advanced.append(fastamp.step_scheduler(scaler, scheduler))
        if before_update:
            scaler.update()
    assert advanced == [False, True, False, True]
    assert scheduler.get_last_lr() == [0.25] and scheduler.last_epoch == 2
    # torch warns where a scheduler is stepped before the optimizer, which a skipped first step makes of the
    # usual order.
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_each_schedule_follows_its_own_optimizer():
    good, bad = sgd(), sgd()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (good, bad)]
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(good.param_groups[0]["params"][0].sum()).backward()
    scaler.scale(bad.param_groups[0]["params"][0].sum() * float("inf")).backward()
    scaler.step(good)
    scaler.step(bad)
    scaler.update()
    assert [fastamp.step_scheduler(scaler, scheduler) for scheduler in schedulers] == [True, False]


def test_schedulers_of_other_kinds():
    optimizer = sgd()
    wrapped = Lookahead([nn.Parameter(torch.ones(3))])
    scaler = fastamp.GradScaler("cpu")
    iterate(scaler, [optimizer], float("inf"))
    scaler.update()

    class Own:
        steps = 0

        def step(self):
            self.steps += 1

    own = Own()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    assert not fastamp.step_scheduler(scaler, own) and own.steps == 0
    assert not fastamp.step_scheduler(scaler, plateau, 3.0)
    own.optimizer = wrapped
    iterate(scaler, [wrapped.optimizer], 1.0)
    scaler.update()
    assert fastamp.step_scheduler(scaler, own) and own.steps == 1
    assert fastamp.step_scheduler(scaler, plateau, metrics=3.0) and plateau.best == 3.0


def test_wrappers_without_an_end():
    class Endless:
        steps = 0
        optimizer = property(lambda self: self)

        def step(self):
            self.steps += 1

    scaler = fastamp.GradScaler("cpu")
    iterate(scaler, [sgd()], float("inf"))
    scaler.update()
    endless, anything = Endless(), unittest.mock.Mock()
    assert not fastamp.step_scheduler(scaler, endless) and endless.steps == 0
    assert not fastamp.step_scheduler(scaler, anything) and not anything.step.called


def test_a_disabled_scaler_never_holds_a_schedule():
    optimizer = sgd()
    scaler = fastamp.GradScaler("cpu", enabled=False)
    iterate(scaler, [optimizer], float("inf"))
    scaler.update()
    assert fastamp.step_scheduler(scaler, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))


def test_torchs_scaler_is_refused():
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd(), 0.5)
    with pytest.raises(TypeError, match=r"must be a fastamp.GradScaler, got torch.amp.grad_scaler.GradScaler"):
        fastamp.step_scheduler(torch.amp.GradScaler("cpu"), scheduler)
    assert scheduler.last_epoch == 0
