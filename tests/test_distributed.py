"""torch.distributed with 2 and 4 gloo processes: an overflow on one rank skips the step on every rank, the scale
stays equal, results are torch's, and nothing hangs."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import warnings

import pytest
import test_state
import torch
import torch.distributed as dist
from distributed_workers import Workers
from doc_pages import run_page
from scaler_parity import assert_same
from torch import nn

import fastamp
from fastamp.checkpointing import checkpoint

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
SIZES = pytest.mark.parametrize("size", [2, 4], ids="{} processes".format)
INFINITY = float("inf")


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    kept = []

    def get():
        if not kept or not kept[-1].processes:
            kept.append(Workers(tmp_path_factory.mktemp("workers")))
        return kept[-1]

    yield get
    for pool in kept:
        pool.close()


def scaler_of(kind, device="cpu", **kwargs):
    settings = {"init_scale": 1024.0, "growth_interval": 3}
    return {"torch": torch.amp.GradScaler, "fastamp": fastamp.GradScaler}[kind](device, **settings, **kwargs)


def batch(rank, step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def full(tensor):
    tensor = tensor.detach()
    # Of a single process, full_tensor() is the parameter itself.
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def optimizer_of(name, parameters):
    return {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01),
        "adamw-fused": lambda: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    }[name]()


def train(rank, model, optimizer, scaler, steps=6, overflow=(1, 2), backward=None):
    """overflow: (rank, step). Returns parameters, the scale after every step, and which steps changed nothing."""
    scales, unchanged = [], []
    for step in range(steps):
        before = [full(p) for p in model.parameters()]
        optimizer.zero_grad()
        factor = INFINITY if (rank, step) == overflow else 1.0
        if backward is None:
            scaler.scale(model(batch(rank, step)).square().mean() * factor).backward()
        else:
            backward(step, factor)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = [full(p) for p in model.parameters()]
        unchanged.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return [full(p) for p in model.parameters()], scales, unchanged


SKIPPED_ONCE = [False, False, True, False, False, False]
SCALES = [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]


# ---- DistributedDataParallel -------------------------------------------------------------------------------


def ddp(rank, group, kind, optimizer, accumulate, options, overflow_in=0):
    """overflow_in: which of the accumulated micro-batches it is that overflows."""
    model = nn.parallel.DistributedDataParallel(network(), process_group=group, **options)
    scaler = scaler_of(kind)

    def backward(step, factor):
        for micro in range(accumulate):
            with model.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                loss = model(batch(rank, 10 * step + micro)).square().mean() / accumulate
                scaler.scale(loss * factor if micro == overflow_in else loss).backward()

    return train(rank, model, optimizer_of(optimizer, model.parameters()), scaler, backward=backward)


@SIZES
@pytest.mark.parametrize(
    ("optimizer", "accumulate", "options", "overflow_in"),
    [
        ("sgd", 1, {}, 0),
        ("adamw-fused", 1, {"static_graph": True}, 0),
        ("sgd", 1, {"gradient_as_bucket_view": True}, 0),
        ("adamw-fused", 3, {"gradient_as_bucket_view": True}, 0),
        ("sgd", 3, {}, 1),
        ("adamw-fused", 3, {"gradient_as_bucket_view": True}, 2),
    ],
    ids=["plain", "static_graph", "bucket views", "no_sync, first", "no_sync, middle", "no_sync, last"],
)
def test_ddp(workers, size, optimizer, accumulate, options, overflow_in):
    case = {"optimizer": optimizer, "accumulate": accumulate, "options": options, "overflow_in": overflow_in}
    expected = workers().run(ddp, size, kind="torch", **case)
    results = workers().run(ddp, size, kind="fastamp", **case)
    assert_same(results, expected)
    for parameters, scales, unchanged in results:
        assert_same(parameters, results[0][0])
        assert scales == SCALES and unchanged == SKIPPED_ONCE


def ddp_with_stored_activations(rank, group, storage, how):
    import torch.utils.checkpoint as torch_checkpoint

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for layer in self:
                if how == "checkpoint":
                    x = checkpoint(layer, x, storage=storage)
                else:
                    x = torch_checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    plain = how == "store_activations"
    model = nn.parallel.DistributedDataParallel(
        (nn.Sequential if plain else Checkpointed)(*layers), process_group=group
    )
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    if how == "patched":
        with fastamp.patched(storage=storage):
            model(x).square().mean().backward()
    elif plain:
        with fastamp.store_activations(storage):
            loss = model(x).square().mean()
        loss.backward()
    else:
        model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("how", ["checkpoint", "patched", "store_activations"])
def test_stored_activations_under_ddp(workers, how):
    exact = workers().run(ddp_with_stored_activations, 2, storage="exact", how=how)
    coded = workers().run(ddp_with_stored_activations, 2, storage="int8", how=how)
    for results in (exact, coded):
        assert_same(results[0], results[1])
    assert_same(exact, workers().run(ddp_with_stored_activations, 2, storage="exact", how="checkpoint"))
    error = torch.stack([(a - b).norm() / b.norm() for a, b in zip(coded[0], exact[0], strict=True)])
    assert 0 < error.max() < 0.05


# ---- ranks with gradients of their own ---------------------------------------------------------------------


def parts(rank, group, kind, optimizer, use_group, overflow, frozen=()):
    """Every rank trains parameters of its own, as with tensor or expert parallelism written by hand."""
    torch.manual_seed(rank)
    model = nn.Linear(16, 4)
    if rank in frozen:
        # Nothing of this rank's gets a gradient; a scaled loss there is all the same.
        model.requires_grad_(False)
    scaler = scaler_of(kind, **({"process_group": group} if use_group else {}))
    backward = None
    if rank in frozen:

        def backward(step, factor):
            scaler.scale(torch.zeros(()))

    return train(rank, model, optimizer_of(optimizer, model.parameters()), scaler, overflow=overflow, backward=backward)


@SIZES
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_one_ranks_overflow_skips_on_every_rank(workers, size, optimizer):
    case = {"kind": "fastamp", "optimizer": optimizer, "overflow": (size - 1, 2)}
    for _, scales, unchanged in workers().run(parts, size, use_group=True, **case):
        assert scales == SCALES and unchanged == SKIPPED_ONCE
    # Without the group, ranks part ways: what the group is for.
    apart = workers().run(parts, size, use_group=False, **case)
    assert [unchanged[2] for _, _, unchanged in apart] == [False] * (size - 1) + [True]
    assert apart[0][1] != apart[-1][1]


def test_a_rank_without_gradients_takes_part(workers):
    results = workers().run(parts, 2, kind="fastamp", optimizer="adamw", use_group=True, overflow=(0, 2), frozen=(1,))
    assert results[0][1] == results[1][1] == SCALES
    assert results[0][2] == SKIPPED_ONCE


def both_overflow(rank, group, optimizer):
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    scaler = scaler_of("fastamp", process_group=group)
    chosen = optimizer_of(optimizer, model.parameters())
    scaler.scale(model(batch(rank, 0)).sum() * INFINITY).backward()
    before = full(model.weight)
    scaler.step(chosen)
    scaler.update()
    return torch.equal(model.weight, before), scaler.get_scale(), scaler.step_was_skipped


@SIZES
def test_an_overflow_on_every_rank_skips_a_fused_step(workers, size):
    # Summed over ranks the flag would be the number of ranks, and fused kernels skip at 1 only.
    assert workers().run(both_overflow, size, optimizer="adamw-fused") == [(True, 512.0, True)] * size


# ---- pipeline stages ---------------------------------------------------------------------------------------


def pipeline(rank, group, kind, overflow_in):
    """Each rank is a stage with an optimizer of its own kind; activations go up, gradients come down."""
    size = dist.get_world_size(group)
    torch.manual_seed(rank)
    stage = nn.Linear(16, 16)
    optimizer = optimizer_of(["sgd", "adamw-fused", "adamw", "sgd"][rank], stage.parameters())
    scaler = scaler_of(kind, process_group=group) if kind == "fastamp" else scaler_of(kind)

    def backward(step, factor):
        x = batch(0, step)
        if rank > 0:
            x = torch.empty(4, 16)
            dist.recv(x, src=rank - 1, group=group)
        x.requires_grad_()
        y = stage(x)
        if rank + 1 < size:
            dist.send(y.detach(), dst=rank + 1, group=group)
            grad = torch.empty(4, 16)
            dist.recv(grad, src=rank + 1, group=group)
            scaler.scale(torch.zeros(()))
            y.backward(grad)
        else:
            scaler.scale(y.square().mean()).backward()
        if rank > 0:
            dist.send(x.grad, dst=rank - 1, group=group)
        if step == 2 and rank == overflow_in:
            stage.weight.grad[3, 3] = INFINITY

    return train(rank, stage, optimizer, scaler, backward=backward)


@SIZES
def test_pipeline_stages_skip_together(workers, size):
    for overflow_in in (0, size - 1):
        for _, scales, unchanged in workers().run(pipeline, size, kind="fastamp", overflow_in=overflow_in):
            assert scales == SCALES and unchanged == SKIPPED_ONCE
    clean = workers().run(pipeline, size, kind="fastamp", overflow_in=None)
    assert_same(clean, workers().run(pipeline, size, kind="torch", overflow_in=None))


# ---- FSDP1 -------------------------------------------------------------------------------------------------


def fsdp1(rank, group, kind, optimizer, overflow_in, use_orig_params=True, half=False, odd_factors=False):
    """kind: "torch", "fastamp", or "patched" for what stands at torch's name while patched. half: a float16 loss and
    float16 gradients."""
    import torch.distributed.fsdp.sharded_grad_scaler as sharded
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    halves = MixedPrecision(torch.float16, torch.float16, torch.float16, keep_low_precision_grads=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            network(),
            process_group=group,
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
            mixed_precision=halves if half else None,
        )
    settings = {"device": "cpu", "init_scale": 1024.0, "growth_interval": 3, "process_group": group}
    if odd_factors:
        settings |= {"init_scale": 999.0, "growth_factor": 1.7, "backoff_factor": 0.3}
    with fastamp.patched() if kind == "patched" else contextlib.nullcontext():
        scaler = (fastamp.GradScaler if kind == "fastamp" else sharded.ShardedGradScaler)(**settings)
    assert isinstance(scaler, fastamp.GradScaler) == (kind != "torch")

    def backward(step, factor):
        scaled = scaler.scale(model(batch(rank, step)).square().mean())
        assert scaled.dtype is (torch.float16 if half else torch.float32)
        scaled.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
        assert {grad.dtype for grad in grads} == {scaled.dtype}
        if step == 2 and rank in overflow_in:
            # In this rank's shard alone.
            grads[0].view(-1)[0] = INFINITY

    result = train(rank, model, optimizer_of(optimizer, model.parameters()), scaler, backward=backward)
    return result, scaler.state_dict()


@SIZES
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("overflow_in", [(1,), (0, 1)], ids=["one overflows", "two overflow"])
def test_fsdp1(workers, size, optimizer, overflow_in):
    case = {"optimizer": optimizer, "overflow_in": overflow_in}
    results = workers().run(fsdp1, size, kind="fastamp", **case)
    for (_, scales, unchanged), _ in results:
        assert scales == SCALES and unchanged == SKIPPED_ONCE
    assert_same(results, workers().run(fsdp1, size, kind="patched", **case))
    if optimizer == "sgd":
        # With a fused optimizer torch's own does not combine flags over ranks before the step, so ranks part ways.
        assert_same(results, workers().run(fsdp1, size, kind="torch", **case))


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original parameters", "flat parameters"])
@pytest.mark.parametrize("odd_factors", [False, True], ids=["", "odd factors"])
def test_sharded_scalers_stand_in_gives_torchs_results(workers, half, use_orig_params, odd_factors):
    """Not with parameters offloaded to the CPU: FSDP1 wants an accelerator for that."""
    case = {"optimizer": "sgd", "overflow_in": (1,), "half": half}
    case |= {"use_orig_params": use_orig_params, "odd_factors": odd_factors}
    results = workers().run(fsdp1, 2, kind="patched", **case)
    for (_, scales, unchanged), _ in results:
        assert unchanged == SKIPPED_ONCE and scales[2] < scales[1]
    assert_same(results, workers().run(fsdp1, 2, kind="torch", **case))


def sharded_scaler(rank, group, kind, state):
    """Trains on from a state with a gradient of this rank's own, an infinite one on rank 0 at the second step."""
    import torch.distributed.fsdp.sharded_grad_scaler as sharded

    with fastamp.patched() if kind == "patched" else contextlib.nullcontext():
        scaler = sharded.ShardedGradScaler("cpu", process_group=group)
    scaler.load_state_dict(state)
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    result = train(rank, model, optimizer_of("sgd", model.parameters()), scaler, steps=4, overflow=(0, 1))
    return result, scaler.state_dict()


