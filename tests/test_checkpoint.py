"""fastamp's checkpoint against torch's: equal outputs, gradients and random state, bit by bit."""

import contextlib
import copy
import functools
import gc
import inspect
import logging
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fastamp import checkpointing
from fastamp.checkpointing import checkpoint, checkpoint_sequential

TORCH = torch_checkpoint.checkpoint
VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Block(nn.Module):
    """A small transformer block with dropout."""

    def __init__(self, width=16, dropout=0.2):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x, mask=None, scale=1.0):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        return x + scale * F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


def tokens(requires_grad=True, batch=2, length=5, width=16):
    return torch.randn(batch, length, width, requires_grad=requires_grad)


def run(checkpoint_fn, module, inputs, seed=1234, call=None, **options):
    """outputs, gradients of inputs and parameters, and the random state afterwards, of a fresh copy."""
    module = copy.deepcopy(module)
    inputs = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    torch.manual_seed(seed)
    if call is None:
        output = checkpoint_fn(module, *inputs, **options)
    else:
        output = call(checkpoint_fn, module, inputs, options)
    (output.square().sum() + torch.rand(())).backward()
    tensors = [output, *(value.grad for value in inputs), *(p.grad for p in module.parameters())]
    return [*tensors, *module.buffers(), torch.get_rng_state(), torch.rand(3)]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b)


@VARIANTS
@pytest.mark.parametrize("training", [True, False])
def test_equals_torch(use_reentrant, training):
    module, x = Block().train(training), tokens()
    ours = run(checkpoint, module, [x], use_reentrant=use_reentrant)
    assert_same(ours, run(torch_checkpoint.checkpoint, module, [x], use_reentrant=use_reentrant))
    # and both equal running without a checkpoint
    plain = run(lambda function, *args, **_: function(*args), module, [x])
    assert_same(ours[:-2], plain[:-2])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_reentrant": None},
        {"early_stop": False},
        {"determinism_check": "none"},
        {"determinism_check": "values"},
        {"preserve_rng_state": "all"},
        {"debug": True},
        {"preserve_rng_state": False},
    ],
    ids=str,
)
def test_every_option_equals_torch(options):
    module, x = Block(dropout=0.0 if options.get("preserve_rng_state") is False else 0.2), tokens()
    theirs = {k: v for k, v in options.items() if v not in ("values", "all", None)}
    assert_same(
        run(checkpoint, module, [x], **options),
        run(torch_checkpoint.checkpoint, module, [x], use_reentrant=False, **theirs),
    )


def test_left_out_use_reentrant_means_false_without_a_warning():
    x = tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (grad,) = torch.autograd.grad(checkpoint(Block(), x).sum(), x)  # the reentrant form refuses grad()
    assert grad.shape == x.shape


@pytest.mark.parametrize("kwargs", [{}, {"scale": 0.5}], ids=["none", "number"])
@pytest.mark.parametrize("mask", ["none", "kwarg", "positional"])
def test_arguments_of_every_kind(mask, kwargs):
    module, x = Block(), tokens()
    bias = torch.randn(5, 5)

    def call(checkpoint_fn, module, inputs, options):
        if mask == "kwarg":
            return checkpoint_fn(module, *inputs, mask=bias, **kwargs, **options)
        if mask == "positional":
            return checkpoint_fn(module, *inputs, bias, **kwargs, **options)
        return checkpoint_fn(module, *inputs, **kwargs, **options)

    assert_same(
        run(checkpoint, module, [x], call=call, use_reentrant=False),
        run(torch_checkpoint.checkpoint, module, [x], call=call, use_reentrant=False),
    )


