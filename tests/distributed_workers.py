"""Processes of one gloo group, kept between tests: starting one takes longer than most tests do.

A scenario is a function `(rank, group, **kwargs) -> picklable` in a module that the processes can import. It runs
in the first `size` ranks at once, with the group of those ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD = 4
# A scenario takes a second or two; a hang has to show well within this.
TIME_LIMIT = 150.0
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "fastamp.patching"]


def _serve(rank: int, size: int, folder: str, connection: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIME_LIMIT),
    )
    groups = {count: dist.new_group(range(count)) for count in range(2, size + 1, 2)}
    while True:
        function, count, kwargs = connection.recv()
        try:
            torch.manual_seed(0)
            connection.send((None, function(rank, groups[count], **kwargs)))
        except BaseException:
            connection.send((traceback.format_exc(), None))


class Workers:
    def __init__(self, folder: Path, size: int = WORLD) -> None:
        context = multiprocessing.get_context("forkserver")
        # One process imports, the others are its forks.
        context.set_forkserver_preload(_PRELOAD)
        self.size = size
        self.processes: list[Any] = []
        self.connections: list[Any] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(folder), theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(mine)

    def run(self, function: Callable[..., Any], size: int, **kwargs: Any) -> list[Any]:
        """The results of ranks 0 to size - 1. Raises AssertionError where one failed, ended or did not answer."""
        self.send(function, size, **kwargs)
        return self.results(size)

    def send(self, function: Callable[..., Any], size: int, **kwargs: Any) -> None:
        for connection in self.connections[:size]:
            connection.send((function, size, kwargs))

    def results(self, size: int, ranks: list[int] | None = None) -> list[Any]:
        deadline = time.monotonic() + TIME_LIMIT
        results, failures = [], []
        for rank in range(size) if ranks is None else ranks:
            connection = self.connections[rank]
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} did not answer within {TIME_LIMIT:.0f} s")
                continue
            try:
                failure, result = connection.recv()
            except EOFError:
                failures.append(f"rank {rank} has ended")
                continue
            results.append(result)
            if failure is not None:
                failures.append(f"rank {rank}:\n{failure}")
        if failures:
            # What the others wait for will not come.
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join()

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()
        self.processes = []
