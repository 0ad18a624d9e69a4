"""Fused mixed-precision primitives for PyTorch: a drop-in GradScaler and checkpoint.

Change two imports of a training loop:

    from fastamp import GradScaler            # in place of torch.amp.GradScaler
    from fastamp import checkpoint            # in place of torch.utils.checkpoint.checkpoint
"""

import importlib
from typing import TYPE_CHECKING, Any

from fastamp._version import __version__

if TYPE_CHECKING:
    from fastamp.checkpointing import checkpoint, checkpoint_sequential, checkpoint_stack
    from fastamp.clip import clip_grad_norm_
    from fastamp.cpp import include_paths, library_path
    from fastamp.grad_scaler import GradScaler
    from fastamp.patching import patch, patched, unpatch
    from fastamp.scheduling import step_scheduler
    from fastamp.store import store_activations

__all__ = [
    "GradScaler",
    "__version__",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_stack",
    "clip_grad_norm_",
    "include_paths",
    "library_path",
    "patch",
    "patched",
    "step_scheduler",
    "store_activations",
    "unpatch",
]

# Imported at first use, so that `import fastamp` loads no compiled code.
_HOMES = {
    "GradScaler": "fastamp.grad_scaler",
    "checkpoint": "fastamp.checkpointing",
    "checkpoint_sequential": "fastamp.checkpointing",
    "checkpoint_stack": "fastamp.checkpointing",
    "clip_grad_norm_": "fastamp.clip",
    "include_paths": "fastamp.cpp",
    "library_path": "fastamp.cpp",
    "patch": "fastamp.patching",
    "patched": "fastamp.patching",
    "step_scheduler": "fastamp.scheduling",
    "store_activations": "fastamp.store",
    "unpatch": "fastamp.patching",
}


def __getattr__(name: str) -> Any:
    if name == "memory":  # a module, which takes long to import
        return importlib.import_module("fastamp.memory")
    if name not in _HOMES:
        raise AttributeError(f"module 'fastamp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
