"""What the CUDA caching allocator makes of a sequence of allocations: rounding, segments, fragmentation.

Follows the rules of torch's c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes are rounded to
512 bytes; requests up to 1 MiB share 2 MiB segments, larger ones up to 10 MiB share 20 MiB segments, still
larger ones get a segment of their own in multiples of 2 MiB; the smallest free block that fits is taken and
split, and free neighbours merge. One stream is assumed. `expandable` is
PYTORCH_ALLOC_CONF=expandable_segments:True, where memory grows in pages of one segment a pool (2 MiB and 20 MiB)
and neighbours always merge.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

ROUND = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_BELOW = 10 << 20
ROUND_LARGE = 2 << 20


def rounded(size: int) -> int:
    """Bytes the allocator hands out for a request of `size` bytes."""
    return max(ROUND, (size + ROUND - 1) // ROUND * ROUND)


def segment_size(size: int) -> int:
    """Bytes it asks of the driver when no free block fits a rounded `size`."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE_BELOW:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


class _Piece:
    """A stretch of a segment: free, or one allocation."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = False
        self.before: _Piece | None = None
        self.after: _Piece | None = None


class CachingAllocator:
    """`allocated`: bytes in use, rounded. `reserved`: bytes asked of the driver. Both with their peaks."""

    def __init__(self, expandable: bool = False) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._expandable = expandable
        self._used: dict[Hashable, _Piece] = {}
        # The free pieces of each pool by size, then address: the first one that is large enough is the best
        # fit.
        self._free: dict[bool, list[tuple[int, int, _Piece]]] = {True: [], False: []}
        self._last: dict[bool, _Piece | None] = {True: None, False: None}
        self._end = {True: 0, False: 0}  # each pool has an address range of its own

    def allocate(self, key: Hashable, size: int) -> None:
        size = rounded(size)
        small = size <= SMALL
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, -1))
        piece = pool.pop(at)[2] if at < len(pool) else self._grow(size, small)
        piece.free = False
        rest = piece.size - size
        if rest >= ROUND if small or self._expandable else rest > SMALL:
            self._split(piece, size)
        self._used[key] = piece
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: Hashable) -> None:
        piece = self._used.pop(key)
        self.allocated -= piece.size
        self._keep(self._merge_with_neighbours(piece))

    def _keep(self, piece: _Piece) -> None:
        piece.free = True
        bisect.insort(self._free[piece.small], (piece.size, piece.address, piece))

    def _grow(self, size: int, small: bool) -> _Piece:
        if not self._expandable:
            return self._segment(segment_size(size), small)
        last = self._last[small]
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        have = last.size if last is not None and last.free else 0
        piece = self._segment((size - have + page - 1) // page * page, small)
        if last is not None:
            piece.before, last.after = last, piece
        self._last[small] = piece
        return self._merge_with_neighbours(piece)

    def _segment(self, size: int, small: bool) -> _Piece:
        piece = _Piece(self._end[small], size, small)
        self._end[small] += size
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return piece

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.address + size, piece.size - size, piece.small)
        piece.size = size
        rest.before, rest.after, piece.after = piece, piece.after, rest
        if rest.after is not None:
            rest.after.before = rest
        if self._last[piece.small] is piece:
            self._last[piece.small] = rest
        self._keep(rest)

    def _merge_with_neighbours(self, piece: _Piece) -> _Piece:
        for other in (piece.before, piece.after):
            if other is None or not other.free:
                continue
            pool = self._free[other.small]
            del pool[bisect.bisect_left(pool, (other.size, other.address))]
            first, second = (other, piece) if other is piece.before else (piece, other)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            if self._last[first.small] is second:
                self._last[first.small] = first
            piece = first
        return piece


@dataclass(frozen=True)
class Placement:
    """What the allocator holds at most for a step, in bytes.

    requested: what tensors ask for at the peak. allocated: with each rounded. reserved: in segments, which is
    what other programs see as taken. fragmentation: reserved but not allocated when reserved was highest.
    """

    requested: int
    allocated: int
    reserved: int
    expandable_reserved: int

    @property
    def fragmentation(self) -> int:
        return self.reserved - self.allocated


def place(requested: int, actions: Iterable[tuple[Hashable, int]]) -> Placement:
    """Replay `actions`: (key, bytes) allocates, (key, 0 or less) frees. `requested`: the unrounded peak."""
    plain, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for key, size in actions:
        for allocator in (plain, expandable):
            if size > 0:
                allocator.allocate(key, size)
            else:
                allocator.free(key)
    return Placement(requested, plain.peak_allocated, plain.peak_reserved, expandable.peak_reserved)
