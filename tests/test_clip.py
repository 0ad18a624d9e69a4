"""fastamp.clip_grad_norm_ and GradScaler.clip_grad_norm_ against torch.nn.utils.clip_grad_norm_."""

import inspect
import mmap
import warnings

import pytest
import torch
from scaler_parity import DEVICES, FUSED, OPTIMIZERS, CountOps, fill_grads, parameters, same_bits
from torch.amp.grad_scaler import OptState

import fastamp
from fastamp import GradScaler, _library, clip_grad_norm_

INF, NAN = float("inf"), float("nan")


def grads_of(params):
    return [p.grad.clone() for p in params]


def float64_norm(params, norm_type=2.0):
    values = torch.cat([p.grad.detach().double().reshape(-1) for p in params if p.grad is not None])
    return torch.linalg.vector_norm(values, norm_type).item()


def filled(device="cpu", dtypes=(torch.float32,), scale=1.0, poison=None, empty=True):
    """With ``empty=False`` for infinite norms, which torch refuses to take of an empty tensor."""
    params = [p for p in parameters(device, dtypes) if p.numel() or empty]
    fill_grads(params, 0, scale, poison)
    return params


def with_grads(*grads, **kwargs):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return params, torch.optim.SGD(params, lr=1.0, **kwargs)


def started(device="cpu", **kwargs):
    scaler = GradScaler(device, **kwargs)
    scaler.scale(torch.ones((), device=device))
    return scaler


# ---- the function ------------------------------------------------------------------------------------------


def test_the_signature_is_torchs():
    assert (
        inspect.signature(clip_grad_norm_).parameters.keys()
        == inspect.signature(torch.nn.utils.clip_grad_norm_).parameters.keys()
    )
    mine, theirs = map(inspect.signature, (clip_grad_norm_, torch.nn.utils.clip_grad_norm_))
    for name, parameter in mine.parameters.items():
        assert (parameter.default, parameter.kind) == (
            theirs.parameters[name].default,
            theirs.parameters[name].kind,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [2.0, INF, 1.0, 3.0, 0.0, -INF], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e6, INF, 0.0])
