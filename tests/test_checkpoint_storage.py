"""checkpoint(storage=...), checkpoint_stack and the codecs under them."""

import functools
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from test_checkpoint import Block, assert_same
from torch import nn

from fastamp import _delta
from fastamp import storage as fastamp_storage
from fastamp.checkpointing import checkpoint, checkpoint_sequential, checkpoint_stack
from fastamp.store import store_activations

FORMATS = ["bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int4"]
# Largest error of a value in [-1, 1] whose block's largest magnitude is at most 1.
STEP = {
    "bf16": 2**-9,
    "fp16": 2**-12,
    "int8": 0.51 / 127,
    "fp8_e4m3": 2**-4,
    "fp8_e5m2": 2**-3,
    "int4": 0.51 / 7,
}
WIDTH = 32


def activation(*shape, dtype=torch.float32):
    """Floating, not a leaf, and large enough."""
    return torch.randn(shape or (4, 16, WIDTH), dtype=dtype).requires_grad_() * 1


class CountBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of what is kept."""

    def __init__(self):
        self._kept = []  # alive, so that no address comes twice
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor):
        self._kept.append(tensor)
        return tensor

    @property
    def total(self):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._kept}
        return sum(storages.values())


# --- codecs

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2),
    "expanded": lambda x: x[:, :1].expand(-1, 7, -1, -1),
    "slice": lambda x: x[:, 1:, ::2, 1:],
    "one element": lambda x: x[0, 0, 0, 0],
    "nothing": lambda x: x[:0],
    "dimension of one": lambda x: x[:, :, :1],
    "flat": lambda x: x.reshape(-1)[3:],
    "expanded scalar": lambda x: x[0, 0, 0, 0].expand(5, 6),
}


KINDS = [(name, dtype) for name in FORMATS for dtype in (torch.float32, torch.bfloat16, torch.float16)]
KINDS += [("bf16", torch.float64), ("fp16", torch.float64), ("bits", torch.float32)]


@pytest.mark.parametrize("name, dtype", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codecs_keep_shape_strides_dtype_and_values(name, layout, dtype):
    x = LAYOUTS[layout](torch.rand(3, 4, 5, 6).mul_(2).sub_(1).to(dtype))
    if name == "bits":
        codec, x = fastamp_storage._BITS, x > 0
    else:
        codec = fastamp_storage.FORMATS[name]
    before = x.clone()
    packed = codec.pack(x)
    once, again = codec.unpack(packed), codec.unpack(packed)
    assert torch.equal(once, again) and torch.equal(x, before)
    assert once.dtype == x.dtype and once.shape == x.shape
    if x.numel():
        assert all(a == b for a, b, size in zip(once.stride(), x.stride(), x.shape, strict=True) if size > 1)
    if name == "bits":
        assert torch.equal(once, x)
        assert packed.nbytes <= (x.numel() + 7) // 8
    else:
        ulp = torch.finfo(dtype).eps
        assert ((once.double() - x.double()).abs() <= STEP[name] + ulp).all()
        if name == "bf16":
            assert torch.equal(once, x.to(torch.bfloat16).to(dtype))
    if layout == "expanded":
        assert packed.nbytes <= 3 * 5 * 6 * 4 + 64  # one copy of what is repeated


def test_what_is_never_coded():
    class Subclass(torch.Tensor):
        pass

    exact = [
        nn.Parameter(torch.randn(64, 64)),
        torch.randn(64, 64, requires_grad=True),
        torch.randn(64, 64),
        torch.arange(4096),
        torch.randn(64, 64, dtype=torch.complex64).requires_grad_() * 1,
        activation(8, 8),
        activation(64, 64).as_subclass(Subclass),
        activation(64, 64, dtype=torch.float64),
        (torch.randn(64, 64).relu().to_sparse()).requires_grad_() * 1,
    ]
    for tensor in exact:
        assert fastamp_storage.codec_for(tensor, "int8", fastamp_storage.Context("x")).name == "exact"
    half = activation(64, 64, dtype=torch.bfloat16)
    for storage, name in (("bf16", "exact"), ("fp16", "exact"), ("int8", "int8"), ("exact", "exact")):
        assert fastamp_storage.codec_for(half, storage, fastamp_storage.Context("x")).name == name
    assert fastamp_storage.codec_for(torch.ones(64, 64) > 0, "int8", fastamp_storage.Context("x")).name == "bits"
    assert fastamp_storage.codec_for(activation(), "int8", fastamp_storage.Context("x")).name == "int8"


# --- checkpoint(storage=)


def gradients(run, module, x):
    (out,) = (run(module, x),)
    return torch.autograd.grad(out.square().sum(), [x, *module.parameters()])


def relative_error(ours, exact):
    difference = sum((a - b).double().square().sum() for a, b in zip(ours, exact, strict=True))
    return float((difference / sum(b.double().square().sum() for b in exact)).sqrt())


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_close_and_the_output_exact(name):
    module, x = Block(WIDTH, dropout=0.0), activation()
    exact = gradients(lambda module, x: module(x), module, x)
    ours = gradients(functools.partial(checkpoint, storage=name), module, x)
    error = relative_error(ours, exact)
    assert 0 < error < 4 * STEP[name]
    assert torch.equal(checkpoint(module, x, storage=name), module(x))


@pytest.mark.parametrize(
    "name, share", [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.26), ("fp8_e4m3", 0.26), ("int4", 0.141)]
)
def test_bytes_kept(name, share):
    module, x = Block(WIDTH), activation()
    bytes_of = {}
    for storage in ("exact", name):
        hooks = CountBytes()
        with hooks:
            out = checkpoint(module, x, storage=storage)
        bytes_of[storage] = hooks.total
        del out
    assert bytes_of["exact"] == x.nbytes
    assert bytes_of[name] <= share * x.nbytes


def test_masks_are_kept_as_bits():
    x, mask = activation(), torch.rand(4, 16, WIDTH) > 0.5
    mask = torch.cat([mask] * 4)
    x = torch.cat([x] * 4)
    hooks = CountBytes()
    with hooks:
        out = checkpoint(lambda x, *, mask: (x * mask).sin(), x, mask=mask, storage="bf16")
    assert hooks.total == x.nbytes // 2 + mask.nbytes // 8
    (ours,) = torch.autograd.grad(out.sum(), x)
    (exact,) = torch.autograd.grad((x * mask).sin().sum(), x)
    assert torch.allclose(ours, exact, atol=2**-7) and torch.equal(ours == 0, exact == 0)


def test_a_policy_chooses():
    asked = []

    def policy(tensor, context):
        asked.append((tuple(tensor.shape), context.name, context.function))
        return "bf16" if context.name == "args[0]" else "exact"

    seen = []

    def function(x, *, others):
        seen.append((x.detach().clone(), others[0].detach().clone()))
        return x * others[0] + others[1]

    x, y, leaf = activation(), activation(), torch.randn(4, 16, WIDTH, requires_grad=True)
    checkpoint(function, x, others=[y, leaf], storage=policy).sum().backward()
    shape = (4, 16, WIDTH)
    assert asked == [(shape, "args[0]", function), (shape, "kwargs['others'][0]", function)]
    assert torch.equal(seen[1][0], x.bfloat16().float()) and torch.equal(seen[1][1], y)


def test_a_policy_that_returns_nonsense_stops_everything():
    def function(x):
        raise AssertionError("it ran")

    for nonsense in ("int3", None, 8, "delta-int8"):
        with pytest.raises(ValueError, match=r"policy must return one of .* got .* for args\[0\]"):
            checkpoint(function, activation(), storage=lambda tensor, context, value=nonsense: value)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("name", ["bf16", "int8", "delta-int8"])
def test_in_place_write_after_packing_raises(name):
    module = Block(WIDTH, dropout=0.0)
    for write in (lambda x: x.add_(1), lambda x: x[0].zero_(), lambda x: x.view(-1).mul_(2)):
        x = activation()
        out = checkpoint_stack([module], x, storage=name)
        with torch.no_grad():
            write(x)
        with pytest.raises(RuntimeError, match=r"args\[0\] has been modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("name", ["bf16", "int8", "delta-int8"])
def test_the_original_is_not_kept_alive(name):
    module = Block(WIDTH, dropout=0.0)
    x = activation()
    memory = weakref.ref(x.untyped_storage())
    tensor = weakref.ref(x)
    out = checkpoint_stack([lambda x: module(x * 1)], x, storage=name)
    del x
    gc.collect()
    assert tensor() is None and memory() is None
    out.sum().backward()


@pytest.mark.parametrize("name", ["int8", "delta-int4"])
def test_retain_graph_and_double_backward(name):
    module, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), activation()  # attention has no second derivative
    out = checkpoint_stack([module, module], x, storage=name)
    first = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    assert_same(torch.autograd.grad(out.square().sum(), x, retain_graph=True), first)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert torch.equal(grad, first[0])
    assert torch.autograd.grad(grad.square().sum(), x)[0].isfinite().all()


def test_a_tensor_kept_by_several_calls_is_packed_once(monkeypatch):
    packed = []
    codec = fastamp_storage.FORMATS["int8"]
    encode = type(codec).encode
    monkeypatch.setattr(type(codec), "encode", lambda self, *args: packed.append(0) or encode(self, *args))
    memory = activation()
    outs = [checkpoint(lambda x: x.sin(), memory, storage="int8") for _ in range(3)]
    assert len(packed) == 1
    with torch.no_grad():
        memory.add_(1)  # a new version is a new tensor
    outs.append(checkpoint(lambda x: x.sin(), memory, storage="int8"))
    assert len(packed) == 2
    payload = fastamp_storage._shared[memory]
    assert payload() is not None
    del outs
    gc.collect()
    assert payload() is None


def test_infinities_and_nans_reach_the_recomputation():
    for name in [*FORMATS, "delta-int8", "delta-int4"]:
        seen = []

        def function(x, seen=seen):
            seen.append(x.detach().clone())
            return x.sin() + x

        x = activation()
        with torch.no_grad():
            x[0, 0, 0], x[1, 0, 0], x[2, 0, 0] = float("inf"), float("-inf"), float("nan")
        checkpoint_stack([function, torch.nan_to_num, function], x, storage=name).sum().backward()
        special = ~x.isfinite()
        recomputed = seen[-1]
        assert torch.equal(~recomputed.isfinite(), special), name
        assert torch.equal(recomputed[special].nan_to_num(5), x[special].nan_to_num(5))
        assert (recomputed - x)[~special].abs().max() < 4 * 4 * STEP[name.removeprefix("delta-")]


class Hooked(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        self.dtypes = set()
        super().__init__(lambda t: (self.dtypes.add(t.dtype), t.clone())[1], lambda t: t)


@pytest.mark.parametrize("name", ["int8", "delta-int8"])
@pytest.mark.parametrize("outer", ["hooks", "save_on_cpu", "fastamp", "torch", "torch reentrant", "selective"])
def test_composes(outer, name):
    module, x = Block(WIDTH, dropout=0.0), activation()
    stack = functools.partial(checkpoint_stack, [module] * 3, storage=name)
    hooks = Hooked()

    def function(x):
        return stack(x * 1).tanh()  # reentrant recomputation hands out leaves, which would stay exact

    alone = gradients(lambda module, x: function(x), module, x)

    def run(module, x):
        if outer == "hooks":
            with hooks:
                return function(x)
        if outer == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return function(x)
        if outer == "fastamp":
            return checkpoint(function, x)
        if outer == "torch":
            return torch_checkpoint.checkpoint(function, x, use_reentrant=False)
        if outer == "torch reentrant":
            return torch_checkpoint.checkpoint(function, x.clone(), use_reentrant=True)
        contexts = functools.partial(
            torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
        )
        return checkpoint(function, x, context_fn=contexts)

    if outer == "torch reentrant":  # which has no autograd.grad
        out = run(module, x.retain_grad() or x)
        out.square().sum().backward()
        ours = [x.grad, *(p.grad for p in module.parameters())]
    else:
        ours = gradients(run, module, x)
    assert_same(ours, alone)
    if outer == "hooks":
        assert torch.int8 in hooks.dtypes


def one_by_one(wrapped, blocks, x):
    for block in blocks:
        x = wrapped(block, x)
    return x


def in_a_region(format, blocks, x):
    with store_activations(format, min_bytes=0):
        for block in blocks:
            x = block(x)
    return x


INSIDE = {
    **{
        name: functools.partial(one_by_one, functools.partial(checkpoint, storage=name)) for name in ("exact", *FORMATS)
    },
    "torch": functools.partial(one_by_one, functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)),
    "delta-int8": functools.partial(checkpoint_stack, storage="delta-int8"),
    "region exact": functools.partial(in_a_region, "exact"),
    "region int8": functools.partial(in_a_region, "int8"),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", ["exact", "bf16", "int8", "delta-int8"])
def test_a_recomputation_keeps_what_the_forward_kept(name, inside):
    """Inputs that are decoded for it are leaves, and coded again where the forward's were."""
    blocks = nn.ModuleList(Block(WIDTH, dropout=0.0) for _ in range(4))
    halves = [functools.partial(INSIDE[inside], blocks[:2]), functools.partial(INSIDE[inside], blocks[2:])]
    x = activation()
    out = checkpoint_stack(halves, x, storage=name)
    plain = nn.Sequential(*blocks)
    assert torch.equal(out, plain(x))
    inputs = [x, *blocks.parameters()]
    ours = torch.autograd.grad(out.square().sum(), inputs)
    exact = torch.autograd.grad(plain(x).square().sum(), inputs)
    formats = [each.removeprefix("delta-").removeprefix("region ") for each in (name, inside)]
    assert relative_error(ours, exact) <= 8 * sum(STEP.get(each, 0.0) for each in formats)