def test_containers_and_outputs_of_any_structure():
    def function(pair, named, *, extra, flag):
        a, b = pair
        assert isinstance(named["list"], list) and flag is None
        return {"sum": a * b + named["list"][0].sin(), "both": (extra["deep"][0][0] * a, "text")}

    def outputs(checkpoint_fn):
        leaves = [torch.randn(4, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(4)]
        a, b, c, d = leaves
        out = checkpoint_fn(
            function, (a, b), {"list": [c, 7]}, extra={"deep": [(d, "x")]}, flag=None, use_reentrant=False
        )
        assert out["both"][1] == "text"
        total = out["sum"].square().sum() + out["both"][0].cos().sum()
        return torch.autograd.grad(total, leaves)

    assert_same(outputs(checkpoint), outputs(torch_checkpoint.checkpoint))


def test_recomputation_gets_containers_as_the_forward_got_them():
    seen = []

    def function(x, states):
        seen.append(len(states))
        states.append(x * 2)
        return (x * states[0]).sin() * 2

    x = torch.randn(3, requires_grad=True)
    states = [x + 1]
    checkpoint(function, x, states).sum().backward()
    assert seen == [1, 1] and len(states) == 2


def test_nested_checkpoints():
    def nested(checkpoint_fn, module, inputs, options):
        def outer(x):
            x = checkpoint_fn(module, x, **options)
            return checkpoint_fn(module, x.sin(), scale=0.5, **options).cos()

        return checkpoint_fn(outer, *inputs, **options)

    module, x = Block(), tokens()
    assert_same(
        run(checkpoint, module, [x], call=nested, use_reentrant=False),
        run(torch_checkpoint.checkpoint, module, [x], call=nested, use_reentrant=False),
    )


@pytest.mark.parametrize("outer, inner", [(checkpoint, TORCH), (TORCH, checkpoint)])
def test_nests_with_torch(outer, inner):
    module, x = Block(), tokens()

    def nested(outer_fn, inner_fn):
        def call(_, module, inputs, options):
            return outer_fn(lambda x: inner_fn(module, x, use_reentrant=False).tanh(), *inputs, use_reentrant=False)

        return run(None, module, [x], call=call)

    assert_same(nested(outer, inner), nested(torch_checkpoint.checkpoint, torch_checkpoint.checkpoint))


@VARIANTS
def test_nested_reentrant_forms(use_reentrant):
    module, x = Block(), tokens()

    def nested(checkpoint_fn, module, inputs, options):
        return checkpoint_fn(
            lambda x: checkpoint_fn(module, x, use_reentrant=not use_reentrant).sin(),
            *inputs,
            use_reentrant=use_reentrant,
        )

    assert_same(run(checkpoint, module, [x], call=nested), run(torch_checkpoint.checkpoint, module, [x], call=nested))


def test_backward_inside_the_function():
    def function(x):
        y = x.sin()
        z = y.cos()
        (grad,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
        return grad * z

    for early_stop in (True, False):
        grads = []
        for checkpoint_fn in (checkpoint, torch_checkpoint.checkpoint):
            x = torch.linspace(-1, 1, 6, requires_grad=True)
            checkpoint_fn(function, x, use_reentrant=False, early_stop=early_stop).sum().backward()
            grads.append(x.grad)
        assert_same(grads[:1], grads[1:])


def counting(counter):
    def forward_context():
        counter["forward"] += 1
        yield

    def recompute_context():
        counter["recompute"] += 1
        yield

    return lambda: (
        contextlib.contextmanager(forward_context)(),
        contextlib.contextmanager(recompute_context)(),
    )


def test_context_fn():
    counter = {"forward": 0, "recompute": 0}
    x = tokens()
    checkpoint(Block(), x, context_fn=counting(counter)).sum().backward()
    assert counter == {"forward": 1, "recompute": 1}


@pytest.mark.parametrize("as_list", [True, False])
def test_selective_checkpointing(as_list):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    saved = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    context_fn = functools.partial(create_selective_checkpoint_contexts, saved if as_list else policy)
    module, x = Block(), tokens()
    assert_same(
        run(checkpoint, module, [x], context_fn=context_fn),
        run(torch_checkpoint.checkpoint, module, [x], context_fn=context_fn, use_reentrant=False),
    )


class RecordingHooks(torch.autograd.graph.saved_tensors_hooks):
    """Counts what is packed and hands back a copy."""

    def __init__(self):
        self.packed = []
        super().__init__(self._pack, lambda box: box[0])

    def _pack(self, tensor):
        self.packed.append(tuple(tensor.shape))
        return [tensor.clone()]


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("respect", [True, False, None])
def test_respect_saved_tensors_hooks(respect):
    """Under every torch; torch itself has the argument from 2.14 on."""
    context_fn = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    weight = torch.randn(4, 7, requires_grad=True)

    def function(x):
        return (x @ weight).sin().cos()

    def grads(checkpoint_fn, **options):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        hooks = RecordingHooks()
        with hooks:
            out = checkpoint_fn(function, x, context_fn=context_fn, use_reentrant=False, **options)
        return torch.autograd.grad(out.sum(), [x, weight]), hooks.packed

    ours, packed = grads(checkpoint, respect_saved_tensors_hooks=respect)
    assert ((3, 7) in packed) is (respect is True)
    theirs, _ = grads(torch_checkpoint.checkpoint)
    assert_same(ours, theirs)
    if "respect_saved_tensors_hooks" in inspect.signature(torch_checkpoint.checkpoint).parameters:
        assert grads(torch_checkpoint.checkpoint, respect_saved_tensors_hooks=respect)[1] == packed


def test_respected_hooks_reach_a_nested_selective_checkpoint():
    context_fn = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    weight = torch.randn(4, 7)

    def inner(x):
        return (x @ weight).sin().cos()

    def outer(x):
        return checkpoint(inner, x * 2, context_fn=context_fn, respect_saved_tensors_hooks=True).exp()

    x = torch.randn(3, 4, requires_grad=True)
    hooks = RecordingHooks()
    with hooks:
        out = checkpoint(outer, x)
    assert (3, 7) in hooks.packed
    (ours,) = torch.autograd.grad(out.sum(), x)
    (plain,) = torch.autograd.grad(inner(x * 2).exp().sum(), x)
    assert torch.equal(ours, plain)


def test_debug_explains_a_mismatch(monkeypatch):
    # pytest's log handlers cannot format the records of torch's debug mode.
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "handlers", [])
    calls = []

    def function(x):
        calls.append(0)
        return x.sin().cos() if len(calls) == 1 else x.sin()

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(function, x, debug=True)
    with pytest.raises(torch_checkpoint.CheckpointError, match="Operations executed during the original forward"):
        out.sum().backward()


def test_set_checkpoint_debug_enabled_is_obeyed():
    with torch_checkpoint.set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match="debug=True"):
        checkpoint(Block(), tokens(), context_fn=counting({"forward": 0, "recompute": 0}))