def test_norm_and_gradients_are_torchs(max_norm, norm_type, device):
    mine, theirs = (filled(device, empty=abs(norm_type) != INF) for _ in range(2))
    got = clip_grad_norm_(mine, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert (got.dtype, got.shape, got.device) == (expected.dtype, expected.shape, expected.device)
    if norm_type != 2.0:
        assert same_bits(got, expected)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        if norm_type == 2.0:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)
        else:
            assert same_bits(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_norm_of_each_dtype_against_float64(dtype):
    params = filled(dtypes=(dtype,))
    expected = float64_norm(params)
    before = grads_of(params)
    total = clip_grad_norm_(params, 0.5)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert total.item() == pytest.approx(expected, rel=1e-13 if dtype == torch.float64 else 1e-6)
    coefficient = torch.clamp(0.5 / (total + 1e-6), max=1.0)
    for p, old in zip(params, before, strict=True):
        assert same_bits(p.grad, (old.to(total.dtype) * coefficient).to(dtype))
    assert float64_norm(params) == pytest.approx(0.5, rel=1e-2)


def test_mixed_dtypes():
    params = filled(dtypes=(torch.float32, torch.bfloat16, torch.float64))
    expected = float64_norm(params)
    total = clip_grad_norm_(params, 0.5)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(expected, rel=1e-6)
    assert float64_norm(params) == pytest.approx(0.5, rel=1e-3)


def test_a_norm_that_overflows_half_precision():
    # torch keeps the norms of half gradients in half precision: infinite here, so it zeroes the gradients.
    (param,), _ = with_grads(torch.full((10000,), 60000.0).half())
    assert clip_grad_norm_([param], 1.0).item() == pytest.approx(6e6, rel=1e-6)
    assert param.grad[0].item() == pytest.approx(0.01, rel=1e-3)


def test_an_inactive_clip_does_not_write():
    # A write would kill the process here.
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the buffer is not writable
        param = torch.nn.Parameter(torch.zeros(1024))
        param.grad = torch.frombuffer(memory, dtype=torch.float32)
    assert clip_grad_norm_([param], 1.0).item() == 0.0
    scaler = started(init_scale=1.0)
    assert scaler.clip_grad_norm_(torch.optim.SGD([param], lr=1.0), 1.0).item() == 0.0


def test_nonfinite_norms_do_what_torch_does():
    for poison in (INF, NAN):
        mine, theirs = filled(poison=poison), filled(poison=poison)
        got, expected = clip_grad_norm_(mine, 1.0), torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        assert same_bits(got, expected)
        for a, b in zip(mine, theirs, strict=True):
            assert same_bits(a.grad, b.grad)


@pytest.mark.parametrize("norm_type", [2.0, 3.0])
@pytest.mark.parametrize("poison", [INF, NAN])
def test_error_if_nonfinite_comes_before_any_write(poison, norm_type):
    params = filled(poison=poison)
    before = grads_of(params)
    errors = []
    for function in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        with pytest.raises(RuntimeError) as error:
            function(params, 1.0, norm_type, error_if_nonfinite=True)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert all(same_bits(p.grad, old) for p, old in zip(params, before, strict=True))


def test_what_may_be_given_as_parameters():
    for give in (
        lambda p: p,
        lambda p: iter(p),
        lambda p: (x for x in p),
        tuple,
        lambda p: dict(enumerate(p)).values(),
    ):
        params = filled()
        expected = float64_norm(params)
        assert clip_grad_norm_(give(params), 1e9).item() == pytest.approx(expected, rel=1e-6)
    single = filled()[4]
    assert clip_grad_norm_(single, 1e9).item() == pytest.approx(single.grad.norm().item(), rel=1e-6)
    # Parameters without gradients are passed over; without any the norm is 0.
    params = filled()
    params[3].grad = None
    assert clip_grad_norm_(params, 1e9).item() == pytest.approx(float64_norm(params), rel=1e-6)
    for nothing in ([], [torch.nn.Parameter(torch.ones(2))]):
        assert same_bits(clip_grad_norm_(nothing, 1.0), torch.nn.utils.clip_grad_norm_(nothing, 1.0))
    with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
        assert clip_grad_norm_((p for p in ()), 1.0).item() == 0.0
    assert caught[0].filename == __file__


def test_autograd_is_not_involved():
    params = filled()
    params[0].grad = params[0].detach().clone().requires_grad_() * 2.0
    total = clip_grad_norm_(params, 0.5)
    assert not total.requires_grad


@pytest.mark.parametrize("foreach", [None, True, False])
def test_subclasses_take_torchs_function(foreach):
    class Wrapped(torch.Tensor):
        pass

    mine, theirs = filled(), filled()
    for params in (mine, theirs):
        params[0].grad = params[0].grad.as_subclass(Wrapped)
    got = clip_grad_norm_(mine, 0.5, foreach=foreach)
    assert same_bits(got, torch.nn.utils.clip_grad_norm_(theirs, 0.5, foreach=foreach))
    for a, b in zip(mine, theirs, strict=True):
        assert same_bits(a.grad, b.grad)


def test_complex_gradients():
    (param,), _ = with_grads(torch.tensor([3 + 4j, 0j]))
    assert clip_grad_norm_([param], 1.0).item() == pytest.approx(5.0)
    assert param.grad[0].item() == pytest.approx(0.6 + 0.8j, rel=1e-5)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((NAN,), "max_norm must be a number of at least 0, got nan"),
        ((-1.0,), "max_norm must be a number of at least 0, got -1.0"),
        ((1.0, NAN), "norm_type must be a number or inf, got nan"),
    ],
)
def test_bad_arguments_fail_before_any_write(arguments, words):
    params = filled()
    before = grads_of(params)
    optimizer = torch.optim.SGD(params, lr=1.0)
    with pytest.raises(ValueError, match=words):
        clip_grad_norm_(params, *arguments)
    for enabled in (True, False):
        with pytest.raises(ValueError, match=words):
            started(enabled=enabled).clip_grad_norm_(optimizer, *arguments)
    assert all(same_bits(p.grad, old) for p, old in zip(params, before, strict=True))


