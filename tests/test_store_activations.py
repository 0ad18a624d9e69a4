"""store_activations: what is kept, in how many bytes, and that backward gets it back."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

import fastamp
from fastamp import _offload
from fastamp.checkpointing import checkpoint, checkpoint_stack
from fastamp.store import StorageStats

APPROXIMATE = ["bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int4"]
TOLERANCE = {
    "exact": 0.0,
    "bf16": 5e-3,
    "fp16": 1e-3,
    "int8": 1e-2,
    "fp8_e4m3": 5e-2,
    "fp8_e5m2": 1e-1,
    "int4": 2e-1,
}


class Model(nn.Module):
    """A transformer block, with everything that a region must tell apart."""

    def __init__(self, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


def gradients(model: nn.Module, x: Tensor, context=None, run=None) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of parameters and input, under the same random state each time."""
    torch.manual_seed(7)
    x = x.detach().clone().requires_grad_()
    with context if context is not None else contextlib.nullcontext():
        output = (run or nn.Module.__call__)(model, x * 1.0)
        loss = output.pow(2).mean()
    return output.detach(), list(torch.autograd.grad(loss, [x, *model.parameters()]))


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    a, b = (torch.cat([tensor.flatten().double() for tensor in tensors]) for tensors in (found, expected))
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1))


def made(*shape: int, seed: int = 3, **kwargs) -> tuple[Tensor, Tensor]:
    """A leaf, and an activation made of it that has the same values."""
    leaf = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **kwargs).requires_grad_()
    return leaf, leaf * 1.0


class _Save(torch.autograd.Function):
    """Saves its input and shows what it gets back."""

    seen: Tensor

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.zeros(())

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (_Save.seen,) = ctx.saved_tensors
        return torch.zeros_like(_Save.seen)


def roundtrip(x: Tensor, *args, **kwargs) -> tuple[Tensor, StorageStats]:
    """x as backward sees it."""
    with fastamp.store_activations(*args, **kwargs) as stats:
        y = _Save.apply(x)
    y.backward(retain_graph=True)
    return _Save.seen, stats


# --- values and gradients


def test_exact_is_bit_identical_and_smaller(model, x):
    expected = gradients(model, x)
    context = fastamp.store_activations("exact")
    with context as stats:
        found = gradients(model, x)
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, found[1], expected[1]))
    assert stats.kinds["masks"].before == 2 * x.nbytes
    assert stats.kinds["masks"].after == 2 * (x.nbytes // 32 + 4)
    assert stats.before - stats.after == stats.kinds["masks"].before - stats.kinds["masks"].after


@pytest.mark.parametrize("format", APPROXIMATE)
def test_formats(model, x, format):
    expected = gradients(model, x)
    with fastamp.store_activations(format) as stats:
        found = gradients(model, x)
    assert torch.equal(found[0], expected[0])
    assert 0 < error(found[1], expected[1]) < TOLERANCE[format]
    bits = {"bf16": 16, "fp16": 16, "int4": 4}.get(format, 8)
    kind = stats.kinds[format]
    assert kind.after * 32 == kind.before * bits
    if bits < 16:
        assert stats.kinds["scales"].after == kind.before // (64 if format == "int4" else 128)


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "fp8_e5m2", "int4", "bf16", "fp16", "exact"])
def test_non_finite_values_survive(format):
    leaf, _ = made(64, 64)
    with torch.no_grad():
        leaf[0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    seen, _ = roundtrip(leaf * 1.0, format)
    assert seen[0, 0] == float("inf") and seen[0, 1] == float("-inf") and seen[0, 2].isnan()
    torch.testing.assert_close(seen[0, 3:], leaf[0, 3:], rtol=TOLERANCE[format] * 2, atol=TOLERANCE[format] * 3)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU])
@pytest.mark.parametrize("format, limit", [("int8", 0.02), ("int4", 0.2)])
def test_convolutions_whose_gradients_hang_on_signs(activation, format, limit):
    """Values that are positive and small must not become 0, where ReLU's gradient stops."""
    torch.manual_seed(0)
    widths = [3, 16, 32, 32]
    model = nn.Sequential(
        *[
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), activation())
            for before, after in itertools.pairwise(widths)
        ]
    )
    x = torch.randn(4, 3, 16, 16)
    expected = gradients(model, x)
    with fastamp.store_activations(format):
        found = gradients(model, x)
    assert 0 < error(found[1], expected[1]) < limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_activations(dtype):
    _, x = made(64, 64, dtype=dtype)
    seen, stats = roundtrip(x, "int8")
    assert seen.dtype is dtype and stats.kinds["int8"].after * 2 == x.nbytes
    torch.testing.assert_close(seen, x, rtol=0, atol=0.03)
    seen, stats = roundtrip(x, "bf16")  # would not become smaller
    assert torch.equal(seen, x) and "bf16" not in stats.kinds


# --- what is kept as it is


def test_parameters_are_kept_by_identity(model, x):
    with fastamp.store_activations("int8") as stats:
        output = model(x.requires_grad_())
    names = [name for name, parameter in model.named_parameters() if "weight" in name]
    node, saved = output.grad_fn, []
    while node is not None:
        if node.name() == "AddmmBackward0":
            saved.append(node._saved_mat2.untyped_storage()._cdata)
        node = next((n for n, _ in node.next_functions if n is not None and n.next_functions), None)
    assert set(saved) <= {p.untyped_storage()._cdata for p in model.parameters()} and saved
    parameters = stats.kinds["parameters"]
    assert parameters.count >= len(names) and parameters.before == parameters.after


