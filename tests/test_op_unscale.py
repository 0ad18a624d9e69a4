"""unscale_, check_, unscale_norm_, clip_, accumulate_: against torch's own operators and fastamp.reference."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from op_inputs import (
    DTYPES,
    HALF_DTYPES,
    SIZES,
    all_same_bits,
    dtype_id,
    guarded_list,
    random_values,
    same_bits,
    scalar,
)
from torch import Tensor

import fastamp.ops
from fastamp import reference

CPU = torch.device("cpu")
INV_SCALES = [1.0, 2.0**-16, 1 / 3, 3.7e4]
OPS_THAT_CHECK = [("check_", None)] + [(op, s) for op in ("unscale_", "unscale_norm_") for s in (1.0, 0.5)]


def strided_tensors(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    def make(*shape: int) -> Tensor:
        return random_values(int(torch.Size(shape).numel()), dtype, rng).reshape(shape).to(device)

    return {
        "transposed": make(17, 33).t(),
        "permuted": make(3, 4, 5, 6).permute(2, 0, 3, 1),
        "channels_last": make(2, 8, 5, 5).contiguous(memory_format=torch.channels_last),
        "every other": make(40, 41)[:, ::2],
        "rows": make(64, 16)[::3],
        "window": make(9, 9, 9)[1:7, 2:8, 3:5],
        "column": make(300, 3)[:, 1],
        "0-dim": make(1).reshape(()),
        "empty": make(4, 8)[:, 8:],
        "leading ones": make(50, 7)[:, ::2].unsqueeze(0).unsqueeze(2),
        "20 dimensions": make(*[2] * 12, *[1] * 8).transpose(0, 1).transpose(3, 15),
    }


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("inv_scale", INV_SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_unscale_has_torchs_bits(backend, dtype, inv_scale, rng):
    guarded = guarded_list(SIZES, [dtype], rng, backend.device)
    grads = [g.tensor for g in guarded]
    theirs = [g.tensor.cpu().clone() for g in guarded]
    found, theirs_found = scalar(0.0, backend.device), torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, theirs_found, torch.tensor(inv_scale))
    backend.ops.unscale_(grads, found, scalar(inv_scale, backend.device))
    assert all_same_bits(grads, theirs)
    if inv_scale <= 1:  # above, ours also notices what overflows on the way
        assert found.item() == theirs_found.item()
    for g in guarded:
        g.check()


@pytest.mark.parametrize("grid_limit", [2**31, 3], ids=["many blocks", "few blocks"])
def test_mixed_lists(backend, rng, grid_limit):
    """Of few blocks each has many tensors, one after another."""
    sizes = [*torch.randint(0, 3000, (40,), generator=rng).tolist(), 20000]
    guarded = guarded_list(sizes, DTYPES, rng, backend.device)
    original = [g.tensor for g in guarded] + list(strided_tensors(torch.float32, rng, backend.device).values())
    inv_scale, one = scalar(1 / 3, backend.device), scalar(1.0, backend.device)
    expected, expected_found = clones(original), scalar(0.0, backend.device)
    reference.unscale_(expected, expected_found, inv_scale)
    _, exact = reference.unscale_norm_(expected, expected_found, one)
    seen = set()
    for _ in backend.schedules(grid_limit=grid_limit):
        grads = clones(original)
        for g, copy in zip(guarded, grads, strict=False):
            g.tensor.copy_(copy)
        grads[: len(guarded)] = [g.tensor for g in guarded]
        found = scalar(0.0, backend.device)
        values = clones(grads[: len(guarded)])
        total, norms = backend.ops.unscale_norm_(grads, found, inv_scale)
        assert all_same_bits(grads, expected)
        assert found.item() == expected_found.item() == 0.0
        torch.testing.assert_close(norms, exact, rtol=1e-5, atol=0)
        torch.testing.assert_close(total, exact.double().norm().float(), rtol=1e-5, atol=0)
        seen.add((total.item(), *norms.tolist()))
        for g, value in zip(guarded, values, strict=True):
            g.check()
            g.tensor.copy_(value)
    assert len(seen) == 1  # the order of the sums does not depend on the schedule


@pytest.mark.parametrize("numel", [100, 150_000])
def test_a_tensor_listed_more_than_once_is_written_once_for_each(backend, numel, rng):
    """As by torch's CPU path, one after the other. Threads and blocks take parts of all tensors at a time."""
    x, y, narrow = (random_values(n, torch.float32, rng).to(backend.device) for n in (numel, 77, 64))
    square = x[: numel // 4 * 4].view(4, -1)
    lists = [[x, y, x], [y, x, y[:0], x, x], [narrow, x, narrow.view(8, 8).t(), x], [square[:, ::2], y, square[:, ::2]]]
    factor, threads = scalar(1 / 3, backend.device), torch.get_num_threads()
    for tensors in lists:
        originals = {t.data_ptr(): t for t in (x, y, narrow)}
        before = {at: t.clone() for at, t in originals.items()}

        def result(ops, op, before=before, originals=originals, tensors=tensors):
            for at, t in originals.items():
                t.copy_(before[at])
            found = scalar(0.0, backend.device)
            norms = getattr(ops, op)(tensors, *([factor] if op == "clip_" else [found, factor]))
            return [t.clone() for t in originals.values()], found.item(), norms

        try:
            for op in ("unscale_", "unscale_norm_", "clip_"):
                expected, found, norms = result(reference, op)
                for count in (1, 4):
                    torch.set_num_threads(count)
                    got = result(backend.ops, op)
                    assert all_same_bits(got[0], expected) and got[1] == found, (op, count)
                    if norms is not None:
                        torch.testing.assert_close(got[2], norms, rtol=1e-6, atol=0)
        finally:
            torch.set_num_threads(threads)
            for at, t in originals.items():
                t.copy_(before[at])


@pytest.mark.parametrize("numel", [100, 150_000])
def test_accumulating_into_one_tensor_more_than_once(backend, numel, rng):
    """In the list's order, whatever the dtypes: sums are rounded, so the order shows."""
    sources = [
        random_values(numel, dtype, rng).to(backend.device)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float16)
    ]
    mains = [random_values(numel, torch.float32, rng).to(backend.device) for _ in range(2)]
    for order in ([0, 0, 0, 0], [0, 1, 0, 1]):
        results = []
        for ops in (reference, backend.ops):
            copies, found = clones(mains), scalar(0.0, backend.device)
            ops.accumulate_([copies[i] for i in order], sources, found, scalar(1 / 3, backend.device))
            results.append((copies, found.item()))
        assert all_same_bits(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128], ids=dtype_id)
