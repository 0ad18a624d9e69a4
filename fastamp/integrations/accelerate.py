"""accelerate: `optimizer_step_was_skipped` that is right for fused optimizers too.

accelerate takes a step for skipped if `optimizer.step` was not called. A fused optimizer's is always called, and
its kernel skips. fastamp's scaler knows, so `AcceleratedOptimizer.step_was_skipped` is made to ask it.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["teach_accelerate"]


def teach_accelerate() -> None:
    """Has accelerate's optimizers and schedulers ask a `fastamp.GradScaler` whether it skipped the step.

    `fastamp.GradScaler.step` calls this by itself. Optimizers with another scaler, or none, answer as before.
    Does nothing if accelerate has not been imported, or on a second call. No sync; reading the property
    synchronises with the device after a fused optimizer's step.
    """
    module = sys.modules.get("accelerate.optimizer")
    optimizer_class: Any = getattr(module, "AcceleratedOptimizer", None)
    stock = getattr(optimizer_class, "step_was_skipped", None)
    if not isinstance(stock, property) or stock.fget is None or hasattr(stock.fget, "_asks_fastamp"):
        return
    ask_accelerate = stock.fget

    def step_was_skipped(self: Any) -> bool:
        from fastamp.grad_scaler import GradScaler

        if isinstance(self.scaler, GradScaler):
            return self.scaler.step_was_skipped_for(self.optimizer)
        return ask_accelerate(self)

    step_was_skipped._asks_fastamp = True  # type: ignore[attr-defined]
    optimizer_class.step_was_skipped = property(step_was_skipped, doc=stock.__doc__)