def test_frozen_parameters_and_leaves_are_kept(x):
    weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    x.requires_grad_()
    with fastamp.store_activations("int8") as stats:
        (x @ weight).sum().backward()
        (x * torch.ones(64, 64)).sum().backward()
    assert set(stats.kinds) == {"parameters", "kept"}
    assert stats.kinds["kept"].after == 64 * 64 * 4


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.log_softmax(x, -1),
        lambda x: x.logsumexp(-1),
        lambda x: x.abs().add(1).sqrt(),
        lambda x: x.abs().add(1).rsqrt(),
        lambda x: x.add(10).reciprocal(),
        lambda x: torch.cdist(x, x + 1),
        lambda x: F.pdist(x),
        lambda x: F.ctc_loss(
            x.view(4, 128, 32).log_softmax(-1),
            torch.ones(128, 2, dtype=torch.long),
            (4,) * 128,
            (2,) * 128,
            reduction="none",
        ),
    ],
)
def test_sensitive_results_are_exact(function):
    _, x = made(128, 128)
    result = function(x)
    seen, _ = roundtrip(result, "int8", min_bytes=64)
    assert torch.equal(seen, result)
    # The view of one is one.
    seen, _ = roundtrip(function(x).unsqueeze(0), "int8", min_bytes=64)
    assert torch.equal(seen[0], function(x))


def policy_ratio(x: Tensor) -> Tensor:
    """Exact where small: the gathered probabilities, by whose inverse softmax's backward multiplies all of them."""
    p = (3 * x).softmax(-1).gather(1, torch.arange(len(x)).unsqueeze(1))
    return (p / p.detach()).mean()


HIDDEN = torch.rand(64, 512, generator=torch.Generator().manual_seed(5)) < 0.3


FAR_BELOW = {
    "a policy's ratio of probabilities": policy_ratio,
    "a log of probabilities": lambda x: -((3 * x).softmax(-1)[:, :3] + 1e-8).log().mean(),
    "an entropy": lambda x: -((p := (3 * x).softmax(-1)) * (p + 1e-12).log()).sum(-1).mean(),
    "beside -1e4": lambda x: (3 * x).masked_fill(HIDDEN, -1e4).logsumexp(-1).mean(),
    "beside float32's least": lambda x: (3 * x).masked_fill(HIDDEN, -3.4e38).logsumexp(-1).mean(),
    "ReLU beside an outlier": lambda x: torch.cat([(x * 1.0).relu(), 1e4 + 0 * x[:, :64]], 1).square().sum(),
}


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("case", FAR_BELOW)
def test_values_far_below_the_largest_of_their_block(format, case):
    """They may be lost, for an error of about 1; what stands in for them must not be more than they were."""
    function = FAR_BELOW[case]
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)).requires_grad_()
    (expected,) = torch.autograd.grad(function(x), x)
    with fastamp.store_activations(format):
        loss = function(x)
    (found,) = torch.autograd.grad(loss, x)
    assert found.isfinite().all() and error([found], [expected]) <= 1.0


WITH_THEIR_INPUT = {
    "logsumexp": (lambda x: (x * 30).logsumexp(-1), dict(bf16=0.1, int8=0.1, fp8_e4m3=0.5, int4=1.0)),
    "logsumexp, kept dims": (
        lambda x: (x * 30).view(8, 8, 512).logsumexp((0, -1), keepdim=True),
        dict(bf16=0.1, int8=0.1, fp8_e4m3=0.5, int4=1.0),
    ),
    "logcumsumexp": (lambda x: (x * 30).logcumsumexp(-1), dict(bf16=0.1, int8=0.1, fp8_e4m3=0.5, int4=1.0)),
    "amax": (lambda x: (x * 1.0).amax(-1), dict(bf16=1.0, int8=0.5, fp8_e4m3=1.0, int4=1.0)),
    "amin of all": (lambda x: (x * 1.0).amin(), dict(bf16=1.0, int8=1.0, fp8_e4m3=1.0, int4=1.0)),
    "aminmax": (lambda x: sum((x * 1.0).aminmax(dim=-1)), dict(bf16=1.0, int8=0.5, fp8_e4m3=1.0, int4=1.0)),
    "max": (lambda x: (x * 1.0).max(), dict(bf16=1.0, int8=1.0, fp8_e4m3=1.0, int4=1.0)),
    "min": (lambda x: (x * 1.0).min(), dict(bf16=1.0, int8=1.0, fp8_e4m3=1.0, int4=1.0)),
    "infinity norm": (
        lambda x: torch.linalg.vector_norm(x * 1.0, float("inf"), dim=-1),
        dict(bf16=1.0, int8=0.5, fp8_e4m3=1.0, int4=1.0),
    ),
    "norm": (lambda x: (x * 1.0).norm(dim=0), dict(bf16=0.01, int8=0.02, fp8_e4m3=0.1, int4=0.3)),
}


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("case", WITH_THEIR_INPUT)
def test_results_belong_to_what_is_stored(format, case):
    """exp(x - logsumexp(x)) is off by a power of the rounding if only x is rounded; x == amax(x) holds nowhere."""
    function, limits = WITH_THEIR_INPUT[case]
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)).requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    with fastamp.store_activations(format):
        result = function(x)
    assert torch.equal(result, function(x))
    (found,) = torch.autograd.grad(result.sum(), x)
    assert error([found], [expected]) <= limits[format]
    # Every extremum has its gradient, shared where several values became equal.
    if "sumexp" not in case and case != "norm":
        torch.testing.assert_close(found.abs().sum(), expected.abs().sum(), rtol=1e-3, atol=0)