def test_any_strides(backend, dtype, rng):
    base = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    for name, tensor in strided_tensors(base, rng, backend.device).items():
        grad = torch.complex(tensor, tensor.flip(0) if tensor.dim() else tensor) if dtype.is_complex else tensor
        if dtype.is_complex and grad.dim() >= 2:
            grad = grad.repeat_interleave(2, dim=0)[::2]
        whole = grad.untyped_storage()
        before = torch.tensor([], dtype=grad.dtype, device=grad.device).set_(whole)
        outside = before.clone()
        expected = grad.clone()
        found, expected_found = scalar(0.0, backend.device), scalar(0.0, backend.device)
        inv_scale = scalar(1 / 3, backend.device)
        reference.unscale_([expected], expected_found, inv_scale)
        total, norms = backend.ops.unscale_norm_([grad], found, inv_scale)
        assert same_bits(grad, expected), name
        exact = torch.linalg.vector_norm(expected.to(torch.complex128 if dtype.is_complex else torch.float64))
        assert norms.tolist() == [total.item()]
        torch.testing.assert_close(total.double(), exact.double(), rtol=1e-5, atol=0, msg=name)
        # Nothing between the elements was touched.
        grad.copy_(outside.as_strided(grad.shape, grad.stride(), grad.storage_offset()))
        assert same_bits(before, outside), name


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_one_bad_value_anywhere_is_found(backend, dtype, bad, rng):
    for size, places in [(1, [0] * 5), (37, range(37)), (4100, [0, 1, 2047, 4095, 4096, 4099])]:
        for i, place in enumerate(places):
            values = random_values(size, dtype, rng).clamp(-1e3, 1e3)
            values[place] = bad
            grads = [torch.ones(5, dtype=dtype, device=backend.device), values.to(backend.device)]
            op, inv_scale = OPS_THAT_CHECK[i % len(OPS_THAT_CHECK)]
            found = scalar(0.0, backend.device)
            args = (found,) if op == "check_" else (found, scalar(inv_scale, backend.device))
            getattr(backend.ops, op)(grads, *args)
            assert found.item() == 1.0, (op, size, place, inv_scale)


