"""Fused mixed-precision primitives for PyTorch: a drop-in GradScaler and checkpoint.

    from fastamp import GradScaler            # in place of torch.amp.GradScaler
    from fastamp import checkpoint            # in place of torch.utils.checkpoint.checkpoint
"""

from fastamp._version import __version__

__all__ = ["__version__"]