def test_what_others_save_of_such_a_result_is_exact():
    """Only the operator itself needs it to belong to its input; and it is computed again for that one alone."""
    _, y = made(64, 64)
    with fastamp.store_activations("int8", min_bytes=64) as stats:
        result = (30 * y).logsumexp(0)
        shown = _Save.apply(result)
        loss = (result * result).sum() + shown.sum()
    loss.backward()
    assert torch.equal(_Save.seen, result)
    assert stats.kinds["kept"].count == 2 and stats.kinds["duplicates"].count >= 2


def test_a_result_written_after_it_was_saved_raises():
    _, y = made(64, 64)
    with fastamp.store_activations("int8"):
        result = y.logsumexp(0)
        result.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_statistics_are_exact():
    x = torch.randn(2048, 32).requires_grad_()
    packed = []
    with fastamp.store_activations(lambda tensor, context: packed.append((tensor.shape, context.name)) or "int8"):
        F.layer_norm(x * 1, (32,), torch.ones(32))
        q = (x * 1).view(1, 1, 2048, 32)
        F.scaled_dot_product_attention(q, q, q)
    assert [shape for shape, _ in packed if shape.numel() <= 2048] == []
    assert ((2048, 32), "MulBackward0") in packed
    mean = torch.var_mean(x * 1, 1)[1]
    seen, _ = roundtrip(mean, "int8")
    assert torch.equal(seen, mean)


def test_integers_complex_double_and_small():
    leaf, x = made(64, 64)
    index = torch.randint(64, (4096,))
    with fastamp.store_activations("int8") as stats:
        y = x[index].sum()
    assert set(stats.kinds) == {"kept"}
    y.backward()
    expected = torch.bincount(index, minlength=64).float()[:, None].expand(64, 64)
    assert torch.equal(leaf.grad, expected)
    for dtype in (torch.complex64, torch.float64):
        _, x = made(64, 64, dtype=dtype)
        seen, stats = roundtrip(x, "int8")
        assert torch.equal(seen, x) and set(stats.kinds) == {"kept"}
    _, x = made(64, 64)
    seen, stats = roundtrip(x, "int8", min_bytes=x.nbytes + 1)
    assert torch.equal(seen, x) and set(stats.kinds) == {"kept"}
    seen, stats = roundtrip(x, "int8", min_bytes=x.nbytes)
    assert not torch.equal(seen, x) and "int8" in stats.kinds


def test_never():
    leaf, x = made(64, 64)
    for never in (x, [x], lambda tensor: tensor.shape[-1] == 64, [leaf, lambda tensor: tensor.grad_fn is not None]):
        seen, stats = roundtrip(x, "int8", never=never)
        assert torch.equal(seen, x) and "int8" not in stats.kinds
    seen, _ = roundtrip(x.view(-1), "int8", never=x)
    assert torch.equal(seen, x.view(-1))
    seen, _ = roundtrip(x * 1, "int8", never=x)
    assert not torch.equal(seen, x)


def test_autocast_copies_of_weights_are_exact():
    layer = nn.Linear(64, 64)
    x = torch.randn(128, 64)
    names = []
    with fastamp.store_activations(lambda t, c: names.append(c.name) or "int8"), torch.autocast("cpu", torch.bfloat16):
        layer(torch.relu(layer(x))).sum().backward()
    assert "ReluBackward0" in names and "ToCopyBackward0" not in names and "TBackward0" not in names


def test_subclasses_pass_through():
    leaf = torch.randn(64, 64)
    x = TwoTensor(leaf, leaf.clone()).requires_grad_()
    with fastamp.store_activations("int8") as stats:
        y = (x * 1.0).exp()
    assert set(stats.kinds) == {"kept"}
    y.sum().backward()
    assert type(x.grad) is TwoTensor
    assert torch.equal(x.grad.a, leaf.exp()) and torch.equal(x.grad.b, leaf.exp())


def test_noise_that_is_filled_after_it_is_saved():
    """RReLU's, which may lie where a dropout mask was before."""
    leaf, _ = made(64, 64)
    mask = torch.full((64, 64), 2.0)
    del mask
    for format in ("exact", "int8"):
        torch.manual_seed(0)
        with fastamp.store_activations(format):
            y = F.rrelu(leaf, training=True).sum()
        (found,) = torch.autograd.grad(y, leaf)
        torch.manual_seed(0)
        (expected,) = torch.autograd.grad(F.rrelu(leaf, training=True).sum(), leaf)
        assert torch.equal(found, expected)


# --- masks