@pytest.mark.parametrize("payload", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], ids=hex)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_scale_that_is_nan_leaves_nan_everywhere(backend, dtype, payload, rng):
    """Whatever its payload: rounding one to a half must not carry it into infinity or zero."""
    inv_scale = torch.tensor(payload, dtype=torch.int32).view(torch.float32).to(backend.device)
    for op in ("unscale_", "unscale_norm_"):
        grads = [torch.randn(1003, generator=rng).to(dtype).to(backend.device)]
        found_inf = torch.zeros((), device=backend.device)
        getattr(backend.ops, op)(grads, found_inf, inv_scale)
        assert grads[0].isnan().all() and found_inf.item() == 1.0


def test_many_bad_values(backend, rng):
    grads = [torch.full((40000,), float("nan"), device=backend.device) for _ in range(3)]
    found = scalar(0.0, backend.device)
    backend.ops.unscale_(grads, found, scalar(0.5, backend.device))
    assert found.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_found_inf_is_left_alone_when_all_is_finite(backend, dtype, rng):
    for before in (0.0, 0.25, 1.0):
        found = scalar(before, backend.device)
        grads = [g.tensor for g in guarded_list(SIZES, [dtype], rng, backend.device)]
        backend.ops.check_(grads, found)
        backend.ops.unscale_(grads, found, scalar(0.5, backend.device))
        backend.ops.unscale_norm_(grads, found, scalar(1.0, backend.device))
        assert found.item() == before


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_overflow_while_unscaling_is_found(backend, dtype):
    """A scale below 1 makes inv_scale large; torch checks what was there before the product and misses this."""
    grad = torch.full((100,), torch.finfo(dtype).max / 2, dtype=dtype, device=backend.device)
    found = scalar(0.0, backend.device)
    backend.ops.unscale_([grad], found, scalar(4.0, backend.device))
    assert found.item() == 1.0 and bool(grad.isinf().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_subnormals_survive(backend, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.tensor([tiny / 2, -tiny / 4, tiny, 3 * tiny, -0.0] * 9, dtype=dtype)
    grad = values.to(backend.device, copy=True)
    backend.ops.unscale_([grad], scalar(0.0, backend.device), scalar(0.5, backend.device))
    assert same_bits(grad, (values.double() * 0.5).to(dtype))
    assert bool((grad.cpu()[:3] != 0).all())


@pytest.mark.parametrize("op", ["unscale_", "check_", "unscale_norm_", "clip_", "accumulate_"])
def test_empty_lists_and_empty_tensors(backend, op):
    for grads in ([], [torch.empty(0, device=backend.device), torch.empty(3, 0, device=backend.device)]):
        found, one = scalar(0.5, backend.device), scalar(0.25, backend.device)
        args = {
            "check_": (grads, found),
            "clip_": (grads, one),
            "accumulate_": (grads, clones(grads), found, one),
        }.get(op, (grads, found, one))
        result = getattr(backend.ops, op)(*args)
        assert found.item() == 0.5
        if op == "unscale_norm_":
            total, norms = result
            assert total.item() == 0.0 and total.shape == () and norms.tolist() == [0.0] * len(grads)


@pytest.mark.parametrize("count", [1, 165, 166, 1357, 1358, 1359, 3000])
def test_more_tensors_than_a_launch_holds(backend, count, rng):
    base = random_values(count * 5, torch.float32, rng).to(backend.device)
    grads = list(base.split(5))
    expected = base.cpu() * torch.tensor(0.3)
    found = scalar(0.0, backend.device)
    total, norms = backend.ops.unscale_norm_(grads, found, scalar(0.3, backend.device))
    assert same_bits(base, expected) and found.item() == 0.0
    exact = expected.double().reshape(count, 5).norm(dim=1)
    torch.testing.assert_close(norms.cpu().double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.cpu().double(), exact.norm(), rtol=1e-6, atol=0)


def test_emulated_launches(emulated):
    """One launch a dtype for as many tensors as its parameters hold, and nothing beside it."""
    backend = emulated
    grads = [torch.ones(100 + i % 7, dtype=DTYPES[i % 2]) for i in range(2000)]
    found, inv_scale = scalar(0.0, backend.device), scalar(0.5, backend.device)
    for limit, expected in ((32764, 2), (4096, 14)):
        with backend.emulator.dry_run(parameter_limit=limit) as launches:
            backend.ops.unscale_(grads, found, inv_scale)
        assert len(launches) == expected
        assert all(launch["parameter_bytes"] <= limit for launch in launches)
    with backend.emulator.dry_run() as launches:
        backend.ops.unscale_norm_(grads, found, inv_scale)
    assert len(launches) == 2
    with backend.emulator.dry_run() as launches:
        backend.ops.update_scale_(
            scalar(2.0, backend.device), scalar(0, backend.device, torch.int32), [found] * 256, 2.0, 0.5, 10
        )
    assert len(launches) == 1
    # Unequal tensors share the blocks evenly: one huge tensor among tiny ones gets nearly all of them.
    with backend.emulator.dry_run() as launches:
        backend.ops.unscale_([torch.ones(1), torch.empty(1 << 26), torch.ones(1)], found, inv_scale)
    assert launches[0]["grid"][0] == 4096


# ---- norms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_norm_error_is_bounded(backend, dtype, rng):
    """All values of one sign and alike: the worst case for a running sum."""
    bound = 1e-13 if dtype == torch.float64 else 1e-5
    for size in (1, 1000, 300_001):
        grad = (torch.rand(size, generator=rng, dtype=torch.float64) + 0.5).to(dtype).to(backend.device)
        exact = torch.linalg.vector_norm(grad.cpu().double()).item()
        total, _ = backend.ops.unscale_norm_([grad], scalar(0.0, backend.device), scalar(1.0, backend.device))
        assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert abs(total.item() - exact) <= bound * exact


def test_norm_has_the_same_bits_on_every_run_and_thread_count(backend, rng):
    grads = [random_values(n, torch.float32, rng).to(backend.device) for n in (5, 100_003, 40_000, 77)]
    one = scalar(1.0, backend.device)
    threads = torch.get_num_threads()
    seen = set()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            total, norms = backend.ops.unscale_norm_(grads, scalar(0.0, backend.device), one)
            seen.add((total.item(), *norms.tolist()))
            # Where in memory a tensor starts is part of nothing that a CPU sum depends on.
            if backend.name == "cpu":
                moved = [torch.cat([torch.zeros(3), g])[3:] for g in grads]
                total, norms = backend.ops.unscale_norm_(moved, scalar(0.0, backend.device), one)
                seen.add((total.item(), *norms.tolist()))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


def test_the_last_block_sees_every_sum(emulated):
    """Three blocks that are interrupted around the ticket, again and again. What a missing fence leaves to chance, the
    sanitizer sees."""
    grad = torch.full((3 * 4096,), 2.0)
    for seed in range(20):
        with emulated.emulator.settings(schedule="shuffled", seed=seed, resident_blocks=3, preempt_one_in=2):
            total, _ = emulated.ops.unscale_norm_([grad], scalar(0.0, CPU), scalar(1.0, CPU))
        assert total.item() == pytest.approx(2 * (3 * 4096) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("op", ["unscale_", "check_", "clip_", "accumulate_"])
def test_few_blocks_do_the_work_of_many(emulated, op, rng):
    sizes = [*torch.randint(0, 9000, (30,), generator=rng).tolist(), 20001, 0, 1]
    sources = guarded_list(sizes, [torch.bfloat16], rng, CPU)
    half = scalar(0.5, CPU)

    def results(ops) -> tuple[list[Tensor], Tensor]:
        found, grads = scalar(0.0, CPU), clones([g.tensor for g in sources])
        if op == "accumulate_":
            mains = [torch.ones(g.shape) for g in grads]
            ops.accumulate_(mains, grads, found, half)
            return mains, found
        arguments = {"unscale_": (grads, found, half), "check_": (grads, found), "clip_": (grads, half)}
        getattr(ops, op)(*arguments[op])
        return grads, found

    for last in (1.0, float("nan")):
        sources[-1].tensor.fill_(last)
        expected, expected_found = results(reference)
        for _ in emulated.schedules(grid_limit=3):
            with emulated.emulator.record() as launches:
                ours, found = results(emulated.ops)
            assert all_same_bits(ours, expected) and found.item() == expected_found.item()
            assert [launch["grid"] for launch in launches] == [[3, 1, 1]]


def test_norm_of_nonfinite_gradients(backend):
    for bad, expected in ((float("inf"), float("inf")), (float("nan"), float("nan"))):
        grad = torch.ones(5000, device=backend.device)
        grad[4321] = bad
        found = scalar(0.0, backend.device)
        total, _ = backend.ops.unscale_norm_([grad], found, scalar(0.5, backend.device))
        assert found.item() == 1.0
        assert same_bits(total, torch.tensor(expected))


# ---- clip -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_clip_has_torchs_bits(backend, dtype, rng):
    grads = [g.tensor for g in guarded_list(SIZES, [dtype], rng, backend.device)]
    grads += list(strided_tensors(dtype, rng, backend.device).values())
    for coefficient in (0.37, 0.0, 1.0, float("nan")):
        coef = scalar(coefficient, backend.device)
        ours, theirs = clones(grads), clones(grads)
        reference.clip_(theirs, coef)
        backend.ops.clip_(ours, coef)
        assert all_same_bits(ours, theirs)
    wide = scalar(0.123456789012345, backend.device, torch.float64)
    ours, theirs = clones(grads), clones(grads)
    reference.clip_(theirs, wide)
    backend.ops.clip_(ours, wide)
    assert all_same_bits(ours, theirs)


def test_inactive_clip_touches_no_memory():
    """The gradient lies in memory that may be neither read nor written."""
    program = """
import ctypes, mmap, torch, fastamp.ops
page = mmap.mmap(-1, 1 << 16)
grad = torch.frombuffer(page, dtype=torch.float32)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(grad.data_ptr()), 1 << 16, 0) == 0
fastamp.ops.clip_([grad], torch.tensor(1.0))
print("untouched", flush=True)
fastamp.ops.clip_([grad], torch.tensor(0.5))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "untouched", done.stderr
    assert done.returncode < 0, "the active clip did not touch the page: the test proves nothing"


# ---- accumulate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32], ids=dtype_id)
def test_accumulate_has_pytorchs_bits(backend, dtype, rng):
    grads = [g.tensor for g in guarded_list(SIZES, [dtype], rng, backend.device)]
    mains = [g.tensor for g in guarded_list(SIZES, [torch.float32], rng, backend.device)]
    strided = strided_tensors(dtype, rng, backend.device)
    grads += list(strided.values())
    mains += [torch.randn(g.shape, generator=rng).to(backend.device) for g in strided.values()]
    grads.append(torch.ones(1, dtype=dtype, device=backend.device).expand(60))
    mains.append(torch.ones(60, device=backend.device))
    for inv_scale in (1.0, 1 / 3):
        inv = scalar(inv_scale, backend.device)
        expected = clones(mains)
        found, expected_found = scalar(0.0, backend.device), scalar(0.0, backend.device)
        reference.accumulate_(expected, grads, expected_found, inv)
        backend.ops.accumulate_(mains, grads, found, inv)
        assert all_same_bits(mains, expected)
        assert found.item() == expected_found.item() == 0.0


def test_accumulate_finds_what_is_not_finite(backend):
    for main, grad in ((0.0, float("inf")), (float("nan"), 1.0), (torch.finfo(torch.float32).max, 60000.0)):
        mains = [torch.full((70,), main, device=backend.device)]
        grads = [torch.full((70,), grad, dtype=torch.float16, device=backend.device)]
        found = scalar(0.0, backend.device)
        backend.ops.accumulate_(mains, grads, found, scalar(3e33, backend.device))
        assert found.item() == 1.0


# ---- bad input --------------------------------------------------------------------------------------------


def _bad_calls(device: torch.device) -> dict[str, tuple]:
    good = torch.ones(4, device=device)
    found, inv = scalar(0.0, device), scalar(0.5, device)
    meta = torch.ones(4, device="meta")
    sparse = torch.eye(3, device=device).to_sparse()
    return {
        "integer gradient": (
            "unscale_",
            ([good, torch.ones(3, dtype=torch.int64, device=device)], found, inv),
            r"unscale_: grads\[1\] must be a strided floating-point or complex tensor, got torch.int64",
        ),
        "sparse gradient": ("unscale_", ([good, sparse], found, inv), r"grads\[1\].*sparse"),
        "expanded gradient": (
            "unscale_",
            ([good, torch.ones(1, device=device).expand(4)], found, inv),
            r"unscale_: grads\[1\] overlaps itself",
        ),
        "overlapping windows": (
            "unscale_norm_",
            ([good, torch.ones(9, device=device).as_strided((3, 3), (1, 1))], found, inv),
            r"unscale_norm_: grads\[1\] overlaps itself",
        ),
        "found_inf of another dtype": (
            "unscale_",
            ([good], found.double(), inv),
            r"found_inf must hold one torch.float32",
        ),
        "found_inf of two": (
            "check_",
            ([good], torch.zeros(2, device=device)),
            r"check_: found_inf .* got 2",
        ),
        "inv_scale of another dtype": (
            "unscale_",
            ([good], found, inv.half()),
            r"inv_scale must hold one torch.float32",
        ),
        "inv_scale of none": (
            "unscale_norm_",
            ([good], found, torch.zeros(0, device=device)),
            r"inv_scale .* got 0",
        ),
        "coefficient": ("clip_", ([good], inv.half()), r"clip_: coefficient must hold one torch.float32"),
        "lengths": ("accumulate_", ([good], [good, good], found, inv), r"same length, got 1 and 2"),
        "shapes": ("accumulate_", ([good], [torch.ones(5, device=device)], found, inv), r"same shape"),
        "half main gradient": (
            "accumulate_",
            ([good.half()], [good], found, inv),
            r"main_grads\[0\] must be torch.float32",
        ),
        "double gradient": (
            "accumulate_",
            ([good], [good.double()], found, inv),
            r"grads\[0\] must be torch.float16",
        ),
        "another device": ("unscale_", ([good, meta], found, inv), None),
    }


@pytest.mark.parametrize("case", list(_bad_calls(torch.device("cpu"))))
def test_bad_input_is_refused_before_any_write(backend, case):
    name, args, message = _bad_calls(backend.device)[case]
    tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if t.device.type != "meta"]
    before = clones(tensors)
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        getattr(backend.ops, name)(*args)
    for a, b in zip(tensors, before, strict=True):
        assert torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)


# ---- registration -----------------------------------------------------------------------------------------


def _devices() -> list[str]:
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", _devices())
def test_opcheck(device):
    d = torch.device(device)
    half = [torch.randn(7, 3, device=d), torch.randn(5, device=d).half()]
    mains = [torch.randn(7, 3, device=d), torch.randn(5, device=d)]
    found, inv = scalar(0.0, d), scalar(0.5, d)
    checks = {
        "unscale_": (half, found, inv),
        "check_": (half, found),
        "unscale_norm_": (half, found, inv),
        "clip_": (half, inv),
        "accumulate_": (mains, half, found, inv),
    }
    for name, args in checks.items():
        torch.library.opcheck(getattr(torch.ops.fastamp, name).default, args)


def test_in_place_writes_are_counted(rng):
    """A gradient that autograd has saved must not change behind its back."""
    x = torch.randn(4, requires_grad=True)
    for write in (
        lambda g: fastamp.ops.unscale_([g], torch.zeros(()), torch.tensor(0.5)),
        lambda g: fastamp.ops.unscale_norm_([g], torch.zeros(()), torch.tensor(0.5)),
        lambda g: fastamp.ops.clip_([g], torch.tensor(0.5)),
        lambda g: fastamp.ops.accumulate_([g], [g.detach().clone()], torch.zeros(()), torch.tensor(0.5)),
    ):
        factor = torch.randn(4)
        loss = (x * factor).sum()
        write(factor)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_conjugate_and_negative_views(rng):
    """Scaling by a real number does not care whether a view is conjugated."""
    inv_scale = torch.tensor(0.5)
    for view in (torch.conj, lambda z: z.conj().imag):
        whole = torch.randn(50, dtype=torch.complex64, generator=rng)
        grad = view(whole)
        assert grad.is_conj() or grad.is_neg()
        expected = grad.clone() * 0.5
        norm = fastamp.ops.unscale_norm_([grad], torch.zeros(()), inv_scale)[0]
        assert torch.equal(grad, expected)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(expected).real)
