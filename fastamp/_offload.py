"""Host memory for what backward needs later: pinned buffers, and copies on a stream of their own.

`HostCopy` holds the contents of some device tensors. All copies of one device run on one side stream, so a
buffer can be used again without waiting: whatever reads or writes it next is queued behind what did so last.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy", "check_offload", "is_offloadable", "release_pinned_memory"]

# Where a tensor starts in a buffer: device copies are fastest from there, and every dtype may start there.
_ALIGNMENT = 512


def check_offload(offload: str | None, caller: str) -> None:
    if offload not in (None, "cpu"):
        raise ValueError(f"{caller}: offload must be None or 'cpu', got {offload!r}")


def is_offloadable(tensor: Tensor) -> bool:
    """Whether offloading moves a tensor: what is in host memory already stays where it is."""
    return tensor.is_cuda


class Side:
    """The side stream of a CUDA device, and what is done with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy, behind the work that makes `source`. `source` must live until that is `done`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def to_device(self, source: Tensor) -> Tensor:
        """Queue a copy to a new device tensor, which may be read after `wait`."""
        with torch.cuda.stream(self._stream):
            return source.to(self._device, non_blocking=True)

    def done(self) -> torch.cuda.Event:
        """Happens when all that is queued by now has run."""
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event, tensor: Tensor | None = None) -> None:
        """What is queued on the current stream from now on runs after `event`, and may read `tensor`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        if tensor is not None:
            tensor.record_stream(current)  # it belongs to the side stream, which must not reuse it too early


class HostMemory:
    """The pinned buffers of one device, and the copies under way.

    Buffers are pooled by exact size, since pinning takes milliseconds and a training step asks for the same
    sizes each time. At most two copies to the host are under way before computing waits for the older, so
    that the device memory they still hold is bounded, and at most one copy back runs ahead of its use.
    """

    def __init__(self, side: Any) -> None:
        self._side = side
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._leaving: deque[tuple[Any, Sequence[Tensor]]] = deque()
        self._ahead: tuple[weakref.ref[HostCopy], Tensor, Any] | None = None
        self._last: weakref.ref[HostCopy] | None = None
        # A garbage collection can end copies, in this thread too, at any allocation made under the lock.
        self._lock = threading.RLock()

    def store(self, copy: HostCopy, tensors: Sequence[Tensor], offsets: Sequence[int], nbytes: int) -> Tensor:
        with self._lock:
            free = self._free[nbytes]
            buffer = free.pop() if free else self._side.pinned(nbytes)
            for tensor, offset in zip(tensors, offsets, strict=True):
                flat = tensor.view(-1).view(torch.uint8)
                self._side.to_host(flat, buffer[offset : offset + flat.numel()])
            self._leaving.append((self._side.done(), tensors))
            if len(self._leaving) > 2:
                self._side.wait(self._leaving.popleft()[0])
            copy.before = self._last
            self._last = weakref.ref(copy)
            return buffer

    def load(self, copy: HostCopy) -> Tensor:
        """The buffer's contents on the device. The copy stored before this one, which backward is likely to
        want next, starts to load too."""
        with self._lock:
            while self._leaving:  # forward is over: nothing may hold on to device memory any more
                self._side.wait(self._leaving.popleft()[0])
            if self._ahead is not None and self._ahead[0]() is copy:
                _, loaded, event = self._ahead
            else:
                loaded = self._side.to_device(copy.buffer)
                event = self._side.done()
            self._ahead = None
            self._side.wait(event, loaded)
            before = copy.before() if copy.before is not None else None
            if before is not None:
                self._ahead = (weakref.ref(before), self._side.to_device(before.buffer), self._side.done())
            return loaded

    def give_back(self, copy: HostCopy) -> None:
        with self._lock:
            if self._ahead is not None and self._ahead[0]() in (None, copy):
                self._ahead = None
            self._free[copy.buffer.numel()].append(copy.buffer)

    def release(self) -> None:
        with self._lock:
            self._free.clear()


class HostCopy:
    """The contents of device tensors in pinned memory. `unpack_all` may be called any number of times.

    tensors: of one device; they come back contiguous.  memory: tests pass their own.
    """

    __slots__ = ("__weakref__", "_memory", "_parts", "before", "buffer")

    def __init__(self, tensors: Sequence[Tensor], memory: HostMemory | None = None) -> None:
        self._memory = memory or _memory_of(tensors[0].device)
        self.before: weakref.ref[HostCopy] | None = None
        # Whatever the side stream reads must be what stays alive until it has.
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        self._parts, offsets, end = [], [], 0
        for tensor in tensors:
            offsets.append(end)
            self._parts.append((end, tensor.nbytes, tensor.dtype, tensor.shape))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.buffer = self._memory.store(self, tensors, offsets, end)

    def unpack_all(self) -> tuple[Tensor, ...]:
        """New device tensors; work queued on the current stream from now on may read them."""
        loaded = self._memory.load(self)
        return tuple(
            loaded[start : start + nbytes].view(dtype).view(shape) for start, nbytes, dtype, shape in self._parts
        )

    def unpack(self) -> Tensor:
        """The tensor, where there is one only."""
        (tensor,) = self.unpack_all()
        return tensor

    def __del__(self) -> None:
        if hasattr(self, "buffer"):
            self._memory.give_back(self)


_memories: dict[torch.device, HostMemory] = {}
_memories_lock = threading.Lock()


def _memory_of(device: torch.device) -> HostMemory:
    with _memories_lock:
        if device not in _memories:
            _memories[device] = HostMemory(Side(device))
        return _memories[device]


def release_pinned_memory() -> None:
    """Unpin the pooled buffers that hold nothing at the moment."""
    for memory in list(_memories.values()):
        memory.release()