@pytest.mark.parametrize("shape", [(64, 64), (4097,), (3, 5, 7, 41)])
def test_bool_masks(shape):
    mask = torch.rand(shape) > 0.5
    leaf = torch.randn(shape).requires_grad_()
    with fastamp.store_activations(min_bytes=1) as stats:
        y = leaf.masked_fill(mask, 0.0).sum()
    mask_bytes = stats.kinds["masks"]
    assert (mask_bytes.before, mask_bytes.after) == (mask.nbytes, (mask.numel() + 7) // 8)
    y.backward()
    assert torch.equal(leaf.grad, (~mask).float())


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dropout_masks(rate, dtype):
    leaf = torch.randn(64, 64, dtype=dtype).to(memory_format=torch.contiguous_format).requires_grad_()
    torch.manual_seed(5)
    with fastamp.store_activations("int8") as stats:
        y = F.dropout(leaf, rate)
    (found,) = torch.autograd.grad(y.sum(), leaf)
    torch.manual_seed(5)
    (expected,) = torch.autograd.grad(F.dropout(leaf, rate).sum(), leaf)
    assert torch.equal(found, expected)
    if rate < 1:
        assert stats.kinds["masks"].after == leaf.numel() // 8 + dtype.itemsize


def test_written_tensors_that_are_no_masks():
    data = torch.randn(64, 64)
    data.mul_(2)
    leaf = torch.randn(64, 64).requires_grad_()
    with fastamp.store_activations("int8") as stats:
        (leaf * data).sum().backward()
    assert torch.equal(leaf.grad, data) and "masks" not in stats.kinds


# --- one payload a memory, and views


def test_views_share_a_payload():
    _, x = made(64, 3, 64)
    q, k, v = x.permute(1, 0, 2).unbind()
    with fastamp.store_activations("int8") as stats:
        ys = [_Save.apply(part) for part in (q, k, v, x, x.view(-1), x.flip(0))]
    assert stats.kinds["int8"].count == 2  # x and its flipped copy
    assert stats.kinds["duplicates"].count == 4
    assert stats.before == 2 * x.nbytes and stats.after == 2 * (x.numel() + x.numel() // 32)
    dense = []
    for part, y in zip((q, k, v, x, x.view(-1)), ys, strict=False):
        y.backward(retain_graph=True)
        seen = _Save.seen
        assert (seen.shape, seen.stride(), seen.storage_offset()) == (part.shape, part.stride(), part.storage_offset())
        torch.testing.assert_close(seen, part, rtol=0, atol=0.03)
        dense.append(seen)
    assert len({seen.untyped_storage()._cdata for seen in dense}) == 1  # decoded once while it is used


def test_small_view_of_a_large_memory():
    _, x = made(64, 16, 64)
    with fastamp.store_activations("int8", min_bytes=64) as stats:
        y = _Save.apply(x[:, 3])
        other = _Save.apply(x[:, 5])
    assert stats.kinds["int8"].after == 2 * 64 * 64
    assert stats.before == x.nbytes  # plain autograd would hold it all, once
    other.backward(retain_graph=True)
    torch.testing.assert_close(_Save.seen, x[:, 5], rtol=0, atol=0.03)
    y.backward()
    assert _Save.seen.stride() == x[:, 3].stride()
    torch.testing.assert_close(_Save.seen, x[:, 3], rtol=0, atol=0.03)


@pytest.mark.parametrize("format", ["exact", "int8", "int4", "bf16"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:, 1:],
        lambda x: x[5:60, 3:],
        lambda x: x.unsqueeze(1).expand(64, 3, 64),
        lambda x: x[0, 0],
        lambda x: x[:0],
        lambda x: x.view(4, 4, 16, 16).to(memory_format=torch.channels_last),
        lambda x: x.view(2, 2, 4, 16, 16).to(memory_format=torch.channels_last_3d),
        lambda x: x.diagonal(),
        lambda x: x.unfold(0, 8, 4),
        lambda x: torch.stack([x, x]).movedim(0, -1),
    ],
)
def test_layouts(view, format):
    _, x = made(64, 64)
    x = view(x)
    seen, _ = roundtrip(x, format, min_bytes=1)
    assert (seen.shape, seen.dtype) == (x.shape, x.dtype)
    if x.numel() > 1:
        assert seen.stride() == x.stride()
    torch.testing.assert_close(seen, x, rtol=0, atol=4 * TOLERANCE[format])
    if x.numel() > 1 and format != "exact":
        assert not torch.equal(seen, x)


@pytest.mark.parametrize("format", ["exact", "bf16", "int8"])
def test_windows_that_overlap_cost_no_more_than_their_memory(format):
    mask = torch.rand(2048, 64) > 0.5
    w = torch.randn(64, 4)
    leaf, x = made(2048, 64)
    with fastamp.store_activations(format) as stats:
        loss = sum((x[t : t + 64] @ w.requires_grad_()).sum() for t in range(0, 1984, 7))
        loss = loss + sum(x[:t].sin().sum() for t in range(100, 2048, 50))
        loss = loss + sum((leaf[:64] * 2.0).masked_fill(mask[t : t + 64], 0.0).sum() for t in range(0, 1984, 7))
    plain = x.nbytes + mask.nbytes + sum(p.nbytes for p in (w,))
    assert stats.peak_held <= 1.3 * plain and stats.after <= 1.3 * plain
    found = torch.autograd.grad(loss, w)[0]
    expected = torch.autograd.grad(sum((x[t : t + 64] @ w).sum() for t in range(0, 1984, 7)), w)[0]
    assert error([found], [expected]) <= TOLERANCE[format]


@pytest.mark.parametrize("format", ["exact", "int8"])
def test_memory_of_a_frozen_parameter_can_be_taken_away(format):
    """As ZeRO-3 and offloading do, between forward and backward and back again."""
    frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    leaf, x = made(64, 64)
    with fastamp.store_activations(format):
        loss = (x @ frozen).sum()
    memory, values = StorageWeakRef(frozen.untyped_storage()), frozen.data.clone()
    frozen.data = torch.empty(0)
    assert memory.expired()
    frozen.data = values
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], torch.ones(64, 64) @ values.T)


