"""fastamp.GradScaler against torch.amp.GradScaler: every result the same, bit for bit."""

import copy
import inspect
import pickle
import random
import re
import warnings
from collections import defaultdict
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from scaler_parity import (
    DEVICES,
    FUSED,
    OPTIMIZERS,
    CountOps,
    assert_same,
    both,
    fill_grads,
    parameters,
    same_bits,
    skip_if_torch_refuses,
    snapshot,
)
from torch.amp.grad_scaler import OptState

import fastamp
import fastamp.amp
import fastamp.cuda.amp
from fastamp import GradScaler

INF, NAN = float("inf"), float("nan")
# Not a power of two, so that dividing by the scale and multiplying by its reciprocal differ.
SETTINGS = dict(init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=3)


def started(cls=GradScaler, device="cpu", **kwargs):
    scaler = cls(device, **kwargs)
    scaler.scale(torch.ones((), device=device))
    return scaler


def with_grads(*grads, **kwargs):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return params, torch.optim.SGD(params, lr=1.0, **kwargs)


# ---- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-clip-step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_identical(name, explicit, device):
    if name.endswith("-fused"):
        skip_if_torch_refuses(OPTIMIZERS[name], device)

    def script(cls):
        params = parameters(device)
        optimizer = OPTIMIZERS[name](params)
        scaler = cls(device, **SETTINGS)
        for step in range(12):
            loss = torch.tensor(2.0, device=device)
            yield scaler.scale(loss)
            fill_grads(params, step, scaler.get_scale(), {3: INF, 4: -INF, 8: NAN}.get(step))
            if explicit:
                scaler.unscale_(optimizer)
                yield snapshot(scaler, params, [optimizer])
                yield torch.nn.utils.clip_grad_norm_(params, 1.0)
            yield scaler.step(optimizer)
            yield snapshot(scaler, params, [optimizer])
            scaler.update()
            yield snapshot(scaler, params, [optimizer])

    both(script)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", [("sgd", "adamw-fused"), ("adam", "adam"), ("sgd-fused", "adagrad-fused")])
def test_several_optimizers_are_bit_identical(names, device):
    for name in names:
        if name.endswith("-fused"):
            skip_if_torch_refuses(OPTIMIZERS[name], device)

    def script(cls):
        halves = [parameters(device), parameters(device)]
        optimizers = [OPTIMIZERS[n](half) for n, half in zip(names, halves, strict=True)]
        scaler = started(cls, device, **SETTINGS)
        for step in range(8):
            for i, (optimizer, params) in enumerate(zip(optimizers, halves, strict=True)):
                fill_grads(params, 2 * step + i, scaler.get_scale(), {2: INF, 9: NAN}.get(2 * step + i))
                scaler.step(optimizer)
            scaler.update()
            yield snapshot(scaler, halves[0] + halves[1], optimizers)

    both(script)