def test_different_shapes_raise_as_in_torch():
    sizes = iter([4, 3, 4, 3])

    def function(x):
        return (x[: next(sizes)].sin()).square()

    for checkpoint_fn in (checkpoint, torch_checkpoint.checkpoint):
        x = torch.randn(5, requires_grad=True)
        out = checkpoint_fn(function, x, use_reentrant=False)
        with pytest.raises(torch_checkpoint.CheckpointError, match="different metadata"):
            out.sum().backward()


def test_early_stop():
    ran = []

    def function(x):
        y = x.exp()  # saves its result, which is where the recomputation can stop
        ran.append("after")
        return y + 1

    for argument, everywhere, runs in ((True, None, 1), (False, None, 2), (False, True, 1), (True, False, 2)):
        ran.clear()
        x = torch.randn(4, requires_grad=True)
        with torch_checkpoint.set_checkpoint_early_stop(everywhere):
            out = checkpoint(function, x, early_stop=argument)
        out.sum().backward()
        assert len(ran) == runs


@VARIANTS
@pytest.mark.parametrize("cache", [True, False])
def test_autocast(use_reentrant, cache):
    module, x = Block(), tokens()

    def call(checkpoint_fn, module, inputs, options):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            out = checkpoint_fn(module, *inputs, **options)
        assert out.dtype in (torch.float32, torch.bfloat16)
        return out.float()

    def enabled_inside(checkpoint_fn, module, inputs, options):
        def function(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return module(x)

        return checkpoint_fn(function, *inputs, **options).float()

    for how in (call, enabled_inside):
        assert_same(
            run(checkpoint, module, [x], call=how, use_reentrant=use_reentrant),
            run(torch_checkpoint.checkpoint, module, [x], call=how, use_reentrant=use_reentrant),
        )


def test_backward_under_another_autocast():
    linear = nn.Linear(16, 16)
    grads = []
    for checkpoint_fn in (checkpoint, torch_checkpoint.checkpoint):
        x = torch.linspace(-1, 1, 48).reshape(3, 16).requires_grad_()
        out = checkpoint_fn(lambda x: linear(x).sin(), x, use_reentrant=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out.sum().backward()
        grads.append(x.grad)
    assert_same(grads[:1], grads[1:])


def test_double_backward():
    module, x = Block(), tokens()

    def second_order(checkpoint_fn):
        torch.manual_seed(3)
        local = x.detach().clone().requires_grad_()
        out = checkpoint_fn(module, local, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.square().sum(), local, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [local, *module.parameters()], allow_unused=True)

    assert_same(second_order(checkpoint), second_order(torch_checkpoint.checkpoint))


@VARIANTS
def test_retain_graph(use_reentrant):
    module, x = Block(), tokens()
    out = checkpoint(module, x, use_reentrant=use_reentrant)
    out.sum().backward(retain_graph=True)
    once = x.grad.clone()
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert torch.equal(x.grad, once + once + once)


def test_frozen_inputs_and_frozen_modules():
    module = Block()
    for x_grad, frozen in ((False, False), (True, True), (False, True)):
        module.requires_grad_(not frozen)
        x = tokens(requires_grad=x_grad)
        torch.manual_seed(0)
        out = checkpoint(module, x)
        assert out.requires_grad is (x_grad or not frozen)
        if out.requires_grad:
            out.sum().backward()
        torch.manual_seed(0)
        assert torch.equal(out, module(x))
        assert (x.grad is not None) is x_grad
        assert all((p.grad is None) is frozen for p in module.parameters())
        module.zero_grad()


def test_part_of_the_gradients():
    module, x = Block(), tokens()
    grads = []
    for checkpoint_fn in (checkpoint, torch_checkpoint.checkpoint):
        torch.manual_seed(9)
        out = checkpoint_fn(module, x, use_reentrant=False)
        grads.append(torch.autograd.grad(out.sum(), [x, module.down.weight]))
        torch.manual_seed(9)
        checkpoint_fn(module, x, use_reentrant=False).sum().backward(inputs=[module.up.bias])
    assert_same(grads[0], grads[1])


@pytest.mark.parametrize("options", [{}, {"storage": "int8"}, {"use_reentrant": True}], ids=str)
def test_inference_tensors_in_containers_and_keywords(options):
    """Tables made once in inference mode, such as rotary embeddings and masks. torch takes them too."""
    with torch.inference_mode():
        table, hidden = torch.randn(64, 64), torch.rand(64, 64) > 0.5
    x = torch.randn(64, 64, requires_grad=True)
    keywords = {} if "use_reentrant" in options else {"table": table, "rest": [{"hidden": hidden}]}

    def function(x, pair, table=table, rest=({"hidden": hidden},)):
        return ((x * 2.0).sin() + table + pair[0] + rest[0]["hidden"]).cos()

    torch.autograd.backward(checkpoint(function, x, (table, hidden), **keywords, **options).sum())
    found, x.grad = x.grad, None
    function(x, (table, hidden)).sum().backward()
    assert torch.equal(found, x.grad)


def test_no_grad_and_inference_mode_keep_nothing():
    module, x = Block().eval(), tokens()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = checkpoint(module, x)
        assert not out.requires_grad and torch.equal(out, module(x))


def test_saved_tensors_are_not_kept():
    """Only the inputs outlive the forward, and those only while the graph does."""
    alive = []

    def function(x):
        y = x.exp()
        alive.append(weakref.ref(y))
        return y.sin()

    x = torch.randn(1000, requires_grad=True)
    middle = x * 1
    kept = weakref.ref(middle)
    out = checkpoint(function, middle)
    del middle
    assert alive[0]() is None and kept() is not None
    del out
    gc.collect()
    assert kept() is None


def test_no_reference_cycles_keep_memory():
    class Payload(nn.Linear):
        pass

    module = Payload(4, 4)
    reference = weakref.ref(module)
    x = torch.randn(2, 4, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        out = checkpoint(module, x).sum()
        out.backward()
        del module, out
        assert reference() is None
    finally:
        gc.enable()


def test_exceptions_of_the_function_pass_and_leave_nothing_behind():
    def broken(x):
        x.sin()
        raise KeyError("mine")

    x = torch.randn(3, requires_grad=True)
    for use_reentrant in (True, False):
        with pytest.raises(KeyError, match="mine"):
            checkpoint(broken, x, use_reentrant=use_reentrant)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    out = checkpoint(torch.sin, x)
    out.sum().backward()
    assert torch.equal(x.grad, x.cos())


def test_a_context_that_swallows_exceptions_is_refused():
    def context_fn():
        return contextlib.suppress(KeyError), contextlib.nullcontext()

    def broken(x):
        raise KeyError("mine")

    with pytest.raises(RuntimeError, match="suppressed an exception"):
        checkpoint(broken, torch.randn(3, requires_grad=True), context_fn=context_fn)


def test_default_device_is_restored():
    def function(x):
        assert torch.empty(0).device.type == "meta"
        return x.sin() * 2

    x = torch.randn(3, requires_grad=True)
    with torch.device("meta"):
        out = checkpoint(function, x)
    out.sum().backward()
    assert torch.empty(0).device.type == "cpu"
    assert torch.equal(x.grad, x.cos() * 2)


def test_meta_tensors():
    x = torch.randn(3, 4, device="meta", requires_grad=True)
    checkpoint(lambda x: x.sin().cos(), x).sum().backward()
    assert x.grad.is_meta and x.grad.shape == (3, 4)


def test_threads():
    module = Block(dropout=0.0)
    inputs = [tokens() for _ in range(8)]
    expected = [torch.autograd.grad(module(x).square().sum(), x)[0] for x in inputs]
    results = [None] * len(inputs)

    def work(index):
        for _ in range(5):
            out = checkpoint(module, inputs[index])
            (results[index],) = torch.autograd.grad(out.square().sum(), inputs[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(results, expected)


def test_forward_in_one_thread_backward_in_another():
    module, x = Block(), tokens()
    torch.manual_seed(5)
    expected = torch.autograd.grad(module(x).sum(), x)
    torch.manual_seed(5)
    out = checkpoint(module, x)
    result = []
    thread = threading.Thread(target=lambda: result.append(torch.autograd.grad(out.sum(), x)))
    thread.start()
    thread.join()
    assert_same(result[0], expected)


# --- decorator form


def test_decorator_form():
    module = Block(dropout=0.0)

    @checkpoint(early_stop=False)
    def function(x, *, debug):
        """Documented."""
        assert debug == "the function's own"
        return module(x)

    assert function.__doc__ == "Documented." and function.__name__ == "function"
    x = tokens()
    out = function(x, debug="the function's own")
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(module(x).sum(), x))


def test_decorated_method_and_curried_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        @checkpoint(use_reentrant=False)
        def forward(self, x):
            assert isinstance(self, Model)
            return self.linear(x).sin()

    model = Model()
    x = torch.randn(2, 3, requires_grad=True)
    curried = checkpoint(determinism_check="values")(model.linear)
    for out, expected in ((model(x), model.linear(x).sin()), (curried(x), model.linear(x))):
        assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x))
    assert isinstance(Model.forward, type(model.forward))


def test_decorator_form_refuses_keywords_it_does_not_know():
    with pytest.raises(ValueError, match="Unexpected keyword arguments: mask"):
        checkpoint(mask=1)


# --- checkpoint_sequential


@VARIANTS
@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.parametrize("as_list", [True, False])
def test_sequential_equals_torch(use_reentrant, segments, as_list):
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4), nn.Sigmoid())
    x = torch.randn(3, 4, requires_grad=True)

    def call(checkpoint_fn, module, inputs, options):
        functions = list(module) if as_list else module
        return checkpoint_fn(functions, segments, *inputs, use_reentrant=use_reentrant, preserve_rng_state=True)

    assert_same(
        run(checkpoint_sequential, module, [x], call=call),
        run(torch_checkpoint.checkpoint_sequential, module, [x], call=call),
    )


