"""torch.compile and torch.export: ops and scaler trace without graph breaks, checkpoint compiles, and what
cannot be exported says so."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fastamp
from fastamp import ops, patching
from fastamp.checkpointing import checkpoint

BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    fastamp.unpatch()


def compiled(function, backend=BACKEND):
    return torch.compile(function, fullgraph=True, backend=backend)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


def grads() -> list[torch.Tensor]:
    return [torch.arange(5.0), torch.full((2, 3), 3.0), torch.tensor([1.0, float("inf")])]


# ---- ops ---------------------------------------------------------------------------------------------------


def _unscale(tensors, found_inf):
    ops.unscale_(tensors, found_inf, scalar(0.3))
    return [t + 1 for t in tensors], found_inf + 1


def _check(tensors, found_inf):
    ops.check_(tensors, found_inf)
    return found_inf + 1


def _unscale_norm(tensors, found_inf):
    total, norms = ops.unscale_norm_(tensors, found_inf, scalar(0.3))
    return total * 2, norms * 2, found_inf + 1


def _clip(tensors, found_inf):
    ops.clip_(tensors, ops.clip_coefficient(torch.tensor(7.0), 2.0))
    return [t + 1 for t in tensors]


def _accumulate(tensors, found_inf):
    main = [torch.ones_like(t) for t in tensors]
    ops.accumulate_(main, tensors, found_inf, scalar(0.3))
    return [m * 2 for m in main], found_inf + 1


def _update_scale(tensors, found_inf):
    scale, tracker = torch.tensor(1024.0), torch.tensor(3, dtype=torch.int32)
    ops.update_scale_(scale, tracker, [found_inf], 2.0, 0.5, 4, min_scale=1.0)
    return scale * 2, tracker + 1


def _scale_losses(tensors, found_inf):
    return ops.scale_losses([tensors[0], tensors[1].sum().bfloat16()], scalar(1024.0))


def _quantize(tensors, found_inf):
    packed, scales = ops.quantize_blockwise(tensors[0] * 2, "int8", 32)
    return packed.float() + 1, scales * 2, ops.dequantize_blockwise(packed, scales, (5,), torch.float32) * 2


def _pack_bits(tensors, found_inf):
    packed = ops.pack_bits(tensors[0] > 2)
    return packed + 1, ops.unpack_bits(packed, (5,)).logical_not()


@pytest.mark.parametrize(
    "function",
    [_unscale, _check, _unscale_norm, _clip, _accumulate, _update_scale, _scale_losses, _quantize, _pack_bits],
    ids=lambda function: function.__name__[1:],
)
def test_ops_compile_without_graph_breaks(function):
    eager_inputs, compiled_inputs = (grads(), torch.zeros(())), (grads(), torch.zeros(()))
    expected = function(*eager_inputs)
    result = compiled(function)(*compiled_inputs)
    assert torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True) is None
    # What the op writes in place reaches the caller's tensors too.
    assert torch.testing.assert_close(compiled_inputs, eager_inputs, rtol=0, atol=0, equal_nan=True) is None


@pytest.mark.slow
def test_ops_compile_with_inductor():
    inputs = grads(), torch.zeros(())
    expected = _unscale_norm(grads(), torch.zeros(()))
    result = compiled(_unscale_norm, backend="inductor")(*inputs)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


# ---- the scaler --------------------------------------------------------------------------------------------


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    return model, [torch.randn(4, 8) for _ in range(5)]


def train(wrap, **policies):
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, **policies)

    def loss_of(x, factor):
        return scaler.scale(model(x).square().mean() * factor)

    loss_of = wrap(loss_of)
    for step, x in enumerate(data):
        optimizer.zero_grad()
        loss_of(x, torch.tensor(float("inf") if step == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters()), scaler


@pytest.mark.parametrize("policies", [{}, {"min_scale": 1.0, "hysteresis": 2}], ids=["torch's", "policies"])
def test_scale_inside_a_compiled_step(policies):
    expected, eager_scaler = train(lambda function: function, **policies)
    result, scaler = train(compiled, **policies)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert scaler.state_dict() == eager_scaler.state_dict()
    assert scaler.get_scale() == (2048.0 if policies else 1024.0)


def test_scale_keeps_the_scales_identity():
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scale = compiled(scaler.scale)
    assert scale(torch.ones(3)).tolist() == [4.0] * 3
    before = scaler._scale
    before.fill_(8.0)
    assert scale(torch.ones(3)).tolist() == [8.0] * 3 and scaler._scale is before


# ---- checkpoint --------------------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self, call, **kwargs):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.call, self.kwargs = call, kwargs

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x, **self.kwargs)
        return x.sum()


def gradients(model, x):
    model(x).backward()
    return [p.grad for p in model.parameters()]


CALLS = {
    "default": (checkpoint, {}),
    "options": (
        checkpoint,
        {"preserve_rng_state": False, "determinism_check": "none", "early_stop": False, "storage": "bf16"},
    ),
    "torch's name": (lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False), {}),
    # A model keeps it after unpatch().
    "stand-in": (patching.checkpoint, {"use_reentrant": False}),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("is_patched", [False, True], ids=["", "patched"])
def test_checkpoint_inside_a_compiled_model(case, is_patched):
    torch.manual_seed(0)
    call, kwargs = CALLS[case]
    model = Network(call, **kwargs)
    x = torch.randn(4, 16, requires_grad=True)
    plain = Network(lambda layer, x: layer(x))
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    expected = gradients(plain, x)
    if is_patched:
        fastamp.patch(storage="bf16")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

    result = gradients(compiled(model, backend), x)
    for mine, truth in zip(result, expected, strict=True):
        torch.testing.assert_close(mine, truth)
    # The compiler saw checkpoints, one a layer, in one graph.
    assert len(graphs) == 1
    hops = [node for node in graphs[0].graph.nodes if str(node.target) == "tag_activation_checkpoint"]
    assert len(hops) == 3


def test_checkpoint_with_dropout_recomputes_the_same_mask():
    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    y = compiled(lambda x: checkpoint(lambda x: nn.functional.dropout(x.sin(), 0.5), x))(x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y.detach() != 0) and 0 < (y != 0).sum() < 1000


# ---- export ------------------------------------------------------------------------------------------------

STRICT = pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])


@STRICT
def test_export_refuses_the_scaler(strict):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaler = fastamp.GradScaler("cpu")

        def forward(self, x):
            return self.scaler.scale(x.sum())

    with pytest.raises(Exception, match=r"GradScaler\.scale: cannot be exported, because the scale changes"):
        torch.export.export(Scaled(), (torch.ones(3),), strict=strict)


@STRICT
def test_export_takes_a_checkpoint_for_its_function(strict):
    model = Network(checkpoint, storage="bf16")
    x = torch.randn(4, 16)
    program = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(program.module()(x), model(x))
    assert "checkpoint" not in program.graph_module.code


@STRICT
def test_export_takes_ops_for_what_they_are(strict):
    class Unscale(nn.Module):
        def forward(self, x):
            found_inf = torch.zeros(())
            grads = [x.clone()]
            ops.unscale_(grads, found_inf, torch.full((), 0.5))
            return grads[0], found_inf

    program = torch.export.export(Unscale(), (torch.ones(3),), strict=strict)
    value, found_inf = program.module()(torch.tensor([2.0, 4.0, float("inf")]))
    assert value.tolist() == [1.0, 2.0, float("inf")] and found_inf.item() == 1.0