def test_addresses_are_not_identity():
    """Memory that is freed and used again, for sure, is other memory."""
    arena = torch.empty(64, 64)
    with fastamp.store_activations("int8") as stats:
        losses = []
        for value in range(20):
            # A new storage at the old address; numpy keeps the memory.
            x = torch.from_numpy(arena.numpy()).fill_(value).requires_grad_().view_as(arena)
            losses.append(_Save.apply(_Anew.apply(x)))
            del x
    assert stats.kinds["int8"].count == 20
    for value, loss in enumerate(losses):
        loss.backward()
        torch.testing.assert_close(_Save.seen, torch.full((64, 64), float(value)))


class _Anew(torch.autograd.Function):
    """x's memory as another storage."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy())

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def test_many_memories_are_forgotten():
    leaf, _ = made(32, 32)
    with fastamp.store_activations("int8") as stats:
        for _ in range(2000):
            y = (leaf * 1).exp().sum()
        del y
        assert stats.held == 0
    assert stats.kinds["int8"].count == 2000


def test_dense_memory_is_freed():
    _, x = made(64, 64)
    reference = StorageWeakRef(x.untyped_storage())
    with fastamp.store_activations("int8") as stats:
        y = _Save.apply(x)
        assert not reference.expired()
        del x
        assert reference.expired()
    assert stats.held == stats.after
    y.backward(retain_graph=True)
    reference = StorageWeakRef(_Save.seen.untyped_storage())
    assert not reference.expired()
    _Save.seen = torch.empty(0)
    assert reference.expired()  # what was decoded is not cached either
    assert stats.peak_unpacked == 64 * 64 * 4
    del y
    assert stats.held == 0 and stats.peak_held == stats.after


@pytest.mark.parametrize("format", ["exact", "int8"])
def test_no_reference_cycles(model, x, format):
    gc.collect()
    gc.disable()
    try:
        with fastamp.store_activations(format) as stats:
            y = model(x.requires_grad_()).exp().tanh().sum()
        assert stats.held == stats.after
        del y
        assert stats.held == 0
    finally:
        gc.enable()


def test_held_is_what_tensors_hold(model, x):
    """The count, against the memories of all tensors that exist."""

    def alive() -> dict[int, int]:
        gc.collect()
        memories = (
            item.untyped_storage() for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter) and item.is_cpu
        )
        return {memory._cdata: memory.nbytes() for memory in memories}

    x.requires_grad_()
    before = alive()
    with fastamp.store_activations("int8") as stats:
        y = model(x * 1)
    # Payloads live in Python objects; statistics and the like are alive as aliases of the handles.
    new = {key: nbytes for key, nbytes in alive().items() if key not in before}
    new.pop(y.untyped_storage()._cdata)
    assert sum(new.values()) == stats.held


# --- in-place writes


@pytest.mark.parametrize("format", ["exact", "int8"])
@pytest.mark.parametrize("write_through", ["tensor", "view", "base"])
def test_in_place_write_raises(format, write_through):
    _, base = made(64, 64)
    x = base.view(-1) if write_through == "base" else base
    with fastamp.store_activations(format):
        y = (x * x).sum()
    with torch.no_grad():
        {"tensor": x, "view": x.view(-1)[:1], "base": base}[write_through].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*at version 1, expected 0"):
        y.backward()


def test_in_place_write_to_parameter_and_mask_raises():
    weight = nn.Parameter(torch.randn(64, 64))
    mask = torch.rand(64, 64) > 0.5
    with fastamp.store_activations("int8"):
        y = (torch.randn(64, 64) * weight * weight).sum()
        z = weight.masked_fill(mask, 0).sum()
    with torch.no_grad():
        weight.add_(1)
    mask.logical_not_()
    for result in (y, z):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


def test_saved_again_after_a_write():
    """Two versions of one memory are two payloads, and the older cannot be served."""
    _, x = made(64, 64)
    with fastamp.store_activations("int8") as stats:
        first = _Save.apply(x)
        x = x.add_(100)
        second = _Save.apply(x)
    assert stats.kinds["int8"].count == 2
    second.backward(retain_graph=True)
    torch.testing.assert_close(_Save.seen, x, rtol=0, atol=0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        first.backward()


# --- autograd's ways


def test_retain_graph_and_twice_without(model, x):
    with fastamp.store_activations("int8"):
        loss = model(x.requires_grad_()).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward():
    leaf, _ = made(64, 64)

    def second(context) -> Tensor:
        with context:
            y = (leaf * 1.0).tanh().pow(2).sum()
            (grad,) = torch.autograd.grad(y, leaf, create_graph=True)
            return torch.autograd.grad(grad.pow(2).sum(), leaf)[0]

    expected = second(contextlib.nullcontext())
    assert torch.equal(second(fastamp.store_activations("exact")), expected)
    assert 0 < error([second(fastamp.store_activations("int8"))], [expected]) < 0.05


def test_no_grad_and_empty():
    with fastamp.store_activations("int8") as stats, torch.no_grad():
        made(64, 64)[1].exp()
    assert stats.kinds == {} and stats.ratio == 1.0
    assert "total" in str(stats)


def test_backward_in_other_threads(model, x):
    expected = gradients(model, x, fastamp.store_activations("int8"))[1]
    torch.manual_seed(7)
    x = x.requires_grad_()
    with fastamp.store_activations("int8"):
        loss = model(x * 1.0).pow(2).mean()
    found: list = []

    def backward() -> None:
        found.append(torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True))

    threads = [threading.Thread(target=backward) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, expected, strict=True))


def test_regions_are_per_thread():
    seen = []

    def other() -> None:
        seen.append(torch._C._autograd._top_saved_tensors_default_hooks(False))

    with fastamp.store_activations("int8"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [None]


def test_exception_in_the_region(model, x):
    with pytest.raises(ZeroDivisionError), fastamp.store_activations("int8"):
        model(x.requires_grad_())
        raise ZeroDivisionError
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_failed_pack_leaves_tensors_intact(model, x):
    expected = gradients(model, x)
    calls = []

    def policy(tensor: Tensor, context) -> str:
        calls.append(context.name)
        return "int8" if len(calls) < 4 else "int7"

    x.requires_grad_()
    before = x.clone()
    with fastamp.store_activations(policy) as stats:
        hidden = x * 1.0
        kept = hidden.clone()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"policy must return one of exact, .*got 'int7' for \w+Backward0"):
                model(hidden)
        assert torch.equal(hidden, kept) and torch.equal(x, before)
    gc.collect()
    assert stats.held == 0
    found = gradients(model, x, fastamp.store_activations("exact"))
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))


def test_policy():
    _, x = made(64, 64)
    asked = []

    def policy(tensor: Tensor, context) -> str:
        asked.append((tensor is x, context.name))
        return "int4" if context.name == "TanhBackward0" else "exact"

    with fastamp.store_activations(policy) as stats:
        (x.exp() * x.tanh()).sum().backward()
    assert stats.kinds["int4"].count == 1
    assert {name for _, name in asked} == {"ExpBackward0", "TanhBackward0"}


@pytest.mark.parametrize(
    ("error_type", "match", "arguments"),
    [
        (ValueError, "storage must be one of exact.*got 'int7'", {"format": "int7"}),
        (TypeError, "a format's name or a callable", {"format": 8}),
        (TypeError, "min_bytes must be an int, got float", {"min_bytes": 0.5}),
        (ValueError, "min_bytes must not be negative, got -1", {"min_bytes": -1}),
        (ValueError, "offload must be None or 'cpu', got 'disk'", {"offload": "disk"}),
        (TypeError, "never must hold tensors or predicates, got int", {"never": 3}),
        (TypeError, "never must hold tensors or predicates, got str", {"never": ["weights"]}),
    ],
)
def test_bad_arguments(error_type, match, arguments):
    with pytest.raises(error_type, match=match):
        fastamp.store_activations(**arguments)


# --- with other hooks


def around(outer, inner):
    """A context manager of two."""

    @contextlib.contextmanager
    def both():
        with outer() as first, inner() as second:
            yield first, second

    return both()


def store() -> contextlib.AbstractContextManager:
    return fastamp.store_activations("int8")


def torchs(model: nn.Module, x: Tensor) -> Tensor:
    return torch_checkpoint.checkpoint(model, x, use_reentrant=False)


def torchs_reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return torch_checkpoint.checkpoint(model, x, use_reentrant=True)


@pytest.mark.parametrize("run", [torchs, torchs_reentrant, checkpoint])
def test_around_a_checkpoint(model, x, run):
    """The checkpoint's input is what is stored."""
    torch.manual_seed(7)
    leaf = x.clone().requires_grad_()
    with fastamp.store_activations("int8") as stats:
        loss = run(model, leaf * 1.0).pow(2).mean()
    loss.backward()
    found = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    _, expected = gradients(model, x)
    assert 0 < error(found, expected) < 1e-2
    assert stats.kinds["int8"].before == 2 * x.nbytes  # the block's input, and what pow saves
    assert stats.before < 3 * x.nbytes