def test_sequential_takes_checkpoints_own_arguments_only():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    out = checkpoint_sequential(model, 2, x, determinism_check="values", early_stop=False)
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(model(x).sum(), x))
    with pytest.raises(ValueError, match="Unexpected keyword arguments: mask"):
        checkpoint_sequential(model, 2, x, mask=1)
    for segments in (0, 3):
        with pytest.raises(ValueError, match="between 1 and the number of functions"):
            checkpoint_sequential(model, segments, x)


# --- wrong arguments


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"determinism_check": "sometimes"}, ValueError, "determinism_check should be one of"),
        ({"preserve_rng_state": "cuda"}, ValueError, "preserve_rng_state must be"),
        ({"use_reentrant": True, "debug": True}, ValueError, "only supported when use_reentrant=False"),
        (
            {"use_reentrant": True, "context_fn": lambda: None},
            ValueError,
            "only supported when use_reentrant=False",
        ),
        ({"use_reentrant": True, "respect_saved_tensors_hooks": False}, ValueError, "only supported when"),
        ({"use_reentrant": True, "storage": "bf16"}, ValueError, "only supported when use_reentrant=False"),
        ({"use_reentrant": True, "scale": 2}, ValueError, "Unexpected keyword arguments: scale"),
        ({"storage": "int3"}, ValueError, "storage must be one of"),
        ({"storage": 8}, TypeError, "storage must be"),
    ],
    ids=str,
)
def test_wrong_arguments_raise_before_anything_runs(options, error, message):
    def function(x, **kwargs):
        raise AssertionError("it ran")

    with pytest.raises(error, match=message):
        checkpoint(function, torch.randn(3, requires_grad=True), **options)


