"""Learning-rate schedules that stand still while the scaler skips steps."""

from __future__ import annotations

from typing import Any

from fastamp.grad_scaler import GradScaler

__all__ = ["step_scheduler"]

# An object may have any attribute that it is asked for, or be its own `.optimizer`.
_MAX_WRAPPERS = 16


def step_scheduler(scaler: GradScaler, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """`scheduler.step(*args, **kwargs)`, unless the scaler skipped the optimizer's step.

        scaler.step(optimizer)
        scaler.update()
        fastamp.step_scheduler(scaler, scheduler)     # in place of scheduler.step()

    Of several optimizers, the one that counts is the scheduler's (`scheduler.optimizer`, also where that wraps
    the optimizer that was stepped in an `.optimizer` of its own); a scheduler without one stands still if any
    was skipped. Right for fused optimizers too, whose own kernel skips. Call it between `scaler.step` and the
    next one, before or after `scaler.update`.

    Synchronises with the device after the step of a fused optimizer, otherwise not.

    Args:
        scaler: the scaler that has taken the step. A disabled one never skips.
        scheduler: anything with a `step` method: torch's schedulers, `ReduceLROnPlateau`, a library's own.
        args, kwargs: passed on to it.

    Returns:
        Whether the scheduler advanced.

    Raises:
        TypeError: `scaler` is not fastamp's: torch's does not say whether it skipped.
    """
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"step_scheduler: scaler must be a fastamp.GradScaler, got {type(scaler).__module__}."
            f"{type(scaler).__qualname__}, which does not say whether it skipped a step"
        )
    if _was_skipped(scaler, getattr(scheduler, "optimizer", None)):
        return False
    scheduler.step(*args, **kwargs)
    return True


def _was_skipped(scaler: GradScaler, optimizer: Any) -> bool:
    stepped = scaler._history.steps if scaler._history is not None else {}
    for _ in range(_MAX_WRAPPERS):
        if optimizer is None:
            break
        if id(optimizer) in stepped:
            return scaler.step_was_skipped_for(optimizer)
        optimizer = getattr(optimizer, "optimizer", None)
    return scaler.step_was_skipped
