"""Lightning: precision plugins with fastamp's scaler that clip the gradients of fused optimizers.

    from fastamp.integrations.lightning import MixedPrecision

    trainer = Trainer(plugins=MixedPrecision("16-mixed", "cuda"), gradient_clip_val=1.0)

Lightning's own plugin takes fastamp's scaler as well, `MixedPrecision("16-mixed", "cuda", scaler=...)`, and then
refuses to clip with an optimizer that unscales in its own step (`fused=True`).
"""

from __future__ import annotations

import importlib
from typing import Any

from fastamp.grad_scaler import GradScaler

__all__ = ["FabricMixedPrecision", "MixedPrecision"]


def _import(name: str) -> Any:
    """From the `lightning` package, or from the one that it was before."""
    root, _, rest = name.partition(".")
    former = {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"}[root]
    try:
        return importlib.import_module(f"lightning.{name}")
    except ModuleNotFoundError as error:
        if error.name != "lightning":
            raise
        return importlib.import_module(f"{former}.{rest}")


_precision = _import("pytorch.plugins.precision")
_fabric_precision = _import("fabric.plugins.precision.amp")


def _scaler(precision: str, device: str, scaler: Any, policies: dict[str, Any]) -> Any:
    if scaler is not None and policies:
        raise TypeError(
            f"MixedPrecision: {', '.join(policies)} can be given for the scaler that the plugin makes, not "
            "beside scaler="
        )
    if precision != "16-mixed" or scaler is not None:
        return scaler
    return GradScaler(device, **policies)


class MixedPrecision(_precision.MixedPrecision):  # type: ignore[name-defined]
    """Lightning's `MixedPrecision` for `Trainer(plugins=...)`, with fastamp's scaler and clipping.

    With `gradient_clip_val`, a fused optimizer's gradients are unscaled, checked and measured in one pass and
    clipped; stock Lightning raises. Clipping by norm leaves an overflow's gradients alone; the step is skipped.

    Args:
        precision: "16-mixed", or "bf16-mixed" without a scaler.
        device: type of the device, for autocast and for the scaler.
        scaler: a `fastamp.GradScaler`, or None to make one.
        policies: keyword-only arguments of `fastamp.GradScaler` for the one that is made (`min_scale`, ...).
    """

    def __init__(self, precision: Any, device: str, scaler: Any = None, **policies: Any) -> None:
        super().__init__(precision, device, _scaler(precision, device, scaler, policies))

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Lightning's hook: clips the optimizer's gradients to `clip_val`, by norm or by value as
        `gradient_clip_algorithm` says. No sync."""
        if clip_val <= 0 or not isinstance(self.scaler, GradScaler):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif not _has_gradients(optimizer):
            return
        elif gradient_clip_algorithm == "norm":
            self.scaler.clip_grad_norm_(optimizer, clip_val)
        else:
            # Lightning has unscaled already, unless the optimizer does that itself.
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self.scaler.unscale_(optimizer)
            # Past the stock plugin, whose method is where it refuses.
            super(_precision.MixedPrecision, self).clip_gradients(optimizer, clip_val, gradient_clip_algorithm)


class FabricMixedPrecision(_fabric_precision.MixedPrecision):  # type: ignore[name-defined]
    """Lightning Fabric's `MixedPrecision` for `Fabric(plugins=...)`, with fastamp's scaler.
    `fabric.clip_gradients` works with fused optimizers too; stock Fabric raises.

    Args as `MixedPrecision`.
    """

    def __init__(self, precision: Any, device: str, scaler: Any = None, **policies: Any) -> None:
        super().__init__(precision, device, _scaler(precision, device, scaler, policies))

    def unscale_gradients(self, optimizer: Any) -> None:
        """Fabric's hook: unscales the optimizer's gradients, a fused one's too. No sync."""
        if isinstance(self.scaler, GradScaler):
            self.scaler.unscale_(optimizer)
        else:
            super().unscale_gradients(optimizer)


def _has_gradients(optimizer: Any) -> bool:
    """False where a training step returned no loss, and so nothing is to be clipped, stepped or updated."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