def test_not_callable():
    with pytest.raises(TypeError, match="function must be callable, got Tensor"):
        checkpoint(torch.randn(3), torch.randn(3))


# --- the mirror of torch's module


def test_mirror_has_everything_torch_has():
    from fastamp.utils import checkpoint as mirror

    assert mirror.checkpoint is checkpoint and mirror.checkpoint_sequential is checkpoint_sequential
    for name in dir(torch_checkpoint):
        if name not in ("checkpoint", "checkpoint_sequential") and not name.startswith("__"):
            assert getattr(mirror, name) is getattr(torch_checkpoint, name), name
    assert set(torch_checkpoint.__all__) <= set(mirror.__all__) and set(mirror.__all__) <= set(dir(mirror))
    with pytest.raises(AttributeError, match=r"fastamp\.utils\.checkpoint"):
        getattr(mirror, "nothing_like_it")  # noqa: B009


def test_signature_covers_torchs():
    ours = inspect.signature(checkpoint).parameters
    for name, parameter in inspect.signature(torch_checkpoint.checkpoint).parameters.items():
        assert name in ours
        if name not in ("function", "args", "kwargs"):
            assert ours[name].default == parameter.default, name


# --- what older versions of torch need


def test_saving_without_autograds_own_constructor():
    x = torch.randn(4, requires_grad=True) * 1
    hooks = RecordingHooks()
    with hooks:
        saved = checkpointing._SavedByFunction(x)
    assert hooks.packed == [(4,)]
    assert torch.equal(saved.unpack(), x) and saved.unpack().grad_fn is x.grad_fn
    saved = checkpointing._SavedByFunction(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.unpack()


def test_older_hooks_ask_a_node_for_the_inputs():
    inputs = checkpointing._Inputs((torch.ones(2), 3), {"k": [torch.zeros(1)]})
    node = checkpointing._KeptInputs(inputs, "exact", None).grad_fn
    one, three, zero = node.get_args(node.saved_tensors)
    assert torch.equal(one, torch.ones(2)) and three == 3 and torch.equal(zero, torch.zeros(1))


@pytest.mark.skipif(checkpointing._SAC_HOOKS_IN_TORCH, reason="this torch passes them through hooks itself")
def test_selective_checkpointing_that_keeps_lists():
    hooks = RecordingHooks()
    entries = checkpointing._HookedList((hooks.pack_hook, hooks.unpack_hook))
    value = torch.randn(3)
    entries.append((torch_checkpoint._VersionWrapper(value), "other"))
    assert hooks.packed == [(3,)]
    wrapped, other = entries.pop(0)
    assert torch.equal(wrapped.get_val(False), value) and other == "other"


# --- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("form", ["function", "module", "decorator", "kwargs"])
def test_compile_traces_through(form):
    torch._dynamo.reset()
    module = Block(dropout=0.0)
    decorated = checkpoint(use_reentrant=False)(module)

    def model(x):
        if form == "function":
            x = checkpoint(lambda x: module(x).sin(), x * 2, use_reentrant=False)
        elif form == "module":
            x = checkpoint(module, x * 2, use_reentrant=False, preserve_rng_state=False)
        elif form == "kwargs":
            x = checkpoint(module, x * 2, scale=0.5)
        else:
            x = decorated(x * 2)
        return x.cos()

    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    x = tokens()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    (ours,) = torch.autograd.grad(compiled(x).sum(), x)
    (eager,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.allclose(ours, eager, atol=1e-6)
    assert any("tag_activation_checkpoint" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.slow
def test_checkpoint_of_a_compiled_module():
    torch._dynamo.reset()
    module = Block(dropout=0.0)
    compiled = torch.compile(module, backend="eager")
    x = tokens()
    out = checkpoint(compiled, x)
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(module(x).sum(), x))


def test_make_fx_traces_torchs_checkpoint():
    from torch.fx.experimental.proxy_tensor import make_fx

    def model(x):
        return torch.autograd.grad(checkpoint(lambda x: x.sin().cos(), x).sum(), x)[0]

    x = torch.randn(3, requires_grad=True)
    graph = make_fx(model)(x)
    assert torch.equal(graph(x), model(x))