# ---- the scaler's method -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unscaled", [False, True], ids=["unscales", "unscaled-before"])
@pytest.mark.parametrize("norm_type", [2.0, INF, 3.0], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["active", "inactive"])
def test_it_is_torchs_three_calls(max_norm, norm_type, unscaled, device):
    """unscale_ and step bit for bit; the L2 norm, and so an active clip, to rounding."""
    results = []
    for cls in (torch.amp.GradScaler, GradScaler):
        params = filled(device, scale=1000.0, empty=norm_type != INF)
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = cls(device, init_scale=1000.0)
        scaler.scale(torch.ones((), device=device))
        if cls is GradScaler:
            if unscaled:
                scaler.unscale_(optimizer)
            total = scaler.clip_grad_norm_(optimizer, max_norm, norm_type)
        else:
            scaler.unscale_(optimizer)
            total = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        scaler.step(optimizer)
        scaler.update()
        results.append((total, params, grads_of(params), scaler.state_dict()))
    (total, params, grads, state), (total_, params_, grads_, state_) = results
    torch.testing.assert_close(total_, total, rtol=1e-6, atol=0)
    assert state == state_
    exact = max_norm == 1e9 or norm_type != 2.0
    for a, b in zip(params + grads, params_ + grads_, strict=True):
        assert same_bits(a, b) if exact else torch.allclose(a, b, rtol=1e-6, atol=0)


def test_given_parameters():
    params = filled(scale=1000.0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = started(init_scale=1000.0)
    with pytest.raises(
        RuntimeError, match="clip_grad_norm_: parameters were given, but no optimizer has been unscaled"
    ):
        scaler.clip_grad_norm_(params, 1.0)
    scaler.unscale_(optimizer)
    expected = float64_norm(params[:5])
    untouched = grads_of(params[5:])
    for give in (params[:5], iter(params[:5])):
        assert scaler.clip_grad_norm_(give, 1e9).item() == pytest.approx(expected, rel=1e-6)
    assert scaler.clip_grad_norm_(params[4], 1e9).item() == pytest.approx(params[4].grad.norm().item(), rel=1e-6)
    assert scaler.clip_grad_norm_(params[:5], 0.5).item() == pytest.approx(expected, rel=1e-6)
    assert float64_norm(params[:5]) == pytest.approx(0.5, rel=1e-5)
    assert all(same_bits(p.grad, old) for p, old in zip(params[5:], untouched, strict=True))


def test_disabled():
    for give in (lambda params, optimizer: optimizer, lambda params, optimizer: params):
        params = filled()
        optimizer = torch.optim.SGD([{"params": params[:5]}, {"params": params[5:]}], lr=1.0)
        expected = float64_norm(params)
        scaler = GradScaler("cpu", enabled=False)
        assert scaler.clip_grad_norm_(give(params, optimizer), 0.5).item() == pytest.approx(expected, rel=1e-6)
        assert float64_norm(params) == pytest.approx(0.5, rel=1e-5)


def test_an_overflow_is_noticed_and_left_unclipped():
    for unscaled in (False, True):
        params = filled(scale=1000.0, poison=INF)
        optimizer = torch.optim.SGD(params, lr=1.0)
        before = [p.detach().clone() for p in params]
        reference = filled(scale=1000.0, poison=INF)
        theirs = torch.amp.GradScaler("cpu", init_scale=1000.0)
        theirs.scale(torch.ones(()))
        theirs.unscale_(torch.optim.SGD(reference, lr=1.0))
        scaler = started(init_scale=1000.0)
        if unscaled:
            scaler.unscale_(optimizer)
        assert scaler.clip_grad_norm_(optimizer, 0.5).item() == INF
        assert all(same_bits(a.grad, b.grad) for a, b in zip(params, reference, strict=True))
        scaler.step(optimizer)
        assert scaler.step_was_skipped
        assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
        scaler.update()
        assert scaler.get_scale() == 500.0


@pytest.mark.parametrize("jointly", [False, True])
@pytest.mark.parametrize("poison", [INF, NAN])
def test_another_optimizers_overflow_is_not_these_parameters(poison, jointly):
    """Two optimizers, as of a GAN: the one that steps takes the step that torch's calls make it take."""
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        (g,), of_g = with_grads(torch.tensor([poison, 1.0]))
        (d,), of_d = with_grads(torch.tensor([600.0, 800.0]))
        scaler = kind("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(of_g)
        scaler.unscale_(of_d)
        clip = scaler.clip_grad_norm_ if kind is GradScaler else torch.nn.utils.clip_grad_norm_
        for params in [[g, d]] if jointly else [[g], [d]]:
            clip(params, 1.0)
        scaler.step(of_g)
        scaler.step(of_d)
        scaler.update()
        results.append((g.detach(), d.detach(), scaler.get_scale()))
    mine, theirs = results
    assert mine[2] == theirs[2] and torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=0, equal_nan=True)


def test_parameters_that_are_not_the_overflown_optimizers():
    (g,), of_g = with_grads(torch.tensor([INF, 1.0]))
    (d,), _ = with_grads(torch.tensor([600.0, 800.0]))
    scaler = started()
    scaler.unscale_(of_g)
    scaler.clip_grad_norm_([d], 1.0)
    torch.testing.assert_close(d.grad, torch.tensor([0.6, 0.8]))
    scaler.clip_grad_norm_([g], 1.0)
    assert g.grad[0] == INF


def test_gradients_made_nonfinite_after_unscale_clip_as_in_torch():
    """found_inf is not looked for again: the step is taken, with what torch's clip makes of the gradients."""
    mine, theirs = filled(), filled()
    optimizer = torch.optim.SGD(mine, lr=1.0)
    scaler = started(init_scale=1.0)
    scaler.unscale_(optimizer)
    for params in (mine, theirs):
        params[4].grad[0, 0] = NAN
    scaler.clip_grad_norm_(optimizer, 0.5)
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    assert all(same_bits(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))
    scaler.step(optimizer)
    assert not scaler.step_was_skipped and mine[0].isnan().all()


def test_error_if_nonfinite():
    params = filled(poison=NAN)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = started()
    with pytest.raises(
        RuntimeError, match=r"^The total norm of order 2\.0 for gradients from `parameters` is non-finite"
    ):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)  # as after unscale_ and a failed clip in torch
    assert scaler.step_was_skipped


