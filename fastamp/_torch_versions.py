"""What differs between the versions of torch that fastamp supports."""

from __future__ import annotations

import torch


def _never() -> bool:
    return False


is_non_strict_tracing = getattr(torch.compiler, "_is_non_strict_tracing", _never)

if hasattr(torch.compiler, "_is_exporting_flag"):

    def is_exporting() -> bool:
        """``torch.compiler.is_exporting()``, which in torch 2.10 is True inside torch.compile as well."""
        return torch.compiler._is_exporting_flag

else:
    is_exporting = torch.compiler.is_exporting