@pytest.mark.parametrize("run", [torchs, checkpoint])
@pytest.mark.parametrize("format", ["exact", "int8"])
def test_inside_a_checkpoint(model, x, run, format):
    """The innermost hooks decide: the region keeps its tensors."""
    _, expected = gradients(model, x, fastamp.store_activations(format))
    calls = []

    def inside(x: Tensor) -> Tensor:
        calls.append(1)
        with fastamp.store_activations(format):
            return model(x)

    _, found = gradients(model, x, run=lambda model, x: run(inside, x))
    tolerance = 0 if format == "exact" else 1e-2
    assert error(found, expected) <= tolerance
    assert len(calls) == 1


def test_inside_part_of_a_checkpoint(model, x):
    """What the rest of the checkpointed function saves is still recomputed."""
    _, expected = gradients(model, x)

    for run in (torchs, checkpoint):

        def inside(x: Tensor) -> Tensor:
            with fastamp.store_activations("exact"):
                x = model(x)
            return x.tanh()

        def whole(model: nn.Module, x: Tensor) -> Tensor:
            return run(inside, x)  # noqa: B023

        def plain(model: nn.Module, x: Tensor) -> Tensor:
            return model(x).tanh()

        _, expected = gradients(model, x, run=plain)
        _, found = gradients(model, x, run=whole)
        assert all(map(torch.equal, found, expected))


