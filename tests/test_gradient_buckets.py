"""GradientBuckets in its two implementations: the host module's and the Python twin."""

import gc

import pytest
import torch
from scaler_parity import fill_grads, parameters, same_bits

from fastamp import _gradients, _library

CPU = torch.device("cpu")
TWINS = {"python": _gradients.GradientBuckets}
if _library.host is not None:
    TWINS["host"] = _library.host.GradientBuckets


class Function(torch.Tensor):
    """A subclass by __torch_function__ alone."""


class Dispatch(torch.Tensor):
    """A subclass by __torch_dispatch__."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} must not be called")


def with_grad(grad):
    param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype), requires_grad=False)
    param.grad = grad
    return param


def same(a, b):
    assert a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


@pytest.fixture(params=TWINS)
def buckets(request):
    return TWINS[request.param]


def test_the_host_module_is_tested_where_it_is_built():
    assert ("host" in TWINS) is (_library.host_problem == "")


def test_gathers_in_order(buckets):
    params = parameters(dtypes=(torch.float32, torch.bfloat16, torch.float64))
    fill_grads(params, 0, 1.0)
    params[2].grad = None
    got = buckets([{"params": params[:4]}, {"params": tuple(params[4:])}, {"params": []}])
    assert got.devices == [CPU]
    assert (got.count, got.other, got.first_fp16) == (len(params) - 1, [], None)
    expected = [p.grad for p in params if p.grad is not None]
    assert len(got.grads(CPU)) == len(expected)
    for grad, want in zip(got.grads(CPU), expected, strict=True):
        same(grad, want)


def test_takes_any_iterable_of_groups(buckets):
    group = {"params": [with_grad(torch.ones(2))]}
    for groups in ([group], (group,), iter([group]), {"a": group}.values()):
        assert buckets(groups).count == 1
    assert buckets([]).devices == []


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.ones(2, 2).to_sparse_csr(),
        lambda: torch.ones(3).as_subclass(Function),
        lambda: Dispatch(torch.ones(3)),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["sparse", "csr", "torch_function", "torch_dispatch", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_other(buckets, other):
    grad = other()
    zeros = torch.zeros(grad.shape, device=grad.device)
    param = torch.nn.Parameter(zeros.to_sparse_csr() if grad.layout == torch.sparse_csr else zeros)
    param.grad = grad
    plain = with_grad(torch.ones(2))
    got = buckets([{"params": [plain, param]}])
    assert got.count == 2
    assert len(got.other) == 1 and got.other[0] is param.grad and list(got.other_at) == [(0, 1)]
    assert len(got.grads(CPU)) == 1


def test_a_gradient_that_is_a_parameter_is_plain(buckets):
    param = with_grad(torch.nn.Parameter(torch.ones(3)))
    assert buckets([{"params": [param]}]).other == []


def test_fake_tensors_are_not_plain(buckets):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        param = torch.nn.Parameter(torch.zeros(3))
        param.grad = torch.ones(3)
    got = buckets([{"params": [param]}])
    assert len(got.other) == 1 and got.devices == []


def test_first_fp16(buckets):
    fp16 = with_grad(torch.ones(2).half())
    sparse_fp16 = with_grad(torch.ones(2).half().to_sparse())
    plain = with_grad(torch.ones(2))
    empty = torch.nn.Parameter(torch.ones(2).half())
    assert buckets([{"params": [plain, empty]}, {"params": [plain, fp16, sparse_fp16]}]).first_fp16 == (1, 1)
    assert buckets([{"params": [plain, sparse_fp16]}]).first_fp16 == (0, 1)
    assert buckets([{"params": [plain, empty]}]).first_fp16 is None


@pytest.mark.parametrize(
    "grad, words",
    [
        (torch.ones(4, dtype=torch.int64), "must be a floating-point or complex tensor, got torch.int64"),
        (torch.ones(4).to(torch.float8_e5m2), "must be a floating-point or complex tensor, got torch.float8_e5m2"),
        (torch.ones(1).expand(4), "overlaps itself in memory"),
        (torch.ones(6).as_strided((3, 3), (1, 1)), "overlaps itself in memory"),
        (torch.ones(1, dtype=torch.complex64).expand(4), "overlaps itself in memory"),
    ],
    ids=["int64", "float8", "expanded", "sliding", "complex-expanded"],
)
def test_refuses_gradients_before_anything_is_written(buckets, grad, words):
    params = [with_grad(torch.ones(2)), with_grad(grad)]
    with pytest.raises(RuntimeError) as error:
        buckets([{"params": []}, {"params": params}])
    assert str(error.value).startswith("the gradient of params[1] in group 1 " + words)


@pytest.mark.parametrize("param", ["text", None, 3])
def test_refuses_what_is_no_tensor(buckets, param):
    with pytest.raises(AssertionError) as error:
        buckets([{"params": [with_grad(torch.ones(2)), param]}])
    assert str(error.value) == f"expected param to be torch.Tensor, got {type(param).__name__}"


def test_refuses_groups_without_params(buckets):
    with pytest.raises(KeyError, match="params"):
        buckets([{"lr": 1.0}])


@pytest.mark.parametrize("name", ["inv_scale", "found_inf"])
@pytest.mark.parametrize(
    "bad",
    [torch.ones(2), torch.ones((), dtype=torch.float64), torch.ones((), device="meta")],
    ids=["two", "float64", "meta"],
)
def test_refuses_scalars_before_anything_is_written(buckets, name, bad):
    param = with_grad(torch.ones(2))
    got = buckets([{"params": [param]}])
    scalars = {"inv_scale": torch.tensor(0.5), "found_inf": torch.zeros(()), name: bad}
    calls = [lambda: got.unscale(CPU, **scalars), lambda: got.unscale_norm(CPU, **scalars)]
    if name == "found_inf":
        calls.append(lambda: got.check(CPU, bad))
    for call in calls:
        with pytest.raises((RuntimeError, NotImplementedError)) as error:
            call()
        assert name in str(error.value) or bad.device != CPU
    assert param.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64,), (torch.bfloat16, torch.float32, torch.float16)])
def test_all_passes_give_the_bits_of_the_ops(buckets, dtypes):
    results = []
    for implementation in (buckets, _gradients.GradientBuckets):
        params = parameters(dtypes=dtypes)
        params.append(with_grad(torch.zeros(3, dtype=torch.complex64)))
        fill_grads(params[:-1], 0, 1.0)
        params[-1].grad = torch.tensor([1 + 2j, 0, -3j]).conj()
        params.append(with_grad(torch.arange(24.0).reshape(4, 6)[:, ::2]))
        params[0].grad = params[0].grad.neg()
        got = implementation([{"params": params}])
        found_inf = torch.zeros(())
        got.check(CPU, found_inf)
        got.unscale(CPU, torch.tensor(0.3), found_inf)
        total, norms = got.unscale_norm(CPU, torch.tensor(1.7), found_inf)
        got.clip(CPU, torch.tensor(0.9, dtype=total.dtype))
        results.append([found_inf, total, norms, *(p.grad.resolve_conj() for p in params)])
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("method", ["unscale", "check", "unscale_norm"])
def test_finds_what_is_not_finite(buckets, method):
    for value in (float("inf"), -float("inf"), float("nan"), 1.0):
        found_inf = torch.zeros(())
        got = buckets([{"params": [with_grad(torch.ones(9)), with_grad(torch.tensor([[1.0], [value]]))]}])
        getattr(got, method)(CPU, *([] if method == "check" else [torch.tensor(0.5)]), found_inf)
        assert found_inf.item() == float(value != 1.0)


def test_writes_count_for_autograd(buckets):
    param = with_grad(torch.ones(3))
    got = buckets([{"params": [param]}])
    for write in (
        lambda: got.unscale(CPU, torch.tensor(0.5), torch.zeros(())),
        lambda: got.unscale_norm(CPU, torch.tensor(0.5), torch.zeros(())),
        lambda: got.clip(CPU, torch.tensor(0.5)),
    ):
        before = param.grad._version
        write()
        assert param.grad._version > before
    before = param.grad._version
    got.check(CPU, torch.zeros(()))
    assert param.grad._version == before


def test_inference_tensors(buckets):
    with torch.inference_mode():
        param = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        param.grad = torch.ones(3)
        buckets([{"params": [param]}]).unscale(CPU, torch.tensor(0.5), torch.zeros(()))
        assert param.grad.tolist() == [0.5] * 3


def test_copy_on_write_gradients_are_separated_before_they_are_written(buckets):
    original = torch.ones(4)
    param = with_grad(torch._lazy_clone(original))
    buckets([{"params": [param]}]).unscale(CPU, torch.tensor(0.5), torch.zeros(()))
    assert original.tolist() == [1.0] * 4
    assert param.grad.tolist() == [0.5] * 4


def test_keeps_its_gradients_alive(buckets):
    params = [with_grad(torch.full((1000,), 2.0)) for _ in range(50)]
    got = buckets([{"params": params}])
    for p in params:
        p.grad = None
    gc.collect()
    fresh = [torch.zeros(1000) for _ in range(200)]
    got.unscale(CPU, torch.tensor(0.5), torch.zeros(()))
    assert all(g.eq(1.0).all() for g in got.grads(CPU))
    assert all(t.eq(0.0).all() for t in fresh)


def test_parameter_classes_with_a_grad_of_their_own(buckets):
    param = torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {"grad": property(lambda self: kept)}))
    kept = torch.full((2,), 4.0)
    got = buckets([{"params": [with_grad(torch.ones(2)), param, with_grad(torch.ones(2))]}])
    assert got.count == 3
    got.unscale(CPU, torch.tensor(0.5), torch.zeros(()))
    assert kept.tolist() == [2.0, 2.0]


def test_refuses_gradients_that_are_no_tensors(buckets):
    class Odd(torch.nn.Parameter):
        grad = property(lambda self: [1.0, 2.0])

    with pytest.raises(TypeError, match=r"gradient of params\[1\] in group 0 must be a tensor, got list"):
        buckets([{"params": [with_grad(torch.ones(2)), Odd(torch.zeros(2))]}])


@pytest.mark.parametrize("numel", [10, 200_000])
def test_one_gradient_of_two_parameters_is_divided_twice(buckets, numel):
    """As torch's CPU path does; not once here and twice there, by threads that meet."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        grad = torch.full((numel,), 8.0)
        got = buckets([{"params": [with_grad(grad), with_grad(grad), with_grad(torch.ones(3))]}])
        got.unscale(CPU, torch.tensor(0.5), torch.zeros(()))
        assert torch.equal(grad, torch.full((numel,), 2.0))
        total, norms = got.unscale_norm(CPU, torch.tensor(0.5), torch.zeros(()))
        assert torch.equal(grad, torch.full((numel,), 0.5))
        assert norms.tolist() == pytest.approx([0.5 * numel**0.5] * 2 + [0.25 * 3**0.5], rel=1e-6)
        assert total.item() == pytest.approx(norms.double().norm().item(), rel=1e-6)
        got.clip(CPU, torch.tensor(0.5))
        assert torch.equal(grad, torch.full((numel,), 0.125))
    finally:
        torch.set_num_threads(threads)


def test_long_lists(buckets):
    """Longer than the host module looks ahead, in groups of every length around it."""
    for size in (*range(1, 30), 500):
        params = [
            with_grad(torch.full((i % 5,), float(i))) if i % 7 else torch.nn.Parameter(torch.ones(1))
            for i in range(size)
        ]
        got = buckets([{"params": params}, {"params": params[: size // 2]}])
        expected = [p.grad for p in [*params, *params[: size // 2]] if p.grad is not None]
        assert got.count == len(expected)
        for grad, want in zip(got.grads(CPU) if expected else [], expected, strict=True):
            same(grad, want)
