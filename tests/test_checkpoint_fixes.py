"""Where torch's checkpoint computes something wrong without a word, and fastamp's does not.

Each case also runs torch. Where torch has come to do it right, its half is skipped with that as the reason.
"""

import copy
import random
import threading
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from fastamp import checkpointing
from fastamp.checkpointing import checkpoint

VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def torchs(function, *args, **kwargs):
    kwargs.setdefault("use_reentrant", False)
    return torch_checkpoint.checkpoint(function, *args, **kwargs)


def torch_is_right_now(case):
    pytest.skip(f"this torch gets it right: {case}")


# --- in-place writes between forward and backward

WAYS_TO_PASS = {
    "kwarg": (lambda fn, x, w: fn(lambda x, w: x * w * w, x, w=w), "kwargs['w']"),
    "list": (lambda fn, x, w: fn(lambda x, ws: x * ws[0] * ws[0], x, [w]), "args[1][0]"),
    "dict in tuple": (
        lambda fn, x, w: fn(lambda x, ws: x * ws[1]["w"].sin(), x, (1, {"w": w})),
        "args[1][1]['w']",
    ),
    "list in kwarg": (
        lambda fn, x, w: fn(lambda x, ws: x * ws[1] * ws[1], x, ws=[None, w]),
        "kwargs['ws'][1]",
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_in_place_write_to_an_argument_raises(way):
    call, name = WAYS_TO_PASS[way]
    x, w = torch.randn(5, requires_grad=True), torch.randn(5)
    (right,) = torch.autograd.grad(call(lambda f, *a, **k: f(*a, **k), x, w).sum(), x)

    out = call(checkpoint, x, w)
    w.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        out.sum().backward()
    assert name in str(caught.value) and x.grad is None

    w.sub_(1.0)
    out = call(torchs, x, w)
    w.add_(1.0)
    try:
        (wrong,) = torch.autograd.grad(out.sum(), x)
    except RuntimeError:
        torch_is_right_now(way)
    assert not torch.allclose(wrong, right)


def test_in_place_write_to_a_positional_argument_names_it():
    x, w = torch.randn(5, requires_grad=True), torch.randn(5)
    out = checkpoint(lambda x, w: x * w, x, w)
    w.zero_()
    with pytest.raises(RuntimeError, match=r"args\[1\] has been modified by an inplace operation"):
        out.sum().backward()


def test_reentrant_in_place_write_to_a_nested_tensor_raises():
    x, w = torch.randn(5, requires_grad=True), torch.randn(5)
    out = checkpoint(lambda x, ws: x * ws["w"], x, {"w": w}, use_reentrant=True)
    out.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, w)
    w.add_(1.0)
    with pytest.raises(RuntimeError, match=r"args\[1\]\['w'\] has been modified by an inplace operation"):
        out.sum().backward()


def overwrites_what_it_saved(x):
    y = x.exp()
    y.mul_(2)  # exp's backward needs y as it was
    return y.sin()


def test_in_place_write_inside_the_function_raises_as_without_a_checkpoint():
    x = torch.randn(5, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwrites_what_it_saved(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpoint(overwrites_what_it_saved, x).sum().backward()
    try:
        (wrong,) = torch.autograd.grad(torchs(overwrites_what_it_saved, x).sum(), x)
    except RuntimeError:
        torch_is_right_now("an in-place write inside the function")
    (right,) = torch.autograd.grad((x.exp() * 2).sin().sum(), x)
    assert not torch.allclose(wrong, right)


def test_an_overwritten_tensor_that_nobody_needs_does_no_harm():
    def function(x):
        y = x.exp()
        z = x.sin()
        y.mul_(2)
        return y, z.square()

    x = torch.randn(5, requires_grad=True)
    overwritten, out = checkpoint(function, x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    del overwritten  # until here its graph wants the overwritten tensor
    assert torch.equal(grad, torch.autograd.grad(x.sin().square().sum(), x)[0])


# --- saved-tensor hooks


class Hooks(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        self.seen = []
        super().__init__(self._pack, lambda box: box[0])

    def _pack(self, tensor):
        self.seen.append(tensor.data_ptr())
        return [tensor]


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_hooks_see_every_tensor(way):
    call, _ = WAYS_TO_PASS[way]
    x, w = torch.randn(5, requires_grad=True), torch.randn(5)
    hooks = Hooks()
    with hooks:
        out = call(checkpoint, x, w)
    assert set(hooks.seen) == {x.data_ptr(), w.data_ptr()}
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(call(lambda f, *a, **k: f(*a, **k), x, w).sum(), x)[0])

    hooks = Hooks()
    with hooks:
        call(torchs, x, w)
    if w.data_ptr() in hooks.seen:
        torch_is_right_now(way)


# --- buffers


def statistics(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_equal_buffers(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def normalised(kind, momentum=0.1):
    norm = {
        "BatchNorm1d": lambda: nn.BatchNorm1d(6, momentum=momentum),
        "BatchNorm2d": lambda: nn.BatchNorm2d(3, momentum=momentum),
        "InstanceNorm1d": lambda: nn.InstanceNorm1d(6, momentum=momentum, track_running_stats=True, affine=True),
    }[kind]()
    if kind == "BatchNorm2d":
        return nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.ReLU(), nn.Conv2d(3, 2, 1)), torch.randn(4, 2, 6, 6)
    if kind == "BatchNorm1d":
        return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 2)), torch.randn(8, 4)
    return nn.Sequential(norm, nn.Tanh()), torch.randn(4, 6, 9)


def step(module, x, run):
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = run(module, x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@VARIANTS
@pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative"])
@pytest.mark.parametrize("kind", ["BatchNorm1d", "BatchNorm2d", "InstanceNorm1d"])
def test_statistics_are_updated_once(kind, momentum, use_reentrant):
    if kind == "InstanceNorm1d" and momentum is None:
        momentum = 0.5
    plain, x = normalised(kind, momentum)
    ours, torch_model = copy.deepcopy(plain), copy.deepcopy(plain)
    for _ in range(3):
        a = step(plain, x, lambda module, x: module(x))
        b = step(ours, x, lambda module, x: checkpoint(module, x, use_reentrant=use_reentrant))
        assert all(map(torch.equal, a, b))
        step(torch_model, x, lambda module, x: torchs(module, x, use_reentrant=use_reentrant))
        x = torch.randn_like(x)
    assert_equal_buffers(statistics(ours), statistics(plain))
    assert type(ours[0]._buffers) is dict and type(ours[1]._buffers) is dict
    twice = statistics(torch_model)
    if all(torch.equal(twice[name], value) for name, value in statistics(plain).items()):
        torch_is_right_now(kind)


HOLDERS = {
    "module": lambda model: model,
    "bound method": lambda model: model.forward,
    "call method": lambda model: model.__call__,
    "closure": lambda model: lambda x: model(x),
    "closure in closure": lambda model: (lambda inner: lambda x: inner(x))(lambda x: model(x)),
    "list in closure": lambda model: (lambda layers: lambda x: layers[1](layers[0](x)))([model[:2], model[2:]]),
    "default argument": lambda model: lambda x, m=model: m(x),
    "partial": lambda model: __import__("functools").partial(lambda m, x: m(x), model),
    "object's attribute": lambda model: Trainer(model).run,
    "callable object": lambda model: Trainer(model),
    "global": lambda model: uses_a_global,
}


class Trainer:
    def __init__(self, net):
        self.net = net

    def run(self, x):
        return self.net(x)

    def __call__(self, x):
        return self.net(x)


def uses_a_global(x):
    return GLOBAL_MODEL(x)


@VARIANTS
@pytest.mark.parametrize("holder", HOLDERS)
def test_modules_are_found_wherever_a_function_holds_them(holder, use_reentrant):
    global GLOBAL_MODEL
    plain, x = normalised("BatchNorm1d")
    model = GLOBAL_MODEL = copy.deepcopy(plain)
    step(plain, x, lambda module, x: module(x))
    function = HOLDERS[holder](model)
    step(model, x, lambda module, x: checkpoint(function, x, use_reentrant=use_reentrant))
    assert_equal_buffers(statistics(model), statistics(plain))


def test_a_module_passed_as_an_argument_is_found():
    plain, x = normalised("BatchNorm1d")
    model = copy.deepcopy(plain)
    step(plain, x, lambda module, x: module(x))
    step(model, x, lambda module, x: checkpoint(lambda x, modules: modules["m"](x), x, modules={"m": module}))
    assert_equal_buffers(statistics(model), statistics(plain))


class ReadsWhatItWrites(nn.Module):
    """Normalises by a running maximum that it updates first: recomputing from the updated one gives other
    values.
    how: "in place", "rebinding" (assigns a new tensor) or "data" (behind the version counter's back)."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("top", torch.ones(()))
        self.register_buffer("untouched", torch.ones(3))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if self.training:
            top = 0.5 * self.top + x.detach().abs().max()
            if self.how == "in place":
                self.top.copy_(top)
            elif self.how == "rebinding":
                self.top = top
            else:
                self.top.data.copy_(top)
        return (self.linear(x) * self.top.clone()).sin()


@VARIANTS
@pytest.mark.parametrize("how", ["in place", "rebinding", "data"])
def test_buffers_are_recomputed_from_what_they_held(how, use_reentrant):
    plain = ReadsWhatItWrites(how)
    ours, torch_model = copy.deepcopy(plain), copy.deepcopy(plain)
    right, wrong = [], []
    for _ in range(3):
        x = torch.randn(5, 4)
        right += step(plain, x, lambda module, x: module(x))
        wrong += step(torch_model, x, lambda module, x: torchs(module, x, use_reentrant=use_reentrant))
        here = step(ours, x, lambda module, x: checkpoint(module, x, use_reentrant=use_reentrant))
        assert all(map(torch.equal, right[-len(here) :], here))
    assert_equal_buffers(statistics(ours), statistics(plain))
    if all(map(torch.equal, right, wrong)):
        torch_is_right_now(how)


def test_batch_norm_by_hand():
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)
            self.register_buffer("running_mean", torch.zeros(6))
            self.register_buffer("running_var", torch.ones(6))

        def forward(self, x):
            return F.batch_norm(self.linear(x), self.running_mean, self.running_var, None, None, self.training)

    plain = ByHand()
    ours = copy.deepcopy(plain)
    for training in (False, True, True):
        x = torch.randn(5, 4)
        a = step(plain.train(training), x, lambda module, x: module(x))
        b = step(ours.train(training), x, lambda module, x: checkpoint(module, x))
        assert all(map(torch.equal, a, b))
    assert_equal_buffers(statistics(ours), statistics(plain))


def test_spectral_norm():
    plain = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4))
    ours = copy.deepcopy(plain)
    for _ in range(3):
        x = torch.randn(3, 5)
        a = step(plain, x, lambda module, x: module(x))
        b = step(ours, x, lambda module, x: checkpoint(module, x))
        assert all(map(torch.equal, a, b))
    assert_equal_buffers(statistics(ours), statistics(plain))


def test_switching_between_training_and_evaluation():
    plain, x = normalised("BatchNorm1d")
    reads = ReadsWhatItWrites("in place")
    for model in (plain, reads):
        ours = copy.deepcopy(model)
        for training in (False, True, False, True, True):
            model.train(training)
            ours.train(training)
            x = torch.randn(6, 4)
            assert all(
                map(
                    torch.equal,
                    step(model, x, lambda m, x: m(x)),
                    step(ours, x, lambda m, x: checkpoint(m, x)),
                )
            )
            assert_equal_buffers(statistics(ours), statistics(model))


def test_retained_graph_and_several_recomputations():
    for model in (normalised("BatchNorm1d")[0], ReadsWhatItWrites("in place")):
        ours, x = copy.deepcopy(model), torch.randn(6, 4)
        for module, run in ((model, lambda m, x: m(x)), (ours, checkpoint)):
            out = run(module, x)
            second = run(module, x * 2)
            out.sum().backward(retain_graph=True)
            second.sum().backward()
            out.sum().backward()
        assert_equal_buffers(statistics(ours), statistics(model))
        for p, q in zip(ours.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_nested_checkpoints_update_once():
    for model in (normalised("BatchNorm1d")[0], ReadsWhatItWrites("rebinding")):
        ours, x = copy.deepcopy(model), torch.randn(6, 4)
        a = step(model, x, lambda module, x: module(x))
        b = step(ours, x, lambda module, x: checkpoint(lambda x: checkpoint(module, x), x))
        assert all(map(torch.equal, a, b))
        assert_equal_buffers(statistics(ours), statistics(model))


def test_backward_inside_the_function_writes_once():
    for model in (normalised("BatchNorm1d")[0], ReadsWhatItWrites("in place")):
        ours, x = copy.deepcopy(model), torch.randn(6, 4)

        def function(module, x):
            y = module(x)
            (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
            return y * grad.sum()

        a = step(model, x, lambda module, x: function(module, x))
        b = step(ours, x, lambda module, x: checkpoint(function, module, x))
        assert all(map(torch.equal, a, b))
        assert_equal_buffers(statistics(ours), statistics(model))


def test_a_graph_that_saved_the_statistics_still_runs():
    """Recomputing must not look like a write to buffers that other graphs saved."""
    model, x = normalised("BatchNorm1d")
    x = x.requires_grad_()
    plain_out = model(x)
    checkpoint(model, x).sum().backward()
    plain_out.sum().backward()


def test_threads_lose_no_update():
    """Recomputations in some threads while others run forwards of the same module."""
    model = nn.BatchNorm1d(4)
    rounds, workers = 20, 6
    barrier = threading.Barrier(workers)
    errors = []

    def work():
        try:
            barrier.wait()
            for _ in range(rounds):
                x = torch.randn(5, 4, requires_grad=True)
                checkpoint(lambda x: model(x).sin() * model.weight, x).sum().backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert model.num_batches_tracked.item() == rounds * workers
    assert type(model._buffers) is dict


def test_another_thread_sees_the_modules_own_buffers_during_a_recomputation():
    model = ReadsWhatItWrites("in place")
    inside, leave = threading.Event(), threading.Event()
    runs = []

    def function(x):
        runs.append(float(model.top))
        if len(runs) == 2:
            inside.set()
            assert leave.wait(30)
        return model(x)

    x = torch.randn(3, 4, requires_grad=True)
    out = checkpoint(function, x)
    after = model.top.clone()
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    assert inside.wait(30)
    assert torch.equal(model.top, after)  # not the recomputation's 1.0
    model.top.add_(1)
    duplicate = copy.deepcopy(model)
    leave.set()
    thread.join()
    assert runs == [1.0, 1.0]
    assert torch.equal(model.top, after + 1) and torch.equal(duplicate.top, after + 1)
    assert type(duplicate._buffers) is dict


@pytest.mark.parametrize("how", ["script", "compile()", "compiled forward", "torch.compile", "compiled function"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_do_not_run_as_python(how):
    torch._dynamo.reset()
    plain, x = normalised("BatchNorm1d")
    model = copy.deepcopy(plain)
    function = model
    if how == "script":
        function = model = torch.jit.script(model)
    elif how == "compile()":
        model.compile(backend="eager")
    elif how == "compiled forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif how == "torch.compile":
        function = torch.compile(model, backend="eager")
    else:
        function = torch.compile(lambda x: model(x), backend="eager")
    # TorchScript's executor and the non-reentrant form's hooks do not go together, in torch neither.
    reentrant = how == "script"
    waiting = [plain(x), function(x)]  # a graph that saved the statistics must not take the restoring for a write
    for _ in range(2):
        a = step(plain, x, lambda module, x: module(x))
        b = step(model, x, lambda module, x: checkpoint(function, x, use_reentrant=reentrant))
        if how == "script":  # it optimises after some runs, and rounds differently then
            torch.testing.assert_close(a, b)
        else:
            assert all(map(torch.equal, a, b))
    torch.testing.assert_close(statistics(model), statistics(plain))
    for out in waiting:
        out.sum().backward()


@VARIANTS
@pytest.mark.parametrize("kind", [nn.LazyBatchNorm1d, nn.LazyInstanceNorm1d])
def test_lazy_normalisation_counts_its_first_call_once(kind, use_reentrant):
    kwargs = {"affine": True, "track_running_stats": True} if kind is nn.LazyInstanceNorm1d else {}
    results = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        norm = kind(**kwargs)
        x = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for _ in range(2):
            run(norm, x).square().sum().backward()
        results.append([x.grad, *norm.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_modules_that_share_a_buffer():
    class Counting(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, x):
            self.count.add_(1.0)
            return x * self.count.clone()

    results = []
    for run in (lambda f, x: f(x), checkpoint):
        count = torch.ones(())
        net = nn.Sequential(Counting(count), Counting(count))
        x = torch.ones(3, requires_grad=True)
        for _ in range(3):
            run(net, x).sum().backward()
        results.append((x.grad, count))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_buffer_that_carries_a_graph():
    """As the state of a recurrent layer does."""

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(3))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.state = (0.5 * self.state + self.scale * x).sin()
            return self.state * self.state

    results = []
    for run in (lambda f, x: f(x), checkpoint):
        layer, x = Leaky(), torch.ones(3, requires_grad=True)
        loss = sum(run(layer, x).sum() for _ in range(3))
        loss.backward()
        results.append((x.grad, layer.scale.grad, layer.state.detach()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inference_mode_buffers_are_left_alone():
    module = nn.Linear(3, 3)
    with torch.inference_mode():
        module.register_buffer("table", torch.randn(3))
    x = torch.randn(2, 3, requires_grad=True)
    checkpoint(lambda x: module(x) + 1, x).sum().backward()
    assert x.grad is not None


# --- random state


@VARIANTS
def test_python_and_numpy_random_state(use_reentrant):
    def function(x):
        scale = random.random() + numpy.random.rand()
        return (x * scale).sin() * 2 * torch.rand(())

    def gradients(run):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        out = run(function, x)
        between = (random.random(), numpy.random.rand())
        (out.sum()).backward()
        return x.grad, between, (random.random(), numpy.random.rand())

    right = gradients(lambda function, x: function(x))
    ours = gradients(lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant, preserve_rng_state="all"))
    assert torch.equal(ours[0], right[0]) and ours[1:] == right[1:]
    # Not asked for, and torch cannot be asked.
    for run in (checkpoint, torchs):
        wrong = gradients(lambda f, x, run=run: run(f, x, use_reentrant=use_reentrant))
        assert not torch.equal(wrong[0], right[0])


@VARIANTS
def test_unpreserved_dropout_warns_once(use_reentrant, monkeypatch):
    monkeypatch.setattr(checkpointing._UnpreservedRandomness, "warned", False)
    x = torch.randn(10, requires_grad=True)
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(lambda x: F.dropout(x, 0.5, training=False).sin(), x, **options)  # not active
    with pytest.warns(UserWarning, match="preserve_rng_state") as caught:
        checkpoint(lambda x: F.dropout(x, 0.5), x, **options)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(lambda x: F.dropout(x, 0.5), x, **options)


# --- RReLU (pytorch#193671)


@pytest.mark.parametrize("position", ["last", "middle", "in place", "noise given"])
def test_rrelu(position):
    def function(x):
        if position == "last":
            return F.rrelu(x * 2, training=True)
        if position == "middle":
            return F.rrelu(x * 2, training=True).sin()
        if position == "in place":
            return F.rrelu_(x * 2, training=True)
        return torch._C._nn.rrelu_with_noise(x * 2, torch.zeros_like(x), 0.1, 0.3, True)

    def gradient(run):
        torch.manual_seed(2)
        x = torch.linspace(-3, 3, 4096).requires_grad_()
        run(function, x).sum().backward()
        return x.grad

    right = gradient(lambda f, x: f(x))
    for options in ({}, {"determinism_check": "none"}, {"determinism_check": "values"}):
        assert torch.equal(gradient(lambda f, x, o=options: checkpoint(f, x, **o)), right)
    wrong = gradient(torchs)
    if position == "noise given" and torch.equal(wrong, right):
        torch_is_right_now("RReLU")  # zeros are the only noise whose content is certain


def test_two_inputs_of_a_product_do_not_cost_the_early_stop_more_than_the_product():
    ran = []

    def function(x):
        y = x.sin() * x.cos()
        ran.append("after")
        return y

    x = torch.randn(4, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert torch.allclose(x.grad, (2 * x).cos())


# --- values that differ


@VARIANTS
def test_values_that_differ_raise(use_reentrant):
    calls = []

    def function(x):
        calls.append(0)
        return (x * len(calls)).sin().cos()

    def backward(run, **options):
        calls.clear()
        x = torch.randn(7, requires_grad=True)
        run(function, x, use_reentrant=use_reentrant, **options).sum().backward()

    with pytest.raises(torch_checkpoint.CheckpointError, match="fingerprint of values"):
        backward(checkpoint, determinism_check="values")
    backward(checkpoint)
    backward(torchs)  # torch has no such check
    with pytest.raises(ValueError, match="determinism_check"):
        torchs(function, torch.randn(3, requires_grad=True), determinism_check="values")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_fingerprints_tell_any_single_change(dtype):
    values = torch.randn(300, dtype=dtype)
    same = checkpointing._digest(values.clone())
    assert torch.equal(checkpointing._digest(values), same)
    assert torch.equal(checkpointing._digest(values.reshape(3, 100).t().contiguous().t()), same)
    for index in range(0, 300, 37):
        changed = values.clone()
        changed[index] = -changed[index]
        assert not torch.equal(checkpointing._digest(changed), same)
    swapped = values.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert not torch.equal(checkpointing._digest(swapped), same)
    nans = torch.full((2, 2), float("nan"), dtype=dtype)
    assert torch.equal(checkpointing._digest(nans), checkpointing._digest(nans.clone()))


@pytest.mark.parametrize("kind", ["BatchNorm", "Dropout and RReLU"])
def test_values_that_agree_pass(kind):
    model, x = normalised("BatchNorm1d")
    if kind != "BatchNorm":
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.RReLU())
    ours = copy.deepcopy(model)
    torch.manual_seed(4)
    a = step(model, x, lambda module, x: module(x))
    torch.manual_seed(4)
    b = step(ours, x, lambda module, x: checkpoint(module, x, determinism_check="values"))
    assert all(map(torch.equal, a, b))
    assert_equal_buffers(statistics(ours), statistics(model))