def test_with_save_on_cpu(model, x):
    _, expected = gradients(model, x, fastamp.store_activations("int8"))
    moved: list[int] = []

    class Counting(save_on_cpu):
        def __init__(self) -> None:
            super().__init__()
            pack = self.pack_hook
            self.pack_hook = lambda tensor: moved.append(tensor.nbytes) or pack(tensor)

    context = around(Counting, store)
    _, found = gradients(model, x, context)
    assert all(map(torch.equal, found, expected))
    assert moved and max(moved) < 4 * x.nbytes  # codes, not values
    _, plain = gradients(model, x)
    moved.clear()
    _, found = gradients(model, x, around(store, Counting))  # save_on_cpu decides
    assert all(map(torch.equal, found, plain))
    assert max(moved) == 4 * x.nbytes


def test_outer_hooks_get_codes_and_may_return_views():
    """Also what is kept as it is goes through outer hooks, once a memory."""
    _, x = made(64, 64)
    got = []

    def pack(tensor: Tensor) -> Tensor:
        got.append((tensor.dtype, tensor.numel()))
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:]  # at an offset

    for format, expected in (
        ("int8", [(torch.int8, 4096), (torch.float32, 32)]),
        ("exact", [(torch.float32, 4096)]),
    ):
        got.clear()
        with saved_tensors_hooks(pack, lambda t: t), fastamp.store_activations(format):
            ys = [_Save.apply(x), _Save.apply(x.t())]
        assert got == expected
        ys[1].backward(retain_graph=True)
        torch.testing.assert_close(_Save.seen, x.t(), rtol=0, atol=0.03)


def test_nested_regions(model, x):
    _, expected = gradients(model, x)
    with fastamp.store_activations("int4") as outer, fastamp.store_activations("exact") as inner:
        _, found = gradients(model, x)
    assert all(map(torch.equal, found, expected))
    assert outer.kinds == {} and inner.before > 0
    got = []
    with saved_tensors_hooks(lambda t: got.append(t.dtype) or t, lambda t: t), store(), store():
        _Save.apply(made(64, 64)[1])
    assert got == [torch.int8, torch.float32]


@pytest.mark.parametrize("run_checkpoint", [torch_checkpoint.checkpoint, checkpoint])
def test_with_selective_checkpointing(model, x, run_checkpoint):
    def contexts():
        def policy(ctx, op, *args, **kwargs):
            save = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return (
                torch_checkpoint.CheckpointPolicy.MUST_SAVE
                if save
                else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
            )

        return torch_checkpoint.create_selective_checkpoint_contexts(policy)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        return run_checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    _, expected = gradients(model, x)
    with fastamp.store_activations("exact"):
        _, found = gradients(model, x, run=run)
    assert all(map(torch.equal, found, expected))
    with fastamp.store_activations("int8"):
        _, found = gradients(model, x, run=run)
    assert error(found, expected) < 1e-2

    def inside(x: Tensor) -> Tensor:
        with fastamp.store_activations("exact"):
            return model(x)

    _, found = gradients(
        model,
        x,
        run=lambda model, x: run_checkpoint(inside, x, use_reentrant=False, context_fn=contexts),
    )
    assert all(map(torch.equal, found, expected))


def test_with_torch_compile(x):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    compiled = torch.compile(model, backend="aot_eager")

    @torch.compile(backend="aot_eager")
    def inside(x: Tensor) -> Tensor:
        with fastamp.store_activations("int8"):
            return model(x)

    _, expected = gradients(model, x)
    _, found = gradients(model, x, fastamp.store_activations("exact"), lambda model, x: compiled(x))
    assert error(found, expected) < 1e-6
    _, found = gradients(model, x, fastamp.store_activations("int8"), lambda model, x: compiled(x))
    assert 0 < error(found, expected) < 1e-2
    _, found = gradients(model, x, run=lambda model, x: inside(x))
    assert 0 < error(found, expected) < 1e-2


def test_as_decorator(model, x):
    _, expected = gradients(model, x, fastamp.store_activations("int8"))
    wrapped = fastamp.store_activations("int8")(lambda model, x: model(x))
    _, found = gradients(model, x, run=lambda model, x: wrapped(model, wrapped(nn.Identity(), x)))
    assert error(found, expected) < 1e-2


# --- the table


def test_table(model, x):
    with fastamp.store_activations("int8") as stats:
        model(x.requires_grad_())
    lines = str(stats).splitlines()
    assert lines[0].split() == ["kind", "tensors", "before", "MiB", "after", "MiB", "ratio"]
    kinds = [line.split()[0] for line in lines[1:-1]]
    assert kinds[-3:] == ["total", "parameters", "duplicates"]
    assert set(kinds[:-3]) == {"int8", "scales", "masks", "kept"}
    total = lines[-4].split()
    assert float(total[2]) == pytest.approx(stats.before / 2**20, abs=1e-3)
    assert float(total[3]) == pytest.approx(stats.after / 2**20, abs=1e-3)
    assert "held now" in lines[-1]


# --- offload


def test_offload_does_nothing_to_host_tensors(model, x):
    _, expected = gradients(model, x, fastamp.store_activations("int8"))
    with fastamp.store_activations("int8", offload="cpu") as stats:
        _, found = gradients(model, x)
    assert all(map(torch.equal, found, expected)) and stats.offloaded == 0


class LateSide:
    """A side stream on which nothing runs until somebody waits for it; what is read too early is zeros."""

    def __init__(self) -> None:
        self.queue: list = []
        self.ran = 0
        self.pinned_bytes: list[int] = []

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def to_host(self, source: Tensor, target: Tensor) -> None:
        self.queue.append((target, source))

    def to_device(self, source: Tensor) -> Tensor:
        target = torch.zeros_like(source)
        self.queue.append((target, source))
        return target

    def done(self) -> int:
        return self.ran + len(self.queue)

    def wait(self, event: int, tensor: Tensor | None = None) -> None:
        while self.ran < event:
            target, source = self.queue.pop(0)
            target.copy_(source)
            self.ran += 1


