"""More than 2^31 and 2^32 elements, on the emulator: sparse memory, of which only the first and last blocks run.

A 32-bit index anywhere between the launcher and the last element would read or write somewhere else.
"""

from __future__ import annotations

import mmap

import pytest
import torch
from op_inputs import random_values, same_bits, scalar
from torch import Tensor

from fastamp import reference

EDGE_BLOCKS = 1
WINDOW = 3000  # elements filled at each end; all of them belong to the first or last block
NUMELS = [2**31 + 5, 2**32 + 5]


def sparse_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
    except OSError as problem:
        pytest.skip(f"this machine cannot map {numel * dtype.itemsize} bytes: {problem}")
    return torch.frombuffer(memory, dtype=dtype)


def run_edges(backend, call, count: int = EDGE_BLOCKS):
    """call() runs for the first and last blocks of all that it launches; returns what it returned."""
    with backend.emulator.dry_run() as launches:
        call()
    blocks = sum(launch["grid"][0] for launch in launches)
    assert blocks > 2 * count
    with backend.emulator.edge_blocks(count, blocks):
        return call()


def fill_ends(tensor: Tensor, rng: torch.Generator) -> list[tuple[slice, Tensor]]:
    """Random values at both ends; returns where they are and what they were."""
    places = [slice(0, WINDOW), slice(tensor.numel() - WINDOW, tensor.numel())]
    for place in places:
        tensor[place] = random_values(WINDOW, tensor.dtype, rng)
    return [(place, tensor[place].clone()) for place in places]


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("op", ["unscale_", "unscale_norm_", "clip_"])
def test_dense(emulated, op, numel, rng):
    grad = sparse_zeros(numel, torch.float16)
    before = fill_ends(grad, rng)
    found, factor = torch.zeros(1), scalar(0.25, emulated.device)
    if op == "clip_":
        run_edges(emulated, lambda: emulated.ops.clip_([grad], factor))
    else:
        run_edges(emulated, lambda: getattr(emulated.ops, op)([grad], found, factor))
    for place, values in before:
        assert same_bits(grad[place], (values.float() * 0.25).half())
    assert found.item() == 0
    # The blocks that did not run drew no ticket of unscale_norm_'s count; one block alone starts it anew.
    emulated.ops.unscale_norm_([torch.ones(1)], found, factor)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("place", [0, -1])
def test_check_finds_the_last_element(emulated, numel, place):
    grad = sparse_zeros(numel, torch.float16)
    grad[place] = float("nan")
    found = torch.zeros(1)
    run_edges(emulated, lambda: emulated.ops.check_([grad], found))
    assert found.item() == 1