@pytest.mark.parametrize("second", ["torch", "patched"])
@pytest.mark.parametrize("first", ["torch", "patched"])
def test_sharded_scalers_states_move_both_ways(workers, first, second):
    begin = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 3, "_growth_tracker": 2}
    (result, state), (_, other) = workers().run(sharded_scaler, 2, kind=first, state=begin)
    assert result[1] == [1024.0, 256.0, 256.0, 256.0] and state == other
    ends = [workers().run(sharded_scaler, 2, kind=kind, state=state) for kind in (second, "torch")]
    assert_same(*ends)
    assert ends[0][0][0][1] == [512.0, 128.0, 128.0, 128.0]


# ---- FSDP2 and tensor parallel -----------------------------------------------------------------------------


def mesh_of(group):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu")


def dtensor(rank, group, kind, optimizer, how, overflow_in, storage=None):
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model = network()
        if storage is not None:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            for index in (0, 2):
                model[index] = checkpoint_wrapper(model[index], checkpoint_fn=checkpoint, storage=storage)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh_of(group))
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model = parallelize_module(network(), mesh_of(group), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    scaler = scaler_of(kind)

    def backward(step, factor):
        # Tensor parallel ranks see the same batch.
        x = batch(rank if how == "fsdp2" else 0, step)
        scaler.scale(model(x).square().mean()).backward()
        if step == 2 and rank == overflow_in:
            local = model[0].weight.grad if storage is None else next(model[0].parameters()).grad
            local.to_local().view(-1)[0] = INFINITY

    return train(rank, model, optimizer_of(optimizer, model.parameters()), scaler, backward=backward)


@SIZES
@pytest.mark.parametrize("how", ["fsdp2", "tensor parallel"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
def test_dtensor_gradients(workers, size, how, optimizer):
    case = {"how": how, "optimizer": optimizer, "overflow_in": 1}
    results = workers().run(dtensor, size, kind="fastamp", **case)
    for _, scales, unchanged in results:
        assert scales == SCALES and unchanged == SKIPPED_ONCE
    assert_same(results, workers().run(dtensor, size, kind="torch", **case))


def test_checkpoint_wrapper_under_fsdp2(workers):
    case = {"kind": "fastamp", "how": "fsdp2", "optimizer": "sgd", "overflow_in": None}
    plain = workers().run(dtensor, 2, **case)
    assert_same(workers().run(dtensor, 2, storage="exact", **case), plain)


def fsdp2_with_stored_activations(rank, group, how, storage):
    """Gradients, and (activations coded, parameters kept as they are) of the store."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    if how == "checkpoint_wrapper":
        for index in range(3):
            model[index] = checkpoint_wrapper(model[index], checkpoint_fn=checkpoint, storage=storage)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of(group))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    counts = (0, 0)
    if how == "store_activations":
        with fastamp.store_activations(storage) as stats:
            loss = model(x).square().mean()
        kinds = stats.kinds
        counts = (kinds[storage].count if storage in kinds else 0, kinds["parameters"].count)
    else:
        loss = model(x).square().mean()
    loss.backward()
    return [full(p.grad) for p in model.parameters()], counts


@pytest.mark.parametrize("how", ["checkpoint_wrapper", "store_activations"])
def test_stored_activations_under_fsdp2(workers, how):
    """An activation here is of 8 KiB, above the floor of what is coded. Gathered parameters are freed after forward and
    come back for backward: they must not be kept, nor coded."""
    plain = workers().run(fsdp2_with_stored_activations, 2, how="nothing", storage=None)
    exact = workers().run(fsdp2_with_stored_activations, 2, how=how, storage="exact")
    coded = workers().run(fsdp2_with_stored_activations, 2, how=how, storage="int8")
    for mine, truth in zip(exact, plain, strict=True):
        assert_same(mine[0], truth[0])
    assert_same(coded[0][0], coded[1][0])
    error = torch.stack([(a - b).norm() / b.norm() for a, b in zip(coded[0][0], plain[0][0], strict=True)])
    assert 0 < error.max() < 0.05
    if how == "store_activations":
        activations, parameters = coded[0][1]
        assert activations >= 3 and parameters >= 2


# ---- states ------------------------------------------------------------------------------------------------


def job(rank, group, kind, saved, crash_at, fused):
    """test_state's job on every rank, all with the same batches, so that their mean is what one rank has. Rank 1 alone
    has a loss that overflows. Returns what it has saved, and its result."""

    def parallel(model):
        return nn.parallel.DistributedDataParallel(model, process_group=group)

    overflows = test_state.OVERFLOWS if rank == 1 else ()
    run = test_state.Job(kind, saved=saved, parallel=parallel, overflows=overflows, fused=fused)
    return run.run(6, crash_at=crash_at), run.result()


def job_on(workers, ranks, kind, saved, crash_at, fused):
    case = {"kind": kind, "saved": saved, "crash_at": crash_at, "fused": fused}
    if ranks > 1:
        results = workers().run(job, ranks, **case)
        for _, result in results:
            assert_same(result, results[0][1])
        return results[-1]
    alone = test_state.Job(kind, saved=saved, fused=fused)
    return alone.run(6, crash_at=crash_at), alone.result()


@pytest.mark.parametrize(("step", "fused"), [(1, True), (3, False)], ids=["at an overflow, fused", "at a growth"])
@pytest.mark.parametrize("point", test_state.POINTS)
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 2)], ids="{} then".format)
def test_a_crash_resumes_on_another_number_of_ranks(workers, before, after, step, point, fused):
    def train(before, after, first, second):
        saved, _ = job_on(workers, before, first, saved=None, crash_at=(step, point), fused=fused)
        return job_on(workers, after, second, saved=saved, crash_at=None, fused=fused)[1]

    # As one rank with torch's scaler does from such a crash, which it is not if the crash lost an update.
    expected = train(1, 1, "torch", "torch")
    _, uninterrupted = job_on(workers, 1, "torch", saved=None, crash_at=None, fused=fused)
    assert (expected[1] == uninterrupted[1]) == (point != "step")
    if point != "step":
        assert_same(expected, uninterrupted)
    for first, second in itertools.product(test_state.KINDS, test_state.KINDS):
        assert_same(train(before, after, first, second), expected)


# ---- a rank that dies --------------------------------------------------------------------------------------


def dies(rank, group, optimizer):
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    scaler = scaler_of("fastamp", process_group=group)
    chosen = optimizer_of(optimizer, model.parameters())
    for step in range(3):
        chosen.zero_grad()
        scaler.scale(model(batch(rank, step)).sum()).backward()
        if step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = full(model.weight)
        try:
            scaler.step(chosen)
        except RuntimeError as error:
            return step, torch.equal(model.weight, before), str(error)
        scaler.update()
    return None


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_a_killed_rank_gives_an_error(optimizer, tmp_path):
    pool = Workers(tmp_path, size=2)
    try:
        pool.send(dies, 2, optimizer=optimizer)
        ((step, unchanged, message),) = pool.results(2, ranks=[0])
    finally:
        pool.close()
    assert step == 1 and unchanged
    assert "Connection" in message or "peer" in message


@pytest.mark.skipif(dist.is_available() and dist.is_initialized(), reason="this process is in a group already")
def test_page():
    names = run_page("integrations/distributed")
    assert names["scaler"].get_scale() == 65536.0 and not dist.is_initialized()