@pytest.fixture
def side() -> LateSide:
    return LateSide()


def test_host_copies_return_what_they_got(side):
    memory = _offload.HostMemory(side)
    tensors = [(torch.randint(-9, 9, (1000 + i,), dtype=torch.int8), torch.randn(8)) for i in range(6)]
    copies = [_offload.HostCopy(parts, memory) for parts in tensors]
    for order in (range(5, -1, -1), range(6), [2, 2, 5, 0, 1, 4]):
        for index in order:
            found = copies[index].unpack_all()
            assert all(map(torch.equal, found, tensors[index]))


def test_host_copies_bound_what_is_under_way(side):
    memory = _offload.HostMemory(side)
    references, copies = [], []
    for _ in range(6):
        tensor = torch.randn(100)
        references.append(StorageWeakRef(tensor.untyped_storage()))
        copies.append(_offload.HostCopy([tensor], memory))
        del tensor
        assert sum(not reference.expired() for reference in references) <= 2
    copies[0].unpack()
    assert all(reference.expired() for reference in references)


def test_host_copies_load_one_ahead(side):
    memory = _offload.HostMemory(side)
    copies = [_offload.HostCopy([torch.full((64,), float(i))], memory) for i in range(4)]
    copies[3].unpack()
    assert len(side.queue) == 1 and memory._ahead[0]() is copies[2]
    queued = side.ran + len(side.queue)
    assert copies[2].unpack()[0] == 2
    assert side.ran == queued  # what was under way was used, not loaded again
    ahead = StorageWeakRef(memory._ahead[1].untyped_storage())
    del copies
    side.wait(side.done())
    assert memory._ahead is None and ahead.expired()


def test_pinned_buffers_are_used_again(side):
    memory = _offload.HostMemory(side)
    for _ in range(3):
        copies = [_offload.HostCopy([torch.randn(64)], memory) for _ in range(5)]
        values = [copy.unpack() for copy in reversed(copies)]
        assert all(bool(value.any()) for value in values)
        del copies
    assert side.pinned_bytes == [512] * 5
    memory.release()
    _offload.HostCopy([torch.randn(64)], memory)
    assert len(side.pinned_bytes) == 6


def test_buffer_reuse_is_ordered_behind_loading(side):
    """A copy that ends while its contents are still on the way back."""
    memory = _offload.HostMemory(side)
    first = _offload.HostCopy([torch.full((64,), 1.0)], memory)
    _offload.HostCopy([torch.full((64,), 9.0)], memory)
    loaded = side.to_device(first.buffer)
    event = side.done()
    del first
    second = _offload.HostCopy([torch.full((64,), 2.0)], memory)
    side.wait(event)
    assert loaded[:256].view(torch.float32)[0] == 1.0
    assert second.unpack()[0] == 2.0


@pytest.fixture
def as_device(side, monkeypatch) -> LateSide:
    """Every tensor is taken for one of a device."""
    memory = _offload.HostMemory(side)
    monkeypatch.setattr(_offload, "_memory_of", lambda device: memory)
    monkeypatch.setattr(_offload, "is_offloadable", lambda tensor: True)
    return side


def test_region_offloads_through_host_memory(model, x, side, as_device):
    _, expected = gradients(model, x, fastamp.store_activations("int8"))
    for _ in range(2):
        with fastamp.store_activations("int8", offload="cpu") as stats:
            _, found = gradients(model, x)
        assert all(map(torch.equal, found, expected))
        assert stats.offloaded >= stats.kinds["int8"].after + stats.kinds["scales"].after
        buffers = len(side.pinned_bytes)
    assert stats.held == 0 and len(side.pinned_bytes) == buffers


@pytest.mark.parametrize("format", ["exact", "bf16", "int8", "delta-int8"])
def test_checkpoint_offloads_through_host_memory(x, side, request, format):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Model() for _ in range(4))

    def run(blocks: nn.Module, x: Tensor, **kwargs) -> Tensor:
        return checkpoint_stack(blocks, x, storage=format, **kwargs)

    _, expected = gradients(blocks, x, run=run)
    _, host = gradients(blocks, x, run=lambda blocks, x: run(blocks, x, offload="cpu"))
    assert not side.pinned_bytes  # host tensors stay where they are
    request.getfixturevalue("as_device")
    for _ in range(2):
        _, found = gradients(blocks, x, run=lambda blocks, x: run(blocks, x, offload="cpu"))
        assert all(map(torch.equal, found, expected)) and all(map(torch.equal, host, expected))
        buffers = len(side.pinned_bytes)
    assert buffers == len(side.pinned_bytes) >= 4


def test_offloaded_checkpoint_sees_in_place_writes(model, x, as_device):
    leaf = x.requires_grad_()
    kept = leaf * 1
    loss = checkpoint(model, kept, offload="cpu").sum()
    with torch.no_grad():
        kept.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_checkpoint_offload(model, x):
    with pytest.raises(ValueError, match="offload must be None or 'cpu', got 'disk'"):
        checkpoint(model, x, offload="disk")
    with pytest.raises(ValueError, match="`offload` is only supported when use_reentrant=False"):
        checkpoint(model, x, offload="cpu", use_reentrant=True)