@pytest.mark.slow
def test_under_compile_storage_is_exact():
    torch._dynamo.reset()
    module, x = Block(WIDTH, dropout=0.0), activation()
    blocks = [module, module]

    def model(x):
        return checkpoint_stack(blocks, checkpoint(module, x, storage="int8"), storage="delta-int8").sin()

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    (ours,) = torch.autograd.grad(compiled(x).sum(), x)
    (exact,) = torch.autograd.grad(module(module(module(x))).sin().sum(), x)
    assert torch.allclose(ours, exact, atol=1e-5)


# --- difference coding


class Recorder(nn.Module):
    """A residual block that notes what it was given."""

    def __init__(self, scale=0.05, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale
        self.given = []

    def forward(self, x):
        self.given.append(x.detach().clone())
        return x + self.scale * self.linear(x).sin()


def stack_of(count, scale=0.05):
    return [Recorder(scale) for _ in range(count)]


@pytest.mark.parametrize("keyframe_every", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["delta-int8", "delta-int4"])
def test_errors_do_not_add_up_along_the_stack(name, dtype, keyframe_every):
    blocks = stack_of(12)
    for block in blocks:
        block.to(dtype)
    x = activation(dtype=dtype)
    checkpoint_stack(blocks, x, storage=name, keyframe_every=keyframe_every).float().sum().backward()
    largest = STEP[name.removeprefix("delta-")]
    for index, block in enumerate(blocks):
        there, back = (given.float() for given in block.given)
        ulp = torch.finfo(dtype).eps * there.abs()
        if index % keyframe_every == 0:
            bound = STEP["int8"] * there.abs().max()
        else:
            # What was coded is the difference to the decoded value of the input before.
            bound = largest * (there - blocks[index - 1].given[1].float()).abs().max()
        assert ((there - back).abs() <= bound + ulp + 1e-6).all(), index


@pytest.mark.parametrize("direct, limit", [("int8", 0.5), ("int4", 0.5)])
def test_differences_beat_values_on_a_residual_stack(direct, limit):
    blocks, x = nn.ModuleList(stack_of(8)), activation()
    exact = gradients(lambda module, x: functools.reduce(lambda x, block: block(x), module, x), blocks, x)
    errors = [
        relative_error(gradients(functools.partial(checkpoint_stack, storage=storage), blocks, x), exact)
        for storage in (direct, f"delta-{direct}")
    ]
    assert 0 < errors[1] < limit * errors[0]


@pytest.mark.parametrize("keyframe_every", [2, 16])
def test_any_order_of_backward_decodes_the_same(keyframe_every):
    generator = torch.Generator().manual_seed(3)
    blocks, x = stack_of(7), activation()

    def run(order):
        for block in blocks:
            block.given.clear()
        middles = []

        def noting(block):
            def function(x):
                return block(x)

            return function

        def forward(x):
            # A stack whose every output is seen: the loss can start anywhere.
            chain = _delta.DeltaChain("delta-int8", keyframe_every)
            for block in blocks:
                x = checkpoint(noting(block), x, storage=chain)
                middles.append(x)

        forward(x)
        for index in order:
            torch.autograd.grad(middles[index].sum(), blocks[index].linear.weight, retain_graph=True)
        return [block.given[1] for block in blocks]

    straight = run(range(6, -1, -1))
    assert_same(run(range(7)), straight)
    assert_same(run(torch.randperm(7, generator=generator).tolist()), straight)


def test_part_of_the_stack_can_run_backward_while_the_rest_is_gone():
    blocks, x = stack_of(5), activation()
    outs = []
    x1 = checkpoint_stack(blocks[:1], x)
    outs.append(checkpoint_stack(blocks[1:], x1))
    (grad,) = torch.autograd.grad(outs[0].sum(), x)
    exact = functools.reduce(lambda x, block: block(x), blocks, x)
    assert relative_error([grad], torch.autograd.grad(exact.sum(), [x])) < 1e-3


def test_bytes_of_a_stack():
    blocks, x = stack_of(16), activation(8, 64, WIDTH)
    for name, keyframe, difference in (
        ("delta-int8", 2 * 33 / 128, 33 / 128),
        ("delta-int4", 33 / 128, 9 / 64),
    ):
        for every in (4, 16):
            hooks = CountBytes()
            with hooks:
                out = checkpoint_stack(blocks, x, storage=name, keyframe_every=every)
            keyframes = 16 // every
            assert hooks.total <= x.nbytes * (keyframes * keyframe + (16 - keyframes) * difference)
            del out


def test_a_change_of_shape_starts_a_new_keyframe():
    blocks = [Recorder(), nn.Linear(WIDTH, 2 * WIDTH), Recorder(width=2 * WIDTH), Recorder(width=2 * WIDTH)]
    x = activation()
    checkpoint_stack(blocks, x).sum().backward()
    for block in (blocks[0], blocks[2], blocks[3]):
        there, back = block.given
        assert (there - back).abs().max() < STEP["int8"] * there.abs().max()


def test_the_stack_takes_arguments_and_every_other_storage():
    blocks = [Block(WIDTH, dropout=0.0) for _ in range(3)]
    x, mask = activation(), torch.rand(16, 16) > 0.3
    mask.fill_diagonal_(True)
    plain = x
    for block in blocks:
        plain = block(plain, mask, scale=0.5)
    exact = torch.autograd.grad(plain.sum(), [x, *blocks[0].parameters()])
    for storage, limit in (("exact", 0.0), ("bf16", 0.01), ("delta-int8", 0.01)):
        out = checkpoint_stack(blocks, x, mask, scale=0.5, storage=storage)
        assert torch.equal(out, plain)
        ours = torch.autograd.grad(out.sum(), [x, *blocks[0].parameters()])
        assert relative_error(ours, exact) <= limit


@pytest.mark.parametrize("storage", ["int8", "delta-int8", "delta-int4"])
def test_sequential(storage):
    model, x = nn.Sequential(*stack_of(6)), activation()
    out = checkpoint_sequential(model, 6, x, storage=storage)
    ours = torch.autograd.grad(out.sum(), [x, *model.parameters()])
    exact = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert relative_error(ours, exact) < 0.02
    assert not torch.equal(model[1].given[1], model[1].given[0])  # it was coded
    assert torch.equal(out, model(x))


def test_leaves_and_small_inputs_stay_exact_in_a_stack():
    for x in (torch.randn(4, 16, WIDTH, requires_grad=True), activation(2, WIDTH)):
        blocks = stack_of(1)
        checkpoint_stack(blocks, x).sum().backward()
        assert torch.equal(*blocks[0].given)


def test_wrong_arguments():
    x = activation()
    for storage in ("delta-int8", "delta-int4"):
        with pytest.raises(ValueError, match="needs checkpoint_stack or checkpoint_sequential"):
            checkpoint(torch.sin, x, storage=storage)
    for keyframe_every in (0, -1, 2.5):
        with pytest.raises(ValueError, match="keyframe_every must be an integer of at least 1"):
            checkpoint_stack([torch.sin], x, keyframe_every=keyframe_every)
    with pytest.raises(ValueError, match="storage must be one of"):
        checkpoint_stack([torch.sin], x, storage="delta-int2")
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        checkpoint_stack([torch.sin], x, use_reentrant=True)
