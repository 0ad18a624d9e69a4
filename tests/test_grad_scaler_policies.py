"""What fastamp.GradScaler has beyond torch's: policies, process groups, and what it tells of its steps."""

import copy
import pickle
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scaler_parity import CountOps, fill_grads, parameters, same_bits

from fastamp import GradScaler, reference

INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")


def started(**kwargs):
    scaler = GradScaler("cpu", **kwargs)
    scaler.scale(torch.ones(()))
    return scaler


def with_grads(*grads, **kwargs):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return params, torch.optim.SGD(params, lr=1.0, **kwargs)


def iterate(scaler, overflow, fused=False):
    """One iteration; returns the scale after it."""
    _, optimizer = with_grads(torch.tensor([INF if overflow else 1.0]), fused=fused)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


# ---- bounds and hysteresis ---------------------------------------------------------------------------------


def test_min_scale_is_a_floor():
    scaler = started(init_scale=8.0, min_scale=3.0)
    assert [iterate(scaler, True) for _ in range(4)] == [4.0, 3.0, 3.0, 3.0]


def test_max_scale_is_a_ceiling():
    scaler = started(init_scale=8.0, max_scale=20.0, growth_interval=1)
    assert [iterate(scaler, False) for _ in range(4)] == [16.0, 20.0, 20.0, 20.0]


def test_without_max_scale_growth_stops_before_inf_as_in_torch():
    scaler = started(init_scale=2.0**127, growth_interval=1)
    assert iterate(scaler, False) == 2.0**127


def test_hysteresis():
    scaler = started(init_scale=16.0, hysteresis=3)
    # Three overflows without a clean step between them; from then on every one, until a clean step.
    pattern = [True, True, False, True, True, True, True, False, True]
    assert [iterate(scaler, overflow) for overflow in pattern] == [16, 16, 16, 16, 16, 8, 4, 4, 4]
    assert scaler.step_was_skipped


@pytest.mark.parametrize("seed", range(5))
def test_policies_against_the_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    policies = dict(min_scale=3.0, max_scale=700.0, hysteresis=2)
    settings = dict(init_scale=50.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
    scaler = started(**settings, **policies)
    scale, tracker = torch.tensor(50.0), torch.tensor(0, dtype=torch.int32)
    left = torch.tensor(2, dtype=torch.int32)
    for overflow in torch.rand(60, generator=generator).lt(0.3).tolist():
        iterate(scaler, overflow)
        reference.update_scale_(scale, tracker, [torch.tensor(float(overflow))], 1.7, 0.3, 2, 3.0, 700.0, 2, left)
        assert same_bits(scaler._scale, scale)
        assert scaler._growth_tracker.item() == tracker.item()
        assert scaler._hysteresis_tracker.item() == left.item()


@pytest.mark.parametrize("carry", ["state_dict", "state_dict-late", "pickle", "deepcopy"])
def test_policies_are_saved_and_restored(carry):
    policies = dict(min_scale=3.0, max_scale=700.0, hysteresis=3)
    scaler = started(init_scale=16.0, **policies)
    iterate(scaler, True)
    state = scaler.state_dict()
    assert state == {
        "scale": 16.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
        **policies,
        "_hysteresis_tracker": 2,
    }
    if carry == "pickle":
        other = pickle.loads(pickle.dumps(scaler))
    elif carry == "deepcopy":
        other = copy.deepcopy(scaler)
    else:
        other = started() if carry == "state_dict-late" else GradScaler("cpu")
        other.load_state_dict(state)
    assert other.state_dict() == state
    other.scale(torch.ones(()))
    assert [iterate(other, True) for _ in range(4)] == [16.0, 8.0, 4.0, 3.0]
    torch.amp.GradScaler("cpu").load_state_dict(state)


def test_loading_torchs_state_keeps_the_policies():
    scaler = started(min_scale=3.0, hysteresis=2)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
    assert [iterate(scaler, True) for _ in range(3)] == [4.0, 3.0, 3.0]


# ---- float16 gradients -------------------------------------------------------------------------------------


def test_allow_fp16_grads():
    params, optimizer = with_grads(torch.tensor([3.0, 2.0**-24]).half())
    scaler = started(init_scale=2.0, allow_fp16_grads=True)
    scaler.step(optimizer)
    assert params[0].grad.tolist() == [1.5, 0.0]
    assert params[0].tolist() == [-1.5, 0.0]


def test_the_fp16_message_names_parameter_group_and_cure():
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    params.append(torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float16)))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=1.0)
    named = torch.optim.SGD([(f"layer.{i}", p) for i, p in enumerate(params)], lr=1.0)
    for opt, words in (
        (optimizer, r"Parameter 2 of group 1 of SGD, of shape \(3, 5\), has a torch.float16 gradient"),
        (named, r"Parameter 3 \('layer.3'\) of group 0 of SGD, of shape \(3, 5\)"),
    ):
        message = r"^Attempting to unscale FP16 gradients\. " + words + r"(.|\n)*allow_fp16_grads=True"
        with pytest.raises(ValueError, match=message):
            started().unscale_(opt)
        assert params[0].grad.tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match=message):
            started().clip_grad_norm_(opt, 1.0)


