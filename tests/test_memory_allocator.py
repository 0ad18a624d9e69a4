"""The simulated CUDA caching allocator, and sizes in words."""

from __future__ import annotations

import itertools
import random

import pytest

from fastamp.memory import format_bytes, parse_bytes
from fastamp.memory._allocator import CachingAllocator, place, rounded, segment_size

MIB = 1 << 20


def test_rounding_and_segments_are_torchs():
    assert [rounded(size) for size in (1, 512, 513, 1000)] == [512, 512, 1024, 1024]
    assert segment_size(512) == segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == segment_size(10 * MIB - 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB and segment_size(11 * MIB) == 12 * MIB


def test_small_tensors_share_a_segment_and_large_ones_do_not():
    allocator = CachingAllocator()
    for key in range(4096):
        allocator.allocate(key, 500)
    assert allocator.allocated == allocator.reserved == 2 * MIB
    allocator.allocate("large", 30 * MIB)
    assert allocator.reserved == 32 * MIB
    allocator.free("large")
    allocator.allocate("smaller", 29 * MIB + MIB // 2)  # the rest is too small to split off
    assert allocator.allocated == 32 * MIB and allocator.reserved == 32 * MIB


def test_the_best_fit_is_split_and_neighbours_merge():
    allocator = CachingAllocator()
    allocator.allocate("a", 40 * MIB)
    allocator.allocate("b", 20 * MIB)
    allocator.free("a")
    allocator.free("b")
    allocator.allocate("c", 12 * MIB)  # goes into the 20 MiB, not the 40 MiB
    allocator.allocate("d", 40 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.free("c")
    allocator.allocate("e", 20 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_hole_too_small_is_fragmentation_that_expandable_segments_avoid():
    def actions():
        for n in range(8):
            yield n, 16 * MIB
        for n in range(8):
            yield n, 0
        yield "all", 128 * MIB

    placed = place(128 * MIB, actions())
    assert placed.allocated == 128 * MIB and placed.reserved == 256 * MIB
    assert placed.fragmentation == 128 * MIB
    assert placed.expandable_reserved == 140 * MIB  # whole pages of 20 MiB


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
def test_random_sequences_lose_and_overlap_nothing(expandable):
    sizes = [1, 511, 513, 5000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB]
    for seed in range(40):
        draw = random.Random(seed)
        allocator, live = CachingAllocator(expandable), {}
        for key in range(200):
            if live and draw.random() < 0.5:
                gone = draw.choice(sorted(live))
                allocator.free(gone)
                del live[gone]
            else:
                live[key] = draw.choice([*sizes, draw.randrange(1, 40 * MIB)])
                allocator.allocate(key, live[key])
            used = list(allocator._used.values())
            free = [entry[2] for pool in allocator._free.values() for entry in pool]
            assert sum(piece.size for piece in used) == allocator.allocated >= sum(live.values())
            assert allocator.allocated + sum(piece.size for piece in free) == allocator.reserved
            spans = sorted((piece.small, piece.address, piece.address + piece.size) for piece in used + free)
            assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
        for key in live:
            allocator.free(key)
        assert allocator.allocated == 0


@pytest.mark.parametrize(
    "text, size",
    [
        ("10GB", 10_000_000_000),
        ("10 GiB", 10 << 30),
        ("10g", 10 << 30),
        ("512MiB", 512 * MIB),
        ("1.5 mb", 1_500_000),
        ("2 gigabytes", 2_000_000_000),
        ("100 bytes", 100),
        ("1_000_000", 1_000_000),
        ("1,000 kB", 1_000_000),
        ("1,000,000", 1_000_000),
        (".5GB", 500_000_000),
        ("1e9", 10**9),
        (123, 123),
        (1.5e9, 1_500_000_000),
    ],
)
def test_sizes_in_any_usual_spelling(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "ten", "10XB", "-5GB", "0", "nan", "1e999", "10 G B", "5bb", "1.2.3GB", "1,5GB", "10,00", 0, -1, float("inf")],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"memory must be a (size|positive)"):
        parse_bytes(text, "memory")


@pytest.mark.parametrize("value", [None, True, [1], b"10GB"])
def test_what_is_no_number_or_text_is_refused(value):
    with pytest.raises(TypeError, match="budget must be a number of bytes or a size"):
        parse_bytes(value)


def test_sizes_are_written_for_people():
    assert [format_bytes(n) for n in (0, 512, 1536, 20 * MIB, 3 << 40, -2048)] == [
        "0 B",
        "512 B",
        "1.50 KiB",
        "20.0 MiB",
        "3.00 TiB",
        "-2.00 KiB",
    ]
