"""Operators that fake tensors run with results of another size than real tensors have, and what to run instead.

A sparse tensor of fake indices and values has as many entries as they say, but copies and sums of it have none: so
the gradients of an embedding with `sparse=True` would be empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

FAKE_KERNELS: dict[Any, Callable[..., Any]] = {}
"""Operator -> what to run in its place."""


def _stands_in(func: Any) -> None:
    in_place = func._schema.is_mutable

    def run(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        sparse = [each for each in args if isinstance(each, Tensor) and each.layout is torch.sparse_coo]
        if not sparse or result.layout is not torch.sparse_coo:
            return result
        # A sum has the entries of both, until it is coalesced; how many are then left only their values tell.
        entries = sum(each._nnz() for each in sparse)
        indices, values = sparse[0]._indices(), sparse[0]._values()
        filled = torch.sparse_coo_tensor(
            indices.new_empty((indices.shape[0], entries)),
            values.new_empty((entries, *values.shape[1:]), dtype=result.dtype),
            result.shape,
            check_invariants=False,
        )
        if not in_place:
            return filled
        args[0].data = filled
        return args[0]

    FAKE_KERNELS[func] = run


for _name in ("clone", "_coalesce", "_to_copy", "neg", "add.Tensor", "add_.Tensor", "mul.Tensor", "div.Tensor"):
    _packet, _, _overload = _name.partition(".")
    _stands_in(getattr(getattr(_aten, _packet), _overload or "default"))