@pytest.mark.parametrize("scale", [1.0, 65536.0, 3.0, 2.0**-126, 3e38], ids="{:g}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_unscaled_gradients_of_every_scale_and_dtype(dtype, scale):
    def script(cls):
        # Down to subnormals, which must survive; not up to where unscaling by 2**126 would overflow.
        exponents = torch.arange(-149, 0, dtype=torch.float32)
        params, optimizer = with_grads((torch.full_like(exponents, 1.5) * 2**exponents).to(dtype))
        scaler = started(cls, init_scale=scale)
        scaler.unscale_(optimizer)
        yield params[0].grad
        yield scaler._found_inf_per_device(optimizer)

    both(script)


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_dtypes_and_layouts(device):
    def script(cls):
        params = parameters(device, (torch.float32, torch.bfloat16, torch.float64))
        optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
        scaler = started(cls, device, **SETTINGS)
        for step in range(4):
            fill_grads(params, step, scaler.get_scale(), INF if step == 2 else None)
            scaler.step(optimizer)
            scaler.update()
            yield snapshot(scaler, params, [optimizer])

    both(script)


def test_a_model_under_autocast():
    def script(cls):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        # The first scale is high enough for float16 gradients of activations to overflow.
        scaler = cls("cpu", init_scale=2.0**24, growth_interval=4)
        for _ in range(10):
            optimizer.zero_grad()
            for _ in range(2):  # gradient accumulation
                x, y = torch.randn(8, 16), torch.randn(8, 4)
                with torch.autocast("cpu", torch.float16):
                    loss = torch.nn.functional.mse_loss(model(x), y)
                scaler.scale(loss / 2).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            yield snapshot(scaler, list(model.parameters()), [optimizer])
        assert scaler.get_scale() < 2.0**24

    both(script)


def test_sparse_gradients():
    def script(cls):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(10, 4, sparse=True)
        dense = torch.nn.Linear(4, 1)
        params = [embedding.weight, *dense.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = cls("cpu", **SETTINGS)
        for step in range(5):
            optimizer.zero_grad()
            loss = dense(embedding(torch.tensor([1, 2, 1, 7]))).sum()
            scaler.scale(loss).backward()
            if step == 2:
                embedding.weight.grad._values()[0, 0] = NAN
            if step == 3:
                dense.bias.grad.fill_(INF)
            scaler.step(optimizer)
            scaler.update()
            yield snapshot(scaler, params, [optimizer])

    both(script)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_sparse_fp16_gradients_are_coalesced_before_they_are_checked(found):
    def script(cls):
        # 40000 + 40000 overflows float16 only once duplicates are added up.
        value = 40000.0 if found else 20000.0
        grad = torch.sparse_coo_tensor([[1, 1, 3]], torch.tensor([value] * 3).half(), (5,), check_invariants=True)
        param = torch.nn.Parameter(torch.zeros(5, dtype=torch.float16))
        param.grad = grad
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = started(cls)
        yield scaler._check_inf_per_device(optimizer)
        yield param.grad
        assert scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item() == found

    both(script)


def test_disabled():
    def script(cls):
        params = parameters()
        optimizer = OPTIMIZERS["sgd"](params)
        scaler = cls("cpu", enabled=False)
        loss = torch.tensor(2.0)
        assert scaler.scale(loss) is loss
        fill_grads(params, 0, 1.0, INF)
        scaler.unscale_(optimizer)
        yield scaler.step(optimizer, lambda: torch.tensor(3.0))
        yield scaler.step(optimizer, closure=lambda: torch.tensor(3.0))
        scaler.update()
        scaler.load_state_dict({})
        yield [scaler.get_scale(), scaler._get_growth_tracker(), scaler.is_enabled(), scaler.state_dict()]
        yield [p.detach().clone() for p in params]
        yield vars(scaler)
        yield vars(pickle.loads(pickle.dumps(scaler)))
        assert list(vars(scaler)) == ["_device", "_enabled"]

    both(script)
    scaler = GradScaler("cpu", enabled=False, min_scale=1.0, hysteresis=2, allow_fp16_grads=True)
    assert list(vars(scaler)) == ["_device", "_enabled"]
    assert scaler.step_was_skipped is False
    assert scaler.overflow_report([]) == []


# ---- any sequence of calls ---------------------------------------------------------------------------------


def run_program(cls, seed):
    """A random program of scaler calls in any order, legal or not. Yields every result and every error."""
    rng = random.Random(seed)
    groups = [parameters()[:5] for _ in range(2)]
    optimizers = [OPTIMIZERS[rng.choice(list(OPTIMIZERS))](params) for params in groups]
    scaler = cls("cpu", **SETTINGS, enabled=rng.random() > 0.05)
    saved = {
        "scale": 4.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }

    def call(action, which):
        nonlocal scaler, saved
        params, optimizer = groups[which], optimizers[which]
        if action == "scale":
            return scaler.scale(rng.choice([torch.tensor(3.0), [torch.ones(2), (torch.tensor(1.0).half(),)], 7]))
        if action == "backward":
            return fill_grads(params, rng.randrange(99), scaler.get_scale(), rng.choice([None, None, None, INF, NAN]))
        if action == "half":
            params[0].data, params[0].grad = params[0].data.half(), None
            params[0].grad = torch.ones_like(params[0])
            try:
                return scaler.unscale_(optimizer)
            finally:
                params[0].data, params[0].grad = params[0].data.float(), None
        if action == "set":
            scaler.set_growth_factor(3.0)
            scaler.set_backoff_factor(0.25)
            scaler.set_growth_interval(rng.choice([0, 1, 2]))
            return [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
        if action == "save":
            saved = scaler.state_dict()
            return saved
        if action == "pickle":
            scaler = rng.choice([copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])(scaler)
            return None
        if action == "found":
            return {d: f.clone() for d, f in scaler._found_inf_per_device(optimizer).items()}
        return {
            "unscale": lambda: scaler.unscale_(optimizer),
            "step": lambda: scaler.step(optimizer),
            "closure": lambda: scaler.step(optimizer, closure=lambda: 1.0),
            "check": lambda: scaler._check_inf_per_device(optimizer),
            "update": lambda: scaler.update(),
            "update-float": lambda: scaler.update(rng.choice([8.0, 0.25])),
            "update-tensor": lambda: scaler.update(torch.tensor(rng.choice([[3.0], [1.0, 2.0]]))),
            "update-int": lambda: scaler.update(rng.choice([3, "4"])),
            "zero_grad": lambda: optimizer.zero_grad(),
            "load": lambda: scaler.load_state_dict(rng.choice([saved, saved, {}])),
            "enabled": lambda: scaler.is_enabled(),
        }[action]()

    usual = ["scale", "backward", "backward", "unscale", "step", "step", "update", "update"]
    rare = ["half", "set", "save", "pickle", "found", "closure", "check", "update-float", "update-tensor"]
    rare += ["update-int", "zero_grad", "load", "enabled"]
    for _ in range(25):
        action = rng.choice(rare if rng.random() < 0.3 else usual)
        try:
            result = call(action, rng.randrange(2))
            yield [action, copy.deepcopy(result)]
        except Exception as error:
            if action == "step" and str(error) == "'int' object has no attribute 'device'":
                # torch hands a fused optimizer the sum of no flags: the int 0. fastamp says what is wrong.
                error = AssertionError(LONGER[1])
            yield [action, type(error).__name__, str(error)]
            for optimizer in optimizers:  # torch leaves these behind, to be multiplied in twice by the next step
                vars(optimizer).pop("grad_scale", None)
                vars(optimizer).pop("found_inf", None)
        yield [[p.detach().clone() for p in params] for params in groups]
        yield [[None if p.grad is None else p.grad.clone() for p in params] for params in groups]
        yield [scaler.get_scale(), scaler._get_growth_tracker(), scaler.state_dict()]


# Messages that say more than torch's. Each begins with torch's words.
LONGER = (
    "Attempting to unscale FP16 gradients.",
    "No inf checks were recorded for this optimizer.",
    "No inf checks were recorded prior to update.",
)


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_any_sequence_of_calls_gives_the_same_results_and_errors(first):
    for seed in range(first, first + 20):
        expected, got = (list(run_program(cls, seed)) for cls in (torch.amp.GradScaler, GradScaler))
        for mine, theirs in zip(got, expected, strict=True):
            if len(theirs) == 3 and theirs[2] in LONGER:
                assert mine[2].startswith(theirs[2]) and len(mine[2]) > len(theirs[2])
                mine = [*mine[:2], theirs[2]]
            assert_same(theirs, mine, f"seed {seed}")


def test_the_random_programs_reach_what_they_are_for():
    seen = [entry for seed in range(120) for entry in run_program(GradScaler, seed) if isinstance(entry[0], str)]
    errors = {entry[2] for entry in seen if len(entry) == 3}
    for words in (
        *LONGER,
        "unscale_() has already been called",
        "unscale_() is being called after",
        "Closure use",
    ):
        assert any(words in error for error in errors), words
    assert any("step() has already been called" in error for error in errors)
    assert any("may only be pickled" in error for error in errors)
    assert any("_scale is None" in error for error in errors)


# ---- exactness ---------------------------------------------------------------------------------------------


def test_one_reciprocal_is_torchs_three_kernels_for_every_mantissa():
    mantissas = torch.arange(2**23, dtype=torch.int32)
    # Exponents with normal results, the last normal one, subnormal results, and subnormal scales (some with
    # infinite results).
    for exponent in (127, 143, 252, 253, 254, 0, 1):
        scale = (mantissas | exponent << 23).view(torch.float32)
        assert same_bits(scale.double().reciprocal().float(), scale.reciprocal())
    for value in (65536.0, 3.0, 1e-40, 0.0, INF, 3.4e38):  # the 0-dim path
        scale = torch.tensor(value)
        assert same_bits(scale.double().reciprocal().float(), scale.reciprocal())


def test_a_fused_optimizer_divides_and_others_multiply():
    def script(cls):
        for fused in (False, True):
            grad = torch.linspace(0.1, 77.0, 1000)
            params, optimizer = with_grads(grad, fused=fused)
            scaler = started(cls, init_scale=1000.0)
            scaler.step(optimizer)
            yield params[0].detach()

    both(script)
    multiplied, divided = list(script(GradScaler))
    assert not torch.equal(multiplied, divided)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_after_a_skipped_step(fused):
    params, optimizer = with_grads(torch.tensor([4.0, INF]), fused=fused)
    scaler = started(init_scale=2.0)
    scaler.step(optimizer)
    assert params[0].grad.tolist() == ([4.0, INF] if fused else [2.0, INF])
    assert params[0].tolist() == [0.0, 0.0]


def test_gradients_made_nonfinite_after_unscale_still_step():
    def script(cls):
        for fused in (False, True):
            params, optimizer = with_grads(torch.ones(3), fused=fused)
            scaler = started(cls)
            scaler.unscale_(optimizer)
            params[0].grad[1] = NAN
            scaler.step(optimizer)
            yield params[0].detach()
            assert params[0].isnan().tolist() == [False, True, False]

    both(script)


def test_fp16_losses():
    scaler, reference = started(), started(torch.amp.GradScaler)
    for loss in (torch.tensor(2.0).half(), torch.tensor([2.0]).half(), torch.tensor(2.0).bfloat16()):
        assert same_bits(scaler.scale(loss), reference.scale(loss))
    assert scaler.scale(torch.tensor(2.0).half()).dtype == torch.float32
    assert scaler.scale(torch.tensor([2.0]).half()).item() == INF


def test_scale_takes_iterables_as_torch_does_and_autograd_goes_through():
    def script(cls):
        scaler = cls("cpu", init_scale=8.0)
        x = torch.tensor(3.0, requires_grad=True)
        scaled = scaler.scale([x, (x * 2, [torch.ones(2)])])
        scaled[1][0].backward()
        yield [x.grad, scaled[0].detach(), type(scaled[1]).__name__]
        lazy = scaler.scale(t for t in (torch.ones(1), torch.ones(2)))
        yield [type(lazy).__name__, list(lazy)]

    both(script)


@pytest.mark.parametrize("where", ["gradient", "loss scale below 1"])
def test_an_overflow_while_unscaling_is_noticed(where):
    # torch checks the value before it is unscaled, and steps on infinity here.
    grad = torch.tensor([1e38, 1.0])
    params, optimizer = with_grads(grad)
    scaler = started(init_scale=2.0**-10)
    scaler.step(optimizer)
    assert params[0].tolist() == [0.0, 0.0]
    scaler.update()
    assert scaler.get_scale() == 2.0**-11


def test_fp16_gradients():
    def script(cls):
        for fused in (True, False):
            params, optimizer = with_grads(torch.ones(3).half(), fused=fused)
            scaler = started(cls)
            try:
                scaler.step(optimizer)
            except ValueError as error:
                yield str(error)[: len(LONGER[0])]
            yield [params[0].detach(), params[0].grad]

    both(script)


@pytest.mark.parametrize("overflow", [False, True])
def test_complex_gradients(overflow):
    grad = torch.tensor([4 + 8j, 1 - 2j])
    if overflow:
        grad[1] = complex(0.0, INF)
    params, optimizer = with_grads(grad)
    scaler = started(init_scale=2.0)
    scaler.step(optimizer)
    assert scaler.step_was_skipped is overflow
    assert params[0].tolist() == ([0j, 0j] if overflow else [-2 - 4j, -0.5 + 1j])


@pytest.mark.parametrize("fused", [False, True])
def test_user_sums_found_inf_over_ranks(fused):
    """Fused kernels skip at exactly 1; torch hands them the sum."""
    params, optimizer = with_grads(torch.ones(3), fused=fused)
    scaler = started()
    scaler.unscale_(optimizer)
    for found_inf in scaler._found_inf_per_device(optimizer).values():
        found_inf.fill_(2.0)  # as all_reduce(SUM) leaves it where two ranks overflowed
    scaler.step(optimizer)
    assert params[0].tolist() == [0.0, 0.0, 0.0]
    assert scaler.step_was_skipped
    scaler.update()
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize("fused", [False, True])
def test_two_devices_that_both_overflow(fused):
    class TwoDevices(GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            (flag,) = found.values()
            return {torch.device("cpu"): flag, torch.device("cpu", 1): flag.clone()}

    params, optimizer = with_grads(torch.tensor([1.0, NAN]), fused=fused)
    scaler = started(TwoDevices)
    with CountOps() as ops:
        scaler.step(optimizer)
    assert params[0].tolist() == [0.0, 0.0]
    assert ops.syncs == (0 if fused else 1)
    scaler.update()
    assert scaler.get_scale() == 32768.0


def test_found_inf_of_one_optimizer_survives_update():
    """torch adds the other flags into the first in place."""
    scaler = started()
    _, good = with_grads(torch.ones(2))
    _, bad = with_grads(torch.tensor([INF]))
    for optimizer in (good, bad):
        scaler.step(optimizer)
    (flag,) = scaler._found_inf_per_device(good).values()
    scaler.update()
    assert flag.item() == 0.0


# ---- the surface others use --------------------------------------------------------------------------------


def test_it_is_torchs_class():
    assert issubclass(GradScaler, torch.amp.GradScaler)
    assert issubclass(fastamp.cuda.amp.GradScaler, torch.cuda.amp.GradScaler)
    assert issubclass(fastamp.cuda.amp.GradScaler, GradScaler)
    assert fastamp.amp.GradScaler is GradScaler
    assert fastamp.grad_scaler.OptState is OptState


def test_signatures_begin_with_torchs():
    for name, theirs in vars(torch.amp.GradScaler).items():
        if not inspect.isfunction(theirs):
            continue
        mine = list(inspect.signature(getattr(GradScaler, name)).parameters.values())
        expected = list(inspect.signature(theirs).parameters.values())
        assert [(p.name, p.default, p.kind) for p in mine[: len(expected)]] == [
            (p.name, p.default, p.kind) for p in expected
        ], name
        assert all(p.kind is p.KEYWORD_ONLY for p in mine[len(expected) :]), name


def test_argument_order_of_the_legacy_class():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with (
            pytest.warns(UserWarning, match="CUDA is not available")
            if not torch.cuda.is_available()
            else (warnings.catch_warnings())
        ):
            scaler = fastamp.cuda.amp.GradScaler(8.0, 3.0, 0.25, 7)
    assert scaler._device == "cuda"
    if scaler.is_enabled():
        assert [scaler.get_scale(), scaler.get_growth_factor()] == [8.0, 3.0]
        assert [scaler.get_backoff_factor(), scaler.get_growth_interval()] == [0.25, 7]
    mine = inspect.signature(fastamp.cuda.amp.GradScaler).parameters
    theirs = inspect.signature(torch.cuda.amp.GradScaler).parameters
    assert list(mine)[: len(theirs)] == list(theirs)
    assert isinstance(scaler, torch.cuda.amp.GradScaler)


def test_the_legacy_class_passes_its_arguments_on(monkeypatch):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    scaler = fastamp.cuda.amp.GradScaler(8.0, 3.0, 0.25, 7, True, min_scale=2.0)
    assert scaler.is_enabled() and scaler._device == "cuda"
    assert scaler.state_dict() == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
        "min_scale": 2.0,
    }


@pytest.mark.parametrize("ours, theirs", [(fastamp.amp, torch.amp), (fastamp.cuda.amp, torch.cuda.amp)])
def test_mirrors_have_all_that_torch_has(ours, theirs):
    public = [name for name in dir(theirs) if not name.startswith("_")]
    assert set(getattr(theirs, "__all__", ours.__all__)) == set(ours.__all__)
    for name in public:
        if name == "GradScaler":
            assert issubclass(ours.GradScaler, theirs.GradScaler)
        else:
            assert getattr(ours, name) is getattr(theirs, name), name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ours.nonsense


def test_the_warning_without_cuda_points_at_the_caller():
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    with pytest.warns(UserWarning, match="GradScaler is enabled, but CUDA is not available") as caught:
        scaler = GradScaler()
    assert caught[0].filename == __file__
    assert vars(scaler) == {"_device": "cuda", "_enabled": False}


def test_the_device_argument_is_not_looked_at():
    scaler = GradScaler(device=Mock())
    assert scaler.is_enabled()
    assert scaler.scale(torch.tensor(1.0)).item() == 65536.0


def test_per_optimizer_states_is_a_live_defaultdict():
    params, optimizer = with_grads(torch.ones(2))
    scaler = started()
    assert type(scaler._per_optimizer_states) is defaultdict
    assert scaler._per_optimizer_states[7] == {"stage": OptState.READY, "found_inf_per_device": {}}
    # apex marks an optimizer as unscaled; composer puts a dict of its own in place.
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {torch.device("cpu"): torch.ones(1)}
    scaler.step(optimizer)
    assert params[0].tolist() == [0.0, 0.0]
    scaler.update()
    assert scaler.get_scale() == 32768.0
    assert scaler._per_optimizer_states == {}
    scaler._per_optimizer_states = defaultdict(
        torch.amp.grad_scaler._refresh_per_optimizer_state, scaler._per_optimizer_states
    )
    scaler.step(optimizer)
    assert params[0].tolist() != [0.0, 0.0]


@pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
def test_step_honours_found_inf_that_the_user_changed(name):
    for value in (1.0, 0.0):
        params = parameters()
        before = [p.detach().clone() for p in params]
        optimizer = OPTIMIZERS[name](params)
        scaler = started()
        fill_grads(params, 0, 65536.0, None if value else INF)
        scaler.unscale_(optimizer)
        live = scaler._found_inf_per_device(optimizer)
        assert live is scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for found_inf in live.values():
            found_inf.fill_(value)
        scaler.step(optimizer)
        assert torch.equal(before[0], params[0]) is bool(value)


def test_the_scale_is_one_tensor_for_life():
    scaler = GradScaler("cpu", **SETTINGS)
    scaler._lazy_init_scale_growth_tracker("cpu")  # accelerate passes a string
    scale, tracker = scaler._scale, scaler._growth_tracker
    assert (scale.dtype, scale.shape, tracker.dtype, tracker.shape) == (torch.float32, (), torch.int32, ())
    assert scaler._get_scale_async() is scale
    _, optimizer = with_grads(torch.ones(2))
    for step in range(5):
        optimizer.param_groups[0]["params"][0].grad = torch.full((2,), INF if step == 1 else 1.0)
        scaler.step(optimizer)
        scaler.update()
    scaler.update(3.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 5.0})
    assert scaler._scale is scale and scaler._growth_tracker is tracker and scale.item() == 5.0
    assert scaler._check_scale_growth_tracker("anything") == (scale, tracker)


def test_found_inf_tensors_are_never_handed_out_twice():
    scaler = started()
    _, optimizer = with_grads(torch.ones(2))
    kept = []
    for _ in range(200):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        scaler.unscale_(optimizer)
        (flag,) = scaler._found_inf_per_device(optimizer).values()
        assert flag.item() == 0.0 and flag.shape == () and flag.dtype == torch.float32
        scaler.update()
        flag.fill_(7.0)
        kept.append(flag)
    assert len({flag.data_ptr() for flag in kept}) == 200


@pytest.mark.parametrize("shape", [(), (1,)])
def test_unscale_grads_called_from_outside(shape):
    """With the arguments that NeMo, fairscale and ShardedGradScaler use: the result is new tensors."""

    def script(cls):
        params, optimizer = with_grads(torch.tensor([4.0, INF]))
        scaler = started(cls)
        given = torch.zeros(shape)
        found = scaler._unscale_grads_(optimizer, torch.full(shape, 0.5), given, True)
        yield [found, given, params[0].grad]
        found = scaler._unscale_grads_(optimizer, torch.full(shape, 1.0), torch.full(shape, 1.0), allow_fp16=False)
        yield found

    both(script)


class Recorder:
    """Mixed into either scaler class: what a third-party subclass overrides, and how often it is called."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def _unscale_grads_(self, optimizer, *args):
        self.calls.append(["unscale", [a.clone() if isinstance(a, torch.Tensor) else a for a in args]])
        # Megatron and NeMo take float16 gradients.
        return super()._unscale_grads_(optimizer, args[0], args[1], True)

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        self.calls.append(["maybe", sorted(optimizer_state), list(args), kwargs])
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


@pytest.mark.parametrize("name", ["sgd", "adam-fused"])
def test_overridden_hooks_are_called_as_by_torch(name):
    def script(cls):
        params = [p for p in parameters(dtypes=(torch.float32,))]
        optimizer = OPTIMIZERS[name](params)
        scaler = started(type("Sub", (Recorder, cls), {}), **SETTINGS)
        for step in range(4):
            fill_grads(params, step, scaler.get_scale(), INF if step == 1 else None)
            if step == 2:
                scaler.unscale_(optimizer)
            yield scaler.step(optimizer, None)
            scaler.update()
            yield [p.detach().clone() for p in params]
        yield scaler.calls
        assert scaler.calls

    both(script)


def test_a_hook_assigned_to_an_instance_is_called():
    params, optimizer = with_grads(torch.ones(2))
    scaler = started()
    called = []

    def hook(optimizer, inv_scale, found_inf, allow_fp16):
        called.append((inv_scale.item(), found_inf.item(), allow_fp16))
        return {torch.device("cpu"): torch.ones(())}

    scaler._unscale_grads_ = hook
    scaler.step(optimizer)
    assert called == [(1 / 65536, 0.0, False)]
    assert params[0].tolist() == [0.0, 0.0]


def test_a_subclass_that_skips_in_maybe_opt_step_has_the_last_word():
    class Never(GradScaler):
        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            return "skipped"

    params, optimizer = with_grads(torch.ones(2))
    scaler = started(Never)
    assert scaler.step(optimizer) == "skipped"
    assert params[0].tolist() == [0.0, 0.0]


def test_step_is_looked_up_when_it_is_called():
    """accelerate replaces optimizer.step for the length of the call to see whether it was called."""
    for value in (1.0, INF):
        _, optimizer = with_grads(torch.full((2,), value))
        scaler = started()
        calls = []
        optimizer.step = Mock(side_effect=lambda *args, calls=calls: calls.append(args) or "patched")
        assert scaler.step(optimizer, None) == ("patched" if value == 1.0 else None)
        assert calls == ([(None,)] if value == 1.0 else [])


def test_hundreds_of_optimizers():
    """One for each parameter, as where each steps in backward; more flags than a kernel's arguments hold."""
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        params = [torch.nn.Parameter(torch.full((2,), float(i))) for i in range(300)]
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in params]
        scaler = kind("cpu", init_scale=4.0, growth_interval=1)
        for factor in (1.0, INF, 2.0):
            scaler.scale(sum((p * p).sum() for p in params)).backward()
            params[299].grad.mul_(factor)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        results.append((scaler.get_scale(), [p.detach() for p in params]))
    assert results[0][0] == results[1][0] == 8.0
    assert all(same_bits(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("numel", [3, 200_000])
def test_a_parameter_listed_twice(numel):
    """torch warns and divides its gradient twice."""
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        p, q = (torch.nn.Parameter(torch.zeros(numel)) for _ in range(2))
        with pytest.warns(UserWarning, match="duplicate"):
            optimizer = torch.optim.SGD([p, q, p], lr=1.0)
        scaler = kind("cpu", init_scale=3.0)
        scaler.scale(torch.ones(()))
        p.grad, q.grad = torch.full((numel,), 5.0), torch.full((numel,), 7.0)
        scaler.step(optimizer)
        results.append((p.detach(), q.detach()))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_a_grad_property_that_makes_another_wrapper_each_time():
    class Wrapper(torch.Tensor):
        pass

    class Odd(torch.nn.Parameter):
        grad = property(lambda self: self.own.as_subclass(Wrapper))

    odd, plain = Odd(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    odd.own, plain.grad = torch.full((3,), 6.0), torch.full((3,), 9.0)
    optimizer = torch.optim.SGD([plain, odd], lr=1.0)
    scaler = GradScaler("cpu", init_scale=3.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert odd.own.tolist() == [2.0] * 3 and plain.grad.tolist() == [3.0] * 3
    odd.own[1] = INF
    scaler.update()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.step_was_skipped


def test_gradients_of_many_dimensions():
    p = torch.nn.Parameter(torch.zeros([2] * 18))
    p.grad = torch.full([2] * 18, 6.0).transpose(0, 1).transpose(4, 9)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=3.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert (p == -2).all()


def test_closures():
    _, optimizer = with_grads(torch.ones(2))
    scaler = started()
    for closure in (None, lambda: 1.0):
        with pytest.raises(RuntimeError, match=r"^Closure use is not currently supported if GradScaler is enabled\.$"):
            scaler.step(optimizer, closure=closure)
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [1.0, 1.0]
    assert scaler.step(optimizer, lambda: 5.0) == 5.0  # positional: torch lets it through


# ---- the protocol of optimizers that unscale in their own step ---------------------------------------------


class Attributes(torch.optim.SGD):
    """Reads grad_scale and found_inf from its attributes."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        self.seen = (self.grad_scale, self.found_inf)
        return "stepped"


class Keyword(torch.optim.SGD):
    """Takes the scaler, by the deprecated protocol."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        self.seen = grad_scaler
        grad_scaler._check_inf_per_device(self)
        return "stepped"


def protocol_optimizer(cls, value=1.0):
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.full((2,), value)
    return cls([param], lr=1.0)


@pytest.mark.parametrize("preset", [None, 4.0])
@pytest.mark.parametrize("unscaled", [False, True])
def test_grad_scale_and_found_inf_attributes(unscaled, preset):
    def script(cls):
        optimizer = protocol_optimizer(Attributes, INF)
        if preset is not None:
            optimizer.grad_scale = torch.tensor(preset)
        scaler = started(cls)
        if unscaled:
            scaler.unscale_(optimizer)
        yield scaler.step(optimizer)
        yield [*optimizer.seen]
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")

    both(script)


def test_attributes_are_removed_when_the_step_raises():
    class Raises(Attributes):
        def step(self, closure=None):
            raise KeyError("inside")

    optimizer = protocol_optimizer(Raises)
    with pytest.raises(KeyError, match="inside"):
        started().step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_the_grad_scaler_keyword():
    for cls in (torch.amp.GradScaler, GradScaler):
        optimizer = protocol_optimizer(Keyword, INF)
        scaler = started(cls)
        with pytest.warns(FutureWarning, match="going to stop passing itself") as caught:
            assert scaler.step(optimizer) == "stepped"
        assert caught[0].filename == __file__
        assert optimizer.seen is scaler
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    assert scaler.step_was_skipped


def test_a_fused_optimizer_that_was_unscaled_without_gradients():
    """Its gradients are still scaled: stepping would apply them as they are."""
    params, optimizer = with_grads(torch.ones(2), fused=True)
    params[0].grad = None
    scaler = started()
    scaler.unscale_(optimizer)
    params[0].grad = torch.ones(2)
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded for this optimizer\. SGD: 1 of its 1"):
        scaler.step(optimizer)
    assert params[0].tolist() == [0.0, 0.0]


def test_a_fused_optimizer_without_gradients():
    params = [torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(params, lr=1.0, fused=True)
    scaler = started()
    scaler.step(optimizer)
    assert scaler.step_was_skipped is False
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded prior to update\. "):
        scaler.update()


# ---- state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("target", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("lazy", [False, True])
def test_state_moves_both_ways(source, target, lazy):
    scaler = started(source, **SETTINGS)
    _, optimizer = with_grads(torch.ones(2))
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    assert list(state) == ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
    other = target("cpu") if lazy else started(target)
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.scale(torch.ones(()))
    assert other._scale.item() == 1000.0 and other._growth_tracker.item() == 1
    pickled = target.__new__(target)
    pickled.__setstate__(scaler.__getstate__())
    assert pickled.state_dict() == state
    pickled.scale(torch.ones(()))
    pickled.step(with_grads(torch.ones(2))[1])
    pickled.update()


def test_pickle_holds_what_torchs_does():
    states = []
    for cls in (torch.amp.GradScaler, GradScaler):
        scaler = started(cls, **SETTINGS)
        _, optimizer = with_grads(torch.ones(2))
        scaler.step(optimizer)
        scaler.update()
        states.append(scaler.__getstate__())
    assert_same(*states)


def test_a_failed_load_changes_nothing():
    scaler = started(**SETTINGS)
    before = scaler.state_dict()
    for state in ({"scale": 4.0}, {**before, "scale": 4.0, "min_scale": 8.0, "max_scale": 4.0}):
        with pytest.raises((KeyError, ValueError)):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before
    with pytest.raises(RuntimeError, match=r"^The source state dict is empty"):
        scaler.load_state_dict({})


# ---- torch's own path --------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A subclass, as DTensor is one: kernels may not look into it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("value", [2.0, NAN])
def test_tensor_subclasses_take_torchs_path(value):
    plain, wrapped = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    plain.grad, wrapped.grad = torch.ones(2), torch.full((2,), value).as_subclass(Wrapped)
    optimizer = torch.optim.SGD([plain, wrapped], lr=1.0)
    scaler = started(init_scale=2.0)
    Wrapped.seen.clear()
    scaler.unscale_(optimizer)
    assert "_amp_foreach_non_finite_check_and_unscale_" in Wrapped.seen
    (found,) = scaler._found_inf_per_device(optimizer).values()
    assert found.item() == float(value != value)
    assert plain.grad.tolist() == [0.5, 0.5]
    assert value != value or wrapped.grad.tolist() == [1.0, 1.0]


def test_devices_without_kernels_take_torchs_path(monkeypatch):
    """As on MPS or XPU; nothing of fastamp's may run."""
    monkeypatch.setattr("fastamp._gradients.has_kernels", lambda device: False)
    monkeypatch.setattr("fastamp.grad_scaler.has_kernels", lambda device: False)
    monkeypatch.setattr("fastamp._library.host", None)

    def script(cls):
        for name in ("sgd", "adamw-fused"):
            params = parameters()
            optimizer = OPTIMIZERS[name](params)
            scaler = started(cls, **SETTINGS)
            for step in range(6):
                fill_grads(params, step, scaler.get_scale(), INF if step == 2 else None)
                with CountOps() as ops:
                    scaler.step(optimizer)
                    scaler.update()
                assert not [op for op in ops.calls if op.startswith("fastamp")]
                yield snapshot(scaler, params, [optimizer])

    both(script)
    with pytest.raises(RuntimeError, match="min_scale, max_scale and hysteresis need fastamp kernels"):
        started(min_scale=1.0)


def test_dtensor_gradients(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def script(cls):
            for value in (3.0, INF):
                param = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Shard(0)]))
                param.grad = DTensor.from_local(torch.full((4,), value), mesh, [Shard(0)])
                optimizer = torch.optim.SGD([param], lr=1.0)
                scaler = started(cls, init_scale=2.0)
                scaler.step(optimizer)
                scaler.update()
                yield [param.to_local().detach().clone(), param.grad.to_local(), scaler.get_scale()]

        both(script)
    finally:
        dist.destroy_process_group()


# ---- what it costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_kernels_and_syncs_of_a_step(name):
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = started()
    fastamp._scalars._zeros.clear()  # the next fill of the pool, which serves many steps, is the first step's
    for step in range(3):
        fill_grads(params, step, 65536.0)
        with CountOps() as plain:  # what the optimizer itself does
            optimizer.step()
        fill_grads(params, step, 65536.0)
        with CountOps() as ops:
            scaler.step(optimizer)
            scaler.update()
    extra = {op: n - plain.calls.get(op, 0) for op, n in ops.calls.items() if n > plain.calls.get(op, 0)}
    fused = name in FUSED
    # The fused optimizers undo their step count where found_inf is set.
    extra.pop("aten::_foreach_sub_", None)
    expected = {} if fused else {"aten::reciprocal": 1, "aten::_local_scalar_dense": 1}
    if fastamp._library.host is None:  # the host module launches without the dispatcher
        expected |= {"fastamp::check_" if fused else "fastamp::unscale_": 1, "fastamp::update_scale_": 1}
    assert extra == expected


def test_no_sync_in_unscale_clip_update():
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    scaler = started()
    fill_grads(params, 0, 65536.0)
    with CountOps() as ops:
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.update()
    assert ops.syncs == 0


def test_the_fused_check_does_not_write():
    params, optimizer = with_grads(torch.ones(5), fused=True)
    version = params[0].grad._version
    started()._check_inf_per_device(optimizer)
    assert params[0].grad._version == version


def test_unscaling_counts_as_a_write_for_autograd():
    params, optimizer = with_grads(torch.ones(5))
    version = params[0].grad._version
    started().unscale_(optimizer)
    assert params[0].grad._version > version


def test_a_step_inside_torch_compile():
    torch._dynamo.reset()
    params = parameters()[:3]
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = started()

    @torch.compile(backend="eager")
    def step():
        scaler.step(optimizer)
        scaler.update()

    for i in range(3):
        fill_grads(params, i, 65536.0)
        step()
    assert scaler.state_dict()["_growth_tracker"] == 3


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs, error, words",
    [
        ({"growth_factor": 1.0}, AssertionError, "The growth factor must be > 1.0."),
        ({"backoff_factor": 1.0}, AssertionError, "The backoff factor must be < 1.0."),
        ({"growth_factor": NAN}, ValueError, "growth_factor must be a positive number, got nan"),
        ({"backoff_factor": NAN}, ValueError, "backoff_factor must be a positive number, got nan"),
        ({"backoff_factor": -0.5}, ValueError, "backoff_factor must be a positive number, got -0.5"),
        ({"init_scale": NAN}, ValueError, "init_scale must be a positive number, got nan"),
        ({"init_scale": 0.0}, ValueError, "init_scale must be a positive number, got 0.0"),
        ({"init_scale": INF}, ValueError, "init_scale must be a positive number, got inf"),
        ({"growth_interval": -1}, ValueError, "growth_interval must be a number of steps, .* got -1"),
        ({"growth_interval": NAN}, ValueError, "growth_interval must be a number of steps, .* got nan"),
        (
            {"min_scale": 4.0, "max_scale": 2.0},
            ValueError,
            "min_scale must not be above max_scale, got min_scale=4.0",
        ),
        ({"min_scale": NAN}, ValueError, "min_scale must be a positive number, got nan"),
        ({"min_scale": -1.0}, ValueError, "min_scale must be a positive number, got -1.0"),
        ({"max_scale": 0.0}, ValueError, "max_scale must be a positive number, got 0.0"),
        ({"hysteresis": 0}, ValueError, "hysteresis must be a number of overflows, .* got 0"),
        ({"hysteresis": 1.5}, ValueError, "hysteresis must be a number of overflows, .* got 1.5"),
    ],
)
def test_bad_constructor_arguments(kwargs, error, words):
    try:
        torch.amp.GradScaler("cpu", **kwargs)
    except AssertionError as refused:  # torch's own refusals come first; some versions refuse NaN as well
        error, words = AssertionError, re.escape(str(refused))
    except TypeError:
        pass  # arguments that torch does not have
    with pytest.raises(error, match=words):
        GradScaler("cpu", **kwargs)


def test_bad_settings():
    scaler = started()
    before = scaler.state_dict()
    for call in (
        lambda: scaler.set_growth_interval(-1),
        lambda: scaler.set_growth_factor(NAN),
        lambda: scaler.set_backoff_factor(-0.5),
        lambda: scaler.update(NAN),
        lambda: scaler.update(-2.0),
        lambda: scaler.update(0.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "grad, words",
    [
        (
            torch.ones(4, dtype=torch.int64),
            r"must be a (strided )?floating-point or complex tensor, got (torch\.int64|Long)",
        ),
        (torch.ones(1).expand(4), "overlaps itself"),
    ],
    ids=["integer", "expanded"],
)
def test_bad_gradients_fail_before_any_write(grad, words):
    good = torch.nn.Parameter(torch.zeros(2))
    bad = torch.nn.Parameter(torch.zeros(4, dtype=grad.dtype), requires_grad=False)
    good.grad, bad.grad = torch.ones(2), grad
    optimizer = torch.optim.SGD([good, bad], lr=1.0)
    scaler = started()
    with pytest.raises(RuntimeError, match=words):
        scaler.unscale_(optimizer)
    assert good.grad.tolist() == [1.0, 1.0] and grad.tolist() == [1] * 4
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@pytest.mark.parametrize(
    "inv_scale, found_inf",
    [
        (torch.ones((), dtype=torch.float64), torch.zeros(())),
        (torch.ones(2), torch.zeros(())),
        (torch.ones(()), torch.zeros((), dtype=torch.int32)),
        (torch.ones(()), torch.zeros(3)),
    ],
    ids=["inv_scale-float64", "inv_scale-two", "found_inf-int32", "found_inf-three"],
)
def test_bad_scalars_fail_before_any_write(inv_scale, found_inf):
    params, optimizer = with_grads(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"(inv_scale|found_inf) must hold one (torch\.float32|Float) element"):
        started()._unscale_grads_(optimizer, inv_scale * 0.5, found_inf, False)
    assert params[0].grad.tolist() == [1.0, 1.0]


def test_a_parameter_that_is_no_tensor():
    _, optimizer = with_grads(torch.ones(2))
    optimizer.param_groups[0]["params"].append("no tensor")
    with pytest.raises(AssertionError, match=r"^expected param to be torch\.Tensor, got str"):
        started().unscale_(optimizer)


def test_a_zero_made_during_graph_capture_belongs_to_the_graph(monkeypatch):
    """A fill taken from the pool would run once, at capture, and not at replay."""
    from fastamp import _scalars

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _scalars._pool_key(torch.device("cuda", 0)) is None
    monkeypatch.setattr(_scalars, "_pool_key", lambda device: None)
    monkeypatch.setattr(_scalars, "_zeros", {})
    first, second = _scalars.zero(torch.device("cpu")), _scalars.zero(torch.device("cpu"))
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr() and not _scalars._zeros
