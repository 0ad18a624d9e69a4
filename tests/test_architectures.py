"""Training steps of many architectures: what has to be exact is, and approximate storage is near."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch

import fastamp

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from _architectures import ARCHITECTURES, gradient_error, loss_and_gradients

pytestmark = pytest.mark.usefixtures("one_thread")


def same(ours, theirs) -> bool:
    return torch.equal(ours[0], theirs[0]) and all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])


def checkpointed(model, inputs, use_reentrant, patch):
    with patch:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        result = loss_and_gradients(model, inputs, contextlib.nullcontext())
        model.gradient_checkpointing_disable()
    return result


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_step(name):
    model, inputs = ARCHITECTURES[name]()
    plain = loss_and_gradients(model, inputs, contextlib.nullcontext())
    assert same(loss_and_gradients(model, inputs, fastamp.store_activations("exact", min_bytes=0)), plain)
    stored = loss_and_gradients(model, inputs, fastamp.store_activations("int8", min_bytes=0))
    assert torch.equal(stored[0], plain[0])
    assert gradient_error(stored[1], plain[1]) < 0.03
    if not model.supports_gradient_checkpointing:
        return
    for use_reentrant in (False, True):
        theirs = checkpointed(model, inputs, use_reentrant, contextlib.nullcontext())
        assert same(checkpointed(model, inputs, use_reentrant, fastamp.patched()), theirs)
    ours = checkpointed(model, inputs, False, fastamp.patched(storage="int8"))
    assert torch.equal(ours[0], plain[0])
    assert gradient_error(ours[1], plain[1]) < 0.1