def test_order_of_calls():
    params = filled()
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cpu")
    with pytest.raises(AssertionError, match=r"^Attempted clip_grad_norm_ but _scale is None\."):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.scale(torch.ones(()))
    scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) has already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"^clip_grad_norm_\(\) is being called after step\(\)\.$"):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_without_gradients():
    _, optimizer = with_grads(torch.ones(2))
    optimizer.zero_grad()
    scaler = started()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded for this optimizer\."):
        scaler.step(optimizer)


@pytest.mark.parametrize("method", ["unscale_", "_unscale_grads_"])
def test_a_subclass_that_overrides_unscaling_is_called(method):
    calls = []

    def override(self, *args):
        calls.append(method)
        return getattr(GradScaler, method)(self, *args)

    params = filled(scale=4.0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = type("Sub", (GradScaler,), {method: override})("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    expected = float64_norm(params) / 4
    assert scaler.clip_grad_norm_(optimizer, 0.5).item() == pytest.approx(expected, rel=1e-6)
    assert calls == [method]
    assert float64_norm(params) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("kind", ["subclass", "sparse"])
def test_gradients_that_take_torchs_path(kind):
    class Wrapped(torch.Tensor):
        pass

    def as_odd(values):
        return values.as_subclass(Wrapped) if kind == "subclass" else values.to_sparse()

    params, optimizer = with_grads(torch.full((3,), 4.0), as_odd(torch.full((2,), 8.0)))
    scaler = started(init_scale=4.0)
    unscaled, _ = with_grads(torch.full((3,), 1.0), as_odd(torch.full((2,), 2.0)))
    try:
        expected = torch.nn.utils.clip_grad_norm_(unscaled, 1.0)
    except NotImplementedError:  # some versions of torch have no norm for sparse gradients
        with pytest.raises(NotImplementedError):
            scaler.clip_grad_norm_(optimizer, 1.0)
        return
    assert same_bits(scaler.clip_grad_norm_(optimizer, 1.0), expected)
    assert expected.item() == pytest.approx(11**0.5)
    for ours, theirs in zip(params, unscaled, strict=True):
        assert ours.grad.layout == theirs.grad.layout
        assert same_bits(ours.grad.to_dense(), theirs.grad.to_dense())


# ---- the clip folded into a fused step ---------------------------------------------------------------------


def exactly_clipped(grads, scale, max_norm):
    """What the gradients should be at the end, in float64."""
    exact = [g.double() / scale for g in grads]
    norm = sum(g.square().sum() for g in exact).sqrt()
    return [g * min(1.0, max_norm / (norm.item() + 1e-6)) for g in exact], norm.item()


@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["active", "inactive"])
@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_fold_reads_gradients_once_and_rounds_as_documented(name, unscaled, max_norm):
    params = filled(scale=1000.0)
    expected, norm = exactly_clipped([p.grad for p in params], 1000.0, max_norm)
    optimizer = OPTIMIZERS[name](params)
    scaler = started(init_scale=1000.0)
    if unscaled:
        scaler.unscale_(optimizer)
    before = grads_of(params)
    assert scaler.clip_grad_norm_(optimizer, max_norm, fold=True).item() == pytest.approx(norm, rel=1e-6)
    assert all(same_bits(p.grad, old) for p, old in zip(params, before, strict=True))
    scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not scaler.step_was_skipped
    # The fused kernels leave the divided gradients behind.
    for p, want in zip(params, expected, strict=True):
        # 2**-23 of the division, 1e-6 of the norm.
        torch.testing.assert_close(p.grad.double(), want, rtol=2e-6, atol=0)
    scaler.update()
    # The next iteration is an ordinary one again.
    fill_grads(params, 1, 1000.0)
    plain = [p.grad.double() / 1000.0 for p in params]
    scaler.step(optimizer)
    for p, want in zip(params, plain, strict=True):
        torch.testing.assert_close(p.grad.double(), want, rtol=1e-6, atol=0)


def test_an_inactive_fold_is_the_unfolded_step_bit_for_bit():
    results = []
    for fold in (False, True):
        params = filled(scale=1000.0)
        optimizer = OPTIMIZERS["adamw-fused"](params)
        scaler = started(init_scale=1000.0)
        if fold:
            scaler.clip_grad_norm_(optimizer, 1e9, fold=True)
        scaler.step(optimizer)
        results.append(params)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_fold_multiplies_into_a_grad_scale_of_the_user():
    params, optimizer = with_grads(torch.tensor([30.0, 40.0]), fused=True)
    optimizer.grad_scale = torch.tensor(4.0)
    scaler = started(init_scale=10.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0, fold=True).item() == pytest.approx(5.0)
    scaler.step(optimizer)
    torch.testing.assert_close(params[0].detach(), torch.tensor([-0.6, -0.8]) / 4)


@pytest.mark.parametrize("poison", [INF, NAN])
def test_fold_and_overflow(poison):
    params = filled(scale=1000.0, poison=poison)
    before = [p.detach().clone() for p in params]
    optimizer = OPTIMIZERS["adamw-fused"](params)
    scaler = started(init_scale=1000.0)
    scaler.clip_grad_norm_(optimizer, 0.5, fold=True)
    scaler.step(optimizer)
    assert scaler.step_was_skipped
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    assert [e.name for e in scaler.overflow_report((str(i), p) for i, p in enumerate(params))] == ["4"]


def test_a_folded_clip_outlives_a_step_that_raised():
    """What a user's preset was is there again as well: for another try, and where none comes."""
    results = []
    for tries in (1, 2):
        params, optimizer = with_grads(torch.tensor([30.0, 40.0]), fused=True)
        optimizer.grad_scale = preset = torch.tensor(4.0)
        scaler = started(init_scale=10.0)
        scaler.clip_grad_norm_(optimizer, 1.0, fold=True)
        if tries == 2:
            optimizer.step = lambda: 1 / 0
            with pytest.raises(ZeroDivisionError):
                scaler.step(optimizer)
            del optimizer.step
        scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        results.append(params[0].detach())
    assert torch.equal(*results)

    params, optimizer = with_grads(torch.tensor([30.0, 40.0]), fused=True)
    optimizer.grad_scale = preset
    scaler = started(init_scale=10.0)
    scaler.clip_grad_norm_(optimizer, 1.0, fold=True)
    optimizer.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    scaler.update()
    assert optimizer.grad_scale is preset


def test_a_fold_of_too_large_a_scale_backs_it_off():
    """Squares of the scaled gradients overflow, so their norm is not known."""
    params, optimizer = with_grads(torch.full((4,), 1e-3) * 2.0**100, fused=True)
    scaler = started(init_scale=2.0**100)
    assert scaler.clip_grad_norm_(optimizer, 1.0, fold=True).item() == INF
    scaler.step(optimizer)
    assert scaler.step_was_skipped and torch.equal(params[0], torch.zeros(4))
    scaler.update()
    assert scaler.get_scale() == 2.0**99


def test_parameters_of_one_optimizer_while_anothers_is_folded():
    (p,), folded = with_grads(torch.tensor([30.0, 40.0]), fused=True)
    (q,), other = with_grads(torch.tensor([60.0, 80.0]))
    scaler = started(init_scale=10.0)
    scaler.clip_grad_norm_(folded, 1.0, fold=True)
    scaler.unscale_(other)
    with pytest.raises(RuntimeError, match="fold=True is waiting"):
        scaler.clip_grad_norm_([p], 1.0)
    assert scaler.clip_grad_norm_([q], 1.0).item() == pytest.approx(10.0)
    torch.testing.assert_close(q.grad, torch.tensor([0.6, 0.8]))


def test_a_fold_whose_step_never_came_is_dropped():
    params, optimizer = with_grads(torch.tensor([30.0, 40.0]), fused=True)
    scaler = started(init_scale=10.0)
    scaler.clip_grad_norm_(optimizer, 1.0, fold=True)
    scaler.update()
    assert not hasattr(optimizer, "grad_scale")
    scaler.step(optimizer)
    assert params[0].tolist() == [-3.0, -4.0]


def test_a_failed_fold_leaves_the_optimizer_ready():
    """Or step() would take scaled gradients for unscaled ones."""
    params, optimizer = with_grads(torch.tensor([30.0, 40.0]), fused=True)
    scaler = started(init_scale=10.0)
    params[0].grad[0] = INF
    with pytest.raises(RuntimeError, match="non-finite"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True, fold=True)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    params[0].grad[0] = 30.0
    scaler.step(optimizer)
    assert params[0].tolist() == [-3.0, -4.0]


def test_one_fold_for_each_step():
    params, optimizer = with_grads(torch.tensor([30.0, 40.0]), fused=True)
    scaler = started(init_scale=10.0)
    scaler.clip_grad_norm_(optimizer, 1.0, fold=True)
    for target in (optimizer, params):
        with pytest.raises(RuntimeError, match="a clip with fold=True is waiting for the optimizer's step"):
            scaler.clip_grad_norm_(target, 1.0)


@pytest.mark.parametrize("name, norm_type", [("sgd", 2.0), ("adamw-fused", INF)])
def test_fold_where_it_cannot_be_is_an_ordinary_clip(name, norm_type):
    results = []
    for fold in (False, True):
        params = filled(scale=1000.0, empty=False)
        optimizer = OPTIMIZERS[name](params)
        scaler = started(init_scale=1000.0)
        scaler.clip_grad_norm_(optimizer, 0.5, norm_type, fold=fold)
        assert not hasattr(optimizer, "grad_scale")
        scaler.step(optimizer)
        results.append(params)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_fold_takes_fp16_gradients_as_fused_steps_do():
    params, optimizer = with_grads(torch.tensor([30.0, 40.0]).half(), fused=True)
    scaler = started(init_scale=10.0)
    scaler.clip_grad_norm_(optimizer, 1.0, fold=True)
    scaler.step(optimizer)
    torch.testing.assert_close(params[0].detach().float(), torch.tensor([-0.6, -0.8]), rtol=1e-3, atol=0)


def test_fold_does_not_sync():
    params = filled(scale=1000.0)
    optimizer = OPTIMIZERS["adamw-fused"](params)
    scaler = started(init_scale=1000.0)
    with CountOps() as ops:
        scaler.clip_grad_norm_(optimizer, 0.5, fold=True)
        scaler.step(optimizer)
        scaler.update()
    assert ops.syncs == 0


# ---- what it costs -----------------------------------------------------------------------------------------


def test_kernels_of_a_clip():
    params = filled()
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = started()
    fastamp._scalars.zero(torch.device("cpu"))  # fills the pool
    with CountOps() as ops:
        scaler.clip_grad_norm_(optimizer, 1.0)
    passes = {"fastamp::unscale_norm_": 1, "fastamp::clip_coefficient": 1, "fastamp::clip_": 1}
    if _library.host is not None:
        passes = {"aten::empty": ops.calls["aten::empty"]}  # the norms and their workspace, of no kernel
    calls = {name: n for name, n in ops.calls.items() if name != "aten::zeros"}
    assert calls == {
        **passes,
        "aten::reciprocal": 1,
        "aten::ne": 1,
        "aten::masked_fill": 1,
    }