# ---- no inf checks -----------------------------------------------------------------------------------------


def test_no_inf_checks_says_why():
    params, optimizer = with_grads(torch.ones(2), torch.ones(2))
    scaler = started()
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded prior to update\. Neither"):
        scaler.update()
    optimizer.zero_grad()
    with pytest.raises(
        AssertionError,
        match=r"^No inf checks were recorded for this optimizer\. SGD: none of its 2 parameters has",
    ):
        scaler.step(optimizer)
    params[1].grad = torch.ones(2)  # after the unscale_() that step() did
    with pytest.raises(AssertionError, match="1 of its 2 parameters have a gradient now, but none had one when"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(AssertionError, match="SGD: it has no parameters"):
        scaler.step(optimizer)


# ---- was the step skipped? ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_step_was_skipped(fused):
    scaler = started()
    assert scaler.step_was_skipped is False
    for overflow in (False, True, True, False):
        _, optimizer = with_grads(torch.tensor([NAN if overflow else 1.0]), fused=fused)
        scaler.step(optimizer)
        assert scaler.step_was_skipped is overflow
        scaler.update()
        assert scaler.step_was_skipped is overflow
        scaler.scale(torch.ones(()))
        assert scaler.step_was_skipped is overflow
        assert scaler.step_was_skipped_for(optimizer) is overflow


def test_step_was_skipped_with_several_optimizers():
    scaler = started()
    _, good = with_grads(torch.ones(2))
    _, bad = with_grads(torch.tensor([INF]))
    _, bad_fused = with_grads(torch.tensor([INF]), fused=True)
    for optimizers in ([good, bad], [bad, good], [good, bad_fused], [bad_fused, good], [good]):
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped is (len(optimizers) > 1)
        assert [scaler.step_was_skipped_for(o) for o in optimizers] == [o is not good for o in optimizers]
    assert scaler.step_was_skipped_for(bad) is False  # took no part in the last iteration


def test_step_was_skipped_costs_a_sync_only_when_read():
    scaler = started()
    _, optimizer = with_grads(torch.tensor([INF]), fused=True)
    with CountOps() as step:
        scaler.step(optimizer)
        scaler.update()
    with CountOps() as read:
        assert scaler.step_was_skipped
    assert (step.syncs, read.syncs) == (0, 1)
    _, optimizer = with_grads(torch.tensor([INF]))
    scaler.step(optimizer)
    with CountOps() as read:  # the host knows it already
        assert scaler.step_was_skipped
    assert read.syncs == 0


def test_a_scheduler_can_ask():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = started()
    rates = []
    for overflow in (True, False, True, False):
        param.grad = torch.tensor([INF if overflow else 1.0])
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


# ---- which parameter overflowed? ---------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("when", ["before update", "after update"])
def test_overflow_report(when, fused):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2), "c": torch.nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    for p in model["a"].parameters():
        p.grad = torch.ones_like(p)
    for p in model["b"].parameters():
        p.grad = torch.ones_like(p)
    model["b"].weight.grad[0] = torch.tensor([NAN, -INF])
    model["b"].bias.grad[1] = INF
    scaler = started()
    scaler.step(optimizer)
    if when == "after update":
        scaler.update()
    report = scaler.overflow_report(model.named_parameters())
    assert report == [("b.weight", (2, 2), torch.float32, 4, 1, 1), ("b.bias", (2,), torch.float32, 2, 0, 1)]
    assert (report[0].name, report[0].nan, report[0].inf, report[0].numel) == ("b.weight", 1, 1, 4)


def test_overflow_report_reads_the_device_once(monkeypatch):
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=1.0)
    fill_grads(params, 0, 1.0, NAN)
    scaler = started()
    scaler.step(optimizer)
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or tolist(self))
    with CountOps() as ops:
        assert [e.name for e in scaler.overflow_report((str(i), p) for i, p in enumerate(params))] == ["4"]
    assert (ops.syncs, reads) == (0, [(len(params), 2)])


def test_overflow_report_of_sparse_half_and_unscaled_overflow():
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.tensor([INF, -INF]), (3,), check_invariants=True)
    overflowing = torch.tensor([3e38, 1.0])  # finite until it is unscaled
    bf16 = torch.tensor([NAN], dtype=torch.bfloat16)
    params, optimizer = with_grads(sparse, overflowing, bf16)
    scaler = started(init_scale=0.5)
    scaler.step(optimizer)
    assert scaler.overflow_report(zip("abc", params, strict=True)) == [
        ("a", (3,), torch.float32, 1, 1, 0),
        ("b", (2,), torch.float32, 2, 0, 1),
        ("c", (1,), torch.bfloat16, 1, 1, 0),
    ]


def test_overflow_report_without_an_overflow_is_empty():
    params, optimizer = with_grads(torch.ones(2))
    scaler = started()
    assert scaler.overflow_report([("a", params[0])]) == []
    scaler.step(optimizer)
    assert scaler.overflow_report([("a", params[0])]) == []


