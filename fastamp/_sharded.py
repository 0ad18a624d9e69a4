"""What `patch()` puts in the place of FSDP's `ShardedGradScaler`. Imported once FSDP's own module has been."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from fastamp import grad_scaler, patching


class ShardedGradScaler(  # type: ignore[misc]  # torch's own narrows a hook's arguments
    grad_scaler.GradScaler, TorchShardedGradScaler, metaclass=patching.StandIn
):
    """`fastamp.GradScaler` in the place of FSDP's, with the options given to `patch()`.

    As torch's it combines "found inf" over the ranks of `process_group` (None: of all), takes float16
    gradients and leaves a scaled loss in its dtype. Unlike torch's it combines before a fused optimizer's
    step too, and the scale does not grow to infinity on the CPU.
    """

    _stands_for = TorchShardedGradScaler
    # fastamp's other scalers are no sharded ones, as torch's are not.
    _device_types = ()

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        **policies: Any,
    ) -> None:
        policies = {**patching.scaler_options(), "allow_fp16_grads": True, **policies}
        patchs_group = policies.pop("process_group", None)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled, **policies)
        if self._enabled:
            self.process_group = process_group if process_group is not None else patchs_group

    def _group(self) -> Any:
        # Not sooner: scalers may be made before the default group is.
        return self.process_group if self.process_group is not None else torch.distributed.group.WORLD

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        return scaled.to(outputs.dtype) if isinstance(outputs, torch.Tensor) else scaled


patching.add_stand_in(TorchShardedGradScaler, ShardedGradScaler)