def test_accumulate(emulated, rng):
    numel = NUMELS[0]
    main, grad = sparse_zeros(numel, torch.float32), sparse_zeros(numel, torch.bfloat16)
    mains, grads = fill_ends(main, rng), fill_ends(grad, rng)
    found = torch.zeros(1)
    run_edges(emulated, lambda: emulated.ops.accumulate_([main], [grad], found, scalar(0.5, emulated.device)))
    for (place, old), (_, added) in zip(mains, grads, strict=True):
        assert same_bits(main[place], old + added.float() * 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_strided(emulated, dtype, rng):
    """Every other of 2^33 places: offsets pass 2^32 although the elements number 2^31."""
    storage = sparse_zeros(2 * NUMELS[0], dtype)
    grad = storage.view(-1, 2)[:, 0]
    first = slice(0, 256)  # the elements of block 0 in its first and last pass
    step = 4096 * 256
    last = slice((NUMELS[0] - 1) // step * step, NUMELS[0])
    for place in (first, last):
        length = place.stop - place.start
        grad[place] = random_values(length, dtype, rng)
        storage.view(-1, 2)[place, 1] = 7.0
    before = [grad[place].clone() for place in (first, last)]
    found = torch.zeros(1)
    run_edges(emulated, lambda: emulated.ops.unscale_([grad], found, scalar(0.25, emulated.device)))
    for place, values in zip((first, last), before, strict=True):
        assert same_bits(grad[place], (values.float() * 0.25).to(dtype))
        assert bool((storage.view(-1, 2)[place, 1] == 7.0).all())


def test_many_tensors_with_many_elements_together(emulated, rng):
    """No tensor is large, but their chunks are counted together."""
    whole = sparse_zeros(2**32 + 4096, torch.float16)
    grads = list(whole.split(2**22 + 3))
    for tensor in (grads[0][:WINDOW], grads[-1][-WINDOW:]):
        tensor.copy_(random_values(len(tensor), torch.float16, rng))
    before = [grads[0][:WINDOW].clone(), grads[-1][-WINDOW:].clone()]
    found = torch.zeros(1)
    run_edges(emulated, lambda: emulated.ops.unscale_(grads, found, scalar(0.25, emulated.device)))
    assert same_bits(grads[0][:WINDOW], (before[0].float() * 0.25).half())
    assert same_bits(grads[-1][-WINDOW:], (before[1].float() * 0.25).half())


# ---- storage ----------------------------------------------------------------------------------------------
# A pass of all blocks covers 2^24 elements and more: blocks 0 and 4095 come to both ends of each tensor here.

ALIGNED = 32768  # no block of any storage kernel takes more elements in one pass


def storage_ends(numel: int) -> list[slice]:
    """What the first and last block work on, at the beginning and at the end, from whole blocks on."""
    return [slice(0, 4096), slice(numel // ALIGNED * ALIGNED - 4096, numel)]


def of_codes(place: slice, bits: int) -> slice:
    """Where the codes of these elements are in a payload."""
    return slice(place.start * bits // 8, (place.stop * bits + 7) // 8)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize(("format", "block_size"), [("int8", 4096), ("int4", 64)])
def test_quantize_and_dequantize(emulated, format, block_size, numel, rng):
    x, decoded = (sparse_zeros(numel, torch.float16) for _ in range(2))
    for place in storage_ends(numel):
        x[place] = random_values(place.stop - place.start, x.dtype, rng)
    x[7] = float("nan")  # a large block with it goes through shared memory twice, before the next tile does
    payload, scales = run_edges(emulated, lambda: emulated.ops.quantize_blockwise(x, format, block_size, True, 7))
    dequantize = emulated.ops.dequantize_blockwise.out
    run_edges(emulated, lambda: dequantize(payload, scales, [numel], torch.float16, out=decoded))
    for place in storage_ends(numel):
        expected = reference.quantize_blockwise(x[place], format, block_size, True, 7, place.start // 8)
        codes = payload[of_codes(place, 4 if format == "int4" else 8)]
        assert torch.equal(codes, expected[0])
        assert same_bits(scales[place.start // block_size :][: len(expected[1])], expected[1])
        length = place.stop - place.start
        assert same_bits(decoded[place], reference.dequantize_blockwise(*expected, (length,), torch.float16))


@pytest.mark.parametrize("numel", NUMELS)
def test_bits(emulated, numel, rng):
    mask = sparse_zeros(numel, torch.uint8)
    for place in storage_ends(numel):
        mask[place] = (torch.rand(place.stop - place.start, generator=rng) < 0.5).to(torch.uint8)
    payload = run_edges(emulated, lambda: emulated.ops.pack_bits(mask.view(torch.bool)))
    unpacked = run_edges(emulated, lambda: emulated.ops.unpack_bits(payload, [numel]))
    for place in storage_ends(numel):
        assert torch.equal(payload[of_codes(place, 1)], reference.pack_bits(mask[place].bool()))
        assert torch.equal(unpacked[place], mask[place].bool())


@pytest.mark.parametrize("numel", NUMELS)
def test_scaled_mask(emulated, numel, rng):
    x = sparse_zeros(numel, torch.float16)
    for place in storage_ends(numel):
        x[place] = torch.where(torch.rand(place.stop - place.start, generator=rng) < 0.5, 1.25, 0.0)
    x[-1] = 1.25
    # Two: the last block of all makes the value.
    payload, value = run_edges(emulated, lambda: emulated.ops.pack_scaled_mask(x), 2)
    assert value.item() == 1.25
    for place in storage_ends(numel):
        assert torch.equal(payload[of_codes(place, 1)], reference.pack_bits(x[place] != 0))