@pytest.mark.parametrize("set_to_none", [False, True])
def test_overflow_report_does_not_guess(set_to_none):
    params, optimizer = with_grads(torch.tensor([INF]))
    scaler = started()
    scaler.step(optimizer)
    optimizer.zero_grad(set_to_none)
    with pytest.raises(RuntimeError, match=r"the last step was skipped, but .* before optimizer\.zero_grad\(\)"):
        scaler.overflow_report([("a", params[0])])


def test_clipping_keeps_the_evidence():
    for max_norm in (1.0, 0.0):
        params, optimizer = with_grads(torch.ones(3), torch.tensor([NAN, 1.0]))
        scaler = started()
        scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        assert [e.name for e in scaler.overflow_report(zip("ab", params, strict=True))] == ["b"]


# ---- collapse ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_scale", [None, 2.0])
def test_a_collapsing_scale_is_diagnosed(min_scale):
    scaler = started(min_scale=min_scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(19):
            iterate(scaler, True)
    with pytest.warns(RuntimeWarning, match="after 20 skipped steps in a row. .*overflow_report") as caught:
        iterate(scaler, True)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterate(scaler, True)
        iterate(scaler, False)
        for _ in range(19):
            iterate(scaler, True)


def test_a_scale_of_zero_is_diagnosed():
    scaler = started()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for _ in range(170):
            _, optimizer = with_grads(torch.tensor([INF]), fused=True)
            scaler.step(optimizer)
            scaler.update()
    with pytest.warns(RuntimeWarning, match="the loss scale is 0, and no update can make it grow again") as caught:
        assert scaler.get_scale() == 0.0
    assert caught[0].filename == __file__


def test_many_skips_with_a_high_scale_are_no_collapse():
    scaler = started(init_scale=2.0**100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            iterate(scaler, True)


# ---- process groups ----------------------------------------------------------------------------------------


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank_main(rank, port, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        results[rank] = [list(map(float, line)) for line in _rank_program(rank)]
    finally:
        dist.destroy_process_group()


def _rank_program(rank):
    group = dist.group.WORLD
    for fused in (False, True):
        # Only rank 1 overflows, and both must skip.
        params, optimizer = with_grads(torch.tensor([INF if rank == 1 else 1.0]), fused=fused)
        scaler = started(process_group=group)
        scaler.step(optimizer)
        scaler.update()
        report = scaler.overflow_report([("a", params[0])])
        yield [params[0].item(), scaler.get_scale(), scaler.step_was_skipped, len(report)]
        # Both overflow: found_inf stays at 1.
        params, optimizer = with_grads(torch.tensor([NAN]), fused=fused)
        scaler.unscale_(optimizer)
        yield [f.item() for f in scaler._found_inf_per_device(optimizer).values()]
        scaler.step(optimizer)
        scaler.update()
        yield [params[0].item(), scaler.get_scale()]
        # Rank 0 has no gradients at all, and still takes part.
        params, optimizer = with_grads(torch.ones(1), fused=fused)
        if rank == 0:
            optimizer.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        yield [params[0].item(), scaler.get_scale()]
        # Clipping combines too; the fold as well.
        for fold in (False, True):
            params, optimizer = with_grads(torch.tensor([INF if rank == 0 else 3.0]), fused=fused)
            scaler.clip_grad_norm_(optimizer, 1.0, fold=fold)
            scaler.step(optimizer)
            scaler.update()
            yield [params[0].item(), scaler.get_scale()]

    # A subclass's own hook is combined as well.
    class Sub(GradScaler):
        def _unscale_grads_(self, *args):
            return super()._unscale_grads_(*args)

    params, optimizer = with_grads(torch.tensor([INF if rank == 1 else 1.0]))
    scaler = Sub("cpu", process_group=group)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    yield [params[0].item()]
    # Without the group each rank is on its own.
    params, optimizer = with_grads(torch.tensor([INF if rank == 1 else 1.0]))
    scaler = started(init_scale=1.0)
    scaler.step(optimizer)
    yield [params[0].item()]


def test_found_inf_is_combined_over_a_process_group():
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank_main, args=(_free_port(), results), nprocs=2)
        zero, one = results[0], results[1]
    for fused in (0, 1):
        start = 6 * fused
        assert zero[start] == [0.0, 32768.0, 1.0, 0.0]
        assert one[start] == [0.0, 32768.0, 1.0, 1.0]
        for rank in (zero, one):
            assert rank[start + 1] == [1.0]
            assert rank[start + 2] == [0.0, 16384.0]
            assert rank[start + 3][1] == 16384.0
            assert rank[start + 4] == [0.0, 8192.0]
            assert rank[start + 5] == [0.0, 4096.0]
        assert zero[start + 3][0] == 0.0
        assert one[start + 3][0] == pytest.approx(-1 / 16384)
    assert zero[12] == one[12] == [0.0]
    assert (zero[13], one[13]) == ([-1.0], [0.0])


def test_a_scaler_with_a_process_group_says_that_it_cannot_be_pickled(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        scaler = GradScaler("cpu", process_group=dist.group.WORLD)
        with pytest.raises(TypeError, match=r"cannot be pickled or copied.*state_dict\(\)"):
            pickle.dumps(scaler)
    finally:
        dist.destroy_process_group()
