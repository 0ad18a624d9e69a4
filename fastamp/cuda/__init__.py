"""Mirrors the part of ``torch.cuda`` that fastamp replaces."""

from fastamp.cuda import amp

__all__ = ["amp"]
