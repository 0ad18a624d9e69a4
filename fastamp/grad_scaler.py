"""``torch.amp.GradScaler`` with fewer passes over the gradients, fewer kernels and less host time."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from fastamp import _gradients, _scalars, clip, profiling
from fastamp._gradients import GradientBuckets, gradient_buckets, has_kernels, unscale_on_one_device
from fastamp._overflow import OverflowedParameter, nonfinite
from fastamp._torch_versions import is_exporting
from fastamp.integrations.accelerate import teach_accelerate

__all__ = ["GradScaler", "OptState", "OverflowedParameter"]

_Skip = bool | list[Tensor]

# By a name of its own: fastamp.patch() puts another class at torch.amp.GradScaler.
_TorchGradScaler = torch.amp.GradScaler

# update_scale_ takes an int32 interval; a tracker that counts single steps never reaches this one.
_NEVER = 2**31 - 1
# Default settings halve 65536 to 2**-4 in this many steps: no overflow is the scale's doing by then.
_COLLAPSE_CHECK_INTERVAL = 20


class _StepHistory:
    """What became of the steps of one iteration, kept until the first step of the next."""

    def __init__(self) -> None:
        # Optimizer id -> skipped or not where the host knows, else the live found_inf tensors.
        self.steps: dict[int, _Skip] = {}
        self.closed = False
        self.skips_in_a_row = 0

    def record(self, optimizer: torch.optim.Optimizer, outcome: _Skip) -> None:
        if self.closed:
            self.steps = {}
            self.closed = False
        self.steps[id(optimizer)] = outcome

    def any_skipped(self, outcomes: Iterable[_Skip]) -> bool:
        """Reads the device at most once."""
        found_infs: list[Tensor] = []
        for outcome in outcomes:
            if outcome is True:
                return True
            if outcome:
                found_infs += outcome
        return _is_set(found_infs)


class GradScaler(torch.amp.GradScaler):
    """Drop-in for :class:`torch.amp.GradScaler`: parameters, gradients, scale, growth tracker and
    ``state_dict`` come out bit for bit as torch's do, for fused and other optimizers alike.

    It subclasses torch's scaler, so ``isinstance`` checks and third-party subclasses keep working; a subclass
    that overrides ``_unscale_grads_`` or ``_maybe_opt_step`` sees them called as by torch. Gradients that
    fastamp has no kernels for (sparse, DTensor and other tensor subclasses, devices such as MPS or XPU) take
    torch's own path.

    Where it departs from torch, it is a bug of torch's: with gradients on two devices that both overflow, a
    fused optimizer is skipped (torch hands it ``found_inf == 2``, which fused kernels read as "take the
    step"); and a finite gradient that overflows while being unscaled with a scale below 1 counts as an
    overflow.

    Nothing synchronises with the device where torch does not.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale: the scale is never backed off below this. Default: no floor, as torch.
        max_scale: the scale never grows above this. Default: no ceiling, as torch.
        hysteresis: back off only at this many overflows without a clean step between them (Megatron's and
            DeepSpeed's meaning of the word). The step is skipped at each. Default: 1, back off at every
            overflow, as torch.
        process_group: combine "found inf" over this ``torch.distributed`` group (MAX), so that ranks that
            hold different gradients skip together. Every rank then calls ``unscale_``, or ``step`` with an
            optimizer that it did not unscale, equally often, with gradients or without. Default: None, no
            communication, as torch.
        allow_fp16_grads: let ``unscale_`` take float16 gradients, which torch refuses: unscaled in place,
            they lose what scaling saved from underflow. Default: False.

    Raises:
        AssertionError: ``growth_factor`` <= 1 or ``backoff_factor`` >= 1, as torch.
        ValueError: a value that torch would take and then silently misbehave on (NaN, a scale that is not
            positive, a negative interval), or an invalid keyword-only argument.

    The keyword-only policies ``min_scale``, ``max_scale`` and ``hysteresis`` add entries to ``state_dict``
    once switched on; torch's scaler ignores them when it loads one.
    """

    # Instance attributes only where a policy is on: an instance without them holds, and pickles, what torch's
    # does.
    _min_scale: float | None = None
    _max_scale: float | None = None
    _hysteresis: int = 1
    _init_hysteresis_tracker: int = 1
    _hysteresis_tracker: Tensor | None = None
    _process_group: Any = None
    _allow_fp16_grads: bool = False
    _history: _StepHistory | None = None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        process_group: Any = None,
        allow_fp16_grads: bool = False,
    ) -> None:
        _check_policies(min_scale, max_scale, hysteresis)
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            # torch's warning, raised here so that it points at the caller's line.
            warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=2)
            enabled = False
        # Not super(): fastamp.cuda.amp.GradScaler also inherits from torch.cuda.amp.GradScaler, whose
        # __init__ takes other arguments.
        _TorchGradScaler.__init__(self, device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if not self._enabled:
            return
        _check_positive("init_scale", init_scale)
        _check_positive("growth_factor", growth_factor)
        _check_positive("backoff_factor", backoff_factor)
        _check_interval(growth_interval)
        if min_scale is not None:
            self._min_scale = float(min_scale)
        if max_scale is not None:
            self._max_scale = float(max_scale)
        if hysteresis != 1:
            self._hysteresis = self._init_hysteresis_tracker = hysteresis
        if process_group is not None:
            self._process_group = process_group
        if allow_fp16_grads:
            self._allow_fp16_grads = True

    # ---- the scale -----------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or each tensor of an iterable, by the scale: :meth:`torch.amp.GradScaler.scale`.

        Can be called inside a function that ``torch.compile`` compiles, without a graph break. No sync.

        Args:
            outputs: a tensor of any floating dtype and shape, usually the 0-dim loss, or an iterable of such
                tensors. The first call makes the scale on its device.

        Returns:
            ``outputs`` times the scale, differentiable, in the same nesting. Dtypes are those of a product
            with a 0-dim float32: a 0-dim float16 loss gives float32, other float16 tensors stay float16.

        Raises:
            ValueError: ``outputs`` is neither a tensor nor an iterable (as torch).
            RuntimeError: called under ``torch.export``, which would freeze the scale to its present value.
        """
        if is_exporting():
            raise RuntimeError(
                "GradScaler.scale: cannot be exported, because the scale changes while training goes on and an "
                "exported program would keep its present value. Export the model without the scaler."
            )
        if not self._enabled or not isinstance(outputs, Tensor):
            return super().scale(outputs)
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        assert self._scale is not None
        return outputs * self._scale.to(device=outputs.device, non_blocking=True)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # Not super(): torch.compile refuses to trace what is in torch's own file.
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        if self._has_scale_policy() and not has_kernels(self._scale.device):
            raise RuntimeError(
                "GradScaler: min_scale, max_scale and hysteresis need fastamp kernels for "
                f"{self._scale.device}, which this build does not have (`python -m fastamp` lists what is "
                "there)"
            )
        if self._hysteresis != 1:
            self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)

    def _has_scale_policy(self) -> bool:
        return self._min_scale is not None or self._max_scale is not None or self._hysteresis != 1

    def get_scale(self) -> float:
        """The current scale, or 1.0 if scaling is disabled. Synchronises with the device, as torch's does."""
        scale = super().get_scale()
        if scale == 0.0:
            self._warn_of_collapse(scale, stacklevel=3)
        return scale

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor that the scale grows by. Raises ValueError unless ``new_factor`` is a positive
        number."""
        super().set_growth_factor(_check_positive("new_factor", new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor that the scale is backed off by. Raises ValueError unless ``new_factor`` is a
        positive number."""
        super().set_backoff_factor(_check_positive("new_factor", new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of clean steps that make the scale grow. Raises ValueError if ``new_interval`` is
        negative."""
        super().set_growth_interval(_check_interval(new_interval))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends the iteration: backs the scale off if a step overflowed, grows it after ``growth_interval``
        clean ones.

        As :meth:`torch.amp.GradScaler.update`, with found_inf combined over devices and optimizers by max,
        and ``min_scale``, ``max_scale`` and ``hysteresis`` applied where set. One op; no sync.

        Args:
            new_scale: a float, or a 1-element float32 tensor on the scaler's kind of device, to set the scale
                to.

        Raises:
            AssertionError: no gradient was checked since the last update, or ``new_scale`` is unsuitable (as
                torch).
            ValueError: ``new_scale`` is a float that is not positive or not finite.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states
        found_infs = [f for state in states.values() for f in state["found_inf_per_device"].values()]
        before = scale.clone() if profiling.observed() else None
        if new_scale is not None:
            if isinstance(new_scale, float):
                _check_positive("new_scale", new_scale)
            super().update(new_scale)
        else:
            if not found_infs:
                raise AssertionError(
                    "No inf checks were recorded prior to update. Neither unscale_() nor step() has found "
                    "a gradient to check since the last update(): call scaler.step(optimizer) before "
                    "scaler.update(), and check that backward() reaches the optimizer's parameters."
                )
            with profiling.span("update"):
                self._update_scale(scale, growth_tracker, found_infs)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for state in states.values():
            _drop_folded_clip(state)
        if self._history is not None:
            self._end_iteration(self._history)
        if before is not None:
            profiling.updated(self, before, found_infs)

    def _update_scale(self, scale: Tensor, growth_tracker: Tensor, found_infs: list[Tensor]) -> None:
        device = scale.device
        if not has_kernels(device):
            torch._amp_update_scale_(
                scale,
                growth_tracker,
                _combine(found_infs, device),
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
            return
        _gradients.update_scale_(
            scale,
            growth_tracker,
            [_move(found_inf, device) for found_inf in found_infs],
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval if 0 < self._growth_interval < _NEVER else _NEVER,
            self._min_scale,
            self._max_scale,
            self._hysteresis,
            self._hysteresis_tracker,
        )

    # ---- unscaling -----------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place, and notes whether any is NaN or infinite.

        As :meth:`torch.amp.GradScaler.unscale_`: gradients are multiplied by float32(1 / scale), and left
        untouched at a scale of 1. The flag is kept until ``update``. No sync.

        Raises:
            AssertionError: ``scale()`` has not been called yet.
            RuntimeError: called twice for this optimizer, or after its ``step``, since the last ``update``.
            ValueError: a gradient is float16 and ``allow_fp16_grads`` is not set.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        # The correctly rounded reciprocal, which torch takes by way of float64: the float64 quotient of a
        # 24-bit number never comes to lie on a rounding boundary of float32, so that both roundings agree.
        inv_scale = scale.reciprocal()
        with profiling.span("unscale"):
            if self._is_own("_unscale_grads_"):
                found_infs = self._pass_from_zero(optimizer, self._allow_fp16_grads, inv_scale)
            else:
                found_inf = torch.full((), 0.0, dtype=torch.float32, device=scale.device)
                found_infs = self._unscale_grads_(optimizer, inv_scale, found_inf, self._allow_fp16_grads)
            state["found_inf_per_device"] = self._over_group(found_infs)
        state["stage"] = OptState.UNSCALED

    def _is_own(self, name: str) -> bool:
        """False where a subclass, or an assignment to the class or the instance, has replaced the method."""
        return getattr(getattr(self, name), "__func__", None) is _OWN_METHODS[name]

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's hook: returns a found_inf for each device, new tensors that start from ``found_inf``'s
        value."""
        buckets = self._gather(optimizer, allow_fp16)
        return self._pass(buckets, optimizer, inv_scale, lambda device: found_inf.to(device, copy=True))

    def _pass_from_zero(
        self, optimizer: torch.optim.Optimizer, allow_fp16: bool, inv_scale: Tensor | None
    ) -> dict[torch.device, Tensor]:
        """Unscales, or only checks without ``inv_scale``. Returns found_inf by device."""
        assert self._scale is not None
        device = self._scale.device
        found_inf = _scalars.zero(device)
        buckets = unscale_on_one_device(optimizer.param_groups, inv_scale, found_inf, allow_fp16)
        if buckets is None:
            return {device: found_inf}
        _refuse_fp16(optimizer, buckets, allow_fp16)
        return self._pass(buckets, optimizer, inv_scale, _scalars.zero)

    def _pass(
        self,
        buckets: GradientBuckets,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor | None,
        new_found_inf: Callable[[torch.device], Tensor],
    ) -> dict[torch.device, Tensor]:
        found_infs: dict[torch.device, Tensor] = {}
        for device in buckets.devices:
            found_infs[device] = found_inf = new_found_inf(device)
            if inv_scale is None:
                buckets.check(device, found_inf)
            else:
                buckets.unscale(device, _move(inv_scale, device), found_inf)
        if buckets.other:
            self._torch_pass(buckets, optimizer, inv_scale, new_found_inf, found_infs)
        return found_infs

    def _gather(self, optimizer: torch.optim.Optimizer, allow_fp16: bool) -> GradientBuckets:
        buckets = gradient_buckets(optimizer.param_groups)
        _refuse_fp16(optimizer, buckets, allow_fp16)
        return buckets

    def _torch_pass(
        self,
        buckets: GradientBuckets,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor | None,
        new_found_inf: Callable[[torch.device], Tensor],
        found_infs: dict[torch.device, Tensor],
    ) -> None:
        """torch's own path for the gradients in ``buckets.other``; adds what it finds to ``found_infs``."""
        scale = self._scale
        device = scale.device if scale is not None else buckets.other[0].device
        if inv_scale is None:
            inv_scale = _scalars.one(device)
        params = [optimizer.param_groups[group]["params"][index] for group, index in buckets.other_at]
        found = super()._unscale_grads_(_Params(params), inv_scale, new_found_inf(device), True)  # type: ignore[arg-type]
        for device, flag in found.items():
            own = found_infs.setdefault(device, flag)
            if own is not flag:
                torch.maximum(own, flag, out=own)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Notes whether any of the optimizer's gradients is NaN or infinite; reads them, never writes."""
        if not self._is_own("_unscale_grads_"):
            found_infs = super()._check_inf_per_device(optimizer)
        else:
            self._check_scale_growth_tracker("_check_inf_per_device")
            with profiling.span("check"):
                found_infs = self._pass_from_zero(optimizer, True, None)  # type: ignore[assignment]
        found_infs = self._over_group(found_infs)  # type: ignore[arg-type, assignment]
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found_infs
        return found_infs

    def _group(self) -> Any:
        """The group whose ranks skip together; None: this process skips by itself."""
        return self._process_group

    def _over_group(self, found_infs: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        group = self._group()
        if group is None:
            return found_infs
        assert self._scale is not None
        device = self._scale.device
        if not found_infs:
            # A rank without gradients still takes part, or the others would wait for it.
            found_infs = {device: _scalars.zero(device)}
        combined = _combine(list(found_infs.values()), device)
        torch.distributed.all_reduce(combined, op=torch.distributed.ReduceOp.MAX, group=group)
        for found_inf in found_infs.values():
            if found_inf is not combined:
                found_inf.copy_(combined)
        return found_infs

    # ---- clipping ------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        optimizer_or_parameters: torch.optim.Optimizer | Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        fold: bool = False,
    ) -> Tensor:
        """Unscales, checks and clips gradients: ``unscale_`` and ``torch.nn.utils.clip_grad_norm_`` in one.

        Given an optimizer, its gradients are unscaled and checked, and their L2 norm is taken, in one read
        and one write; clipping writes once more, and only if the norm exceeds ``max_norm``. An optimizer that
        ``unscale_`` has seen already is read once. Given parameters, their gradients are clipped as they are,
        which is allowed once an optimizer has been unscaled. Where an overflow was found, gradients are left
        unclipped: the step will be skipped, and :meth:`overflow_report` can still tell which gradients were
        at fault. (Parameters given while several optimizers are unscaled are clipped whatever was found, as by
        torch: one of the optimizers may step.)

        No sync, unless ``error_if_nonfinite`` is set. See :func:`fastamp.clip_grad_norm_` for the formula and
        how the norm is rounded. With ``norm_type`` other than 2 the norm takes a second read. The norm is
        this process's.

        Args:
            optimizer_or_parameters: an optimizer, or tensors whose ``.grad`` is clipped.
            max_norm: largest norm to leave, in unscaled units.
            norm_type: order of the norm, ``inf`` included.
            error_if_nonfinite: raise if the norm is NaN or infinite. Gradients have been unscaled by then.
            fold: with a fused optimizer (one that unscales in its own step) leave the clip to its step:
                gradients are only read here, and divided once by ``scale / coefficient`` there. Until then
                they stay scaled; where the norm of the scaled gradients is not finite (in float32: beyond
                1.8e19) the step is skipped and the scale backed off, as at any overflow.
                Rounding differs from clipping first: the divisor is rounded to float32 and the quotient once
                more (relative error up to 2**-23 against two products' 2**-22). Without effect for other
                optimizers, other norms, and gradients that take torch's own path.

        Returns:
            The norm of the unscaled gradients, 0-dim, on the device of the first gradient; 0 without
            gradients.

        Raises:
            ValueError: ``max_norm`` is NaN or negative, ``norm_type`` is NaN, or float16 gradients as in
                ``unscale_``.
            RuntimeError: the optimizer has stepped already or has a folded clip; parameters were given and no
                optimizer is unscaled; the norm is not finite and ``error_if_nonfinite`` is set.
        """
        max_norm, norm_type = clip.checked_arguments(max_norm, norm_type)
        target: Any = optimizer_or_parameters
        is_optimizer = hasattr(target, "param_groups")
        if not self._enabled:
            parameters = _parameters(target) if is_optimizer else target
            return clip.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        self._check_scale_growth_tracker("clip_grad_norm_")
        with torch.no_grad():
            if is_optimizer:
                return self._clip_optimizer(target, max_norm, norm_type, error_if_nonfinite, fold)
            return self._clip_parameters(target, max_norm, norm_type, error_if_nonfinite)

    def _clip_parameters(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        states = [s for s in self._per_optimizer_states.values() if s["stage"] is OptState.UNSCALED]
        if not states:
            raise RuntimeError(
                "clip_grad_norm_: parameters were given, but no optimizer has been unscaled since the last "
                "update(), so their gradients are still multiplied by the scale. Call "
                "scaler.unscale_(optimizer) first, or pass the optimizer in place of its parameters."
            )
        _refuse_folded(states, parameters)
        buckets = gradient_buckets([{"params": parameters}])
        if buckets.other:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        total = clip.total_norm(buckets, norm_type)
        if error_if_nonfinite:
            clip.raise_if_nonfinite(total, norm_type)
        # Which optimizer has the parameters is not known. With one there is no question, but if they are not its own
        # the norm tells that its overflow is not theirs; of several, one may step with what is left here.
        found_infs = list(states[0]["found_inf_per_device"].values()) if len(states) == 1 else []
        if found_infs:
            found_infs = [_combine(found_infs, total.device).minimum(_is_nonfinite(total))]
        _clip_unless_overflown_(buckets, total, max_norm, found_infs)
        return total

    def _clip_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        fold: bool,
    ) -> Tensor:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step().")
        _refuse_folded([state], None)
        fold = fold and norm_type == 2.0 and _unscales_in_step(optimizer)
        ready = state["stage"] is OptState.READY
        own = norm_type == 2.0 and self._is_own("unscale_") and self._is_own("_unscale_grads_")
        if ready and not own:
            self.unscale_(optimizer)
            ready = False
        buckets = self._gather(optimizer, not ready or self._allow_fp16_grads or fold)
        if buckets.other:
            if ready:
                self.unscale_(optimizer)
            parameters = _parameters(optimizer)
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        if ready:
            assert self._scale is not None
            inv_scale = self._scale.reciprocal()
            with profiling.span("unscale"):
                total, found_infs = _norm_pass(buckets, None if fold else inv_scale)
            if fold:
                # Squares of scaled gradients may overflow where those of unscaled ones would not: too large a scale.
                overflown = _is_nonfinite(total)
                for found_inf in found_infs.values():
                    torch.maximum(found_inf, _move(overflown, found_inf.device), out=found_inf)
            found_infs = self._over_group(found_infs)
            if fold:
                total = total * _move(inv_scale, total.device)
                # While the gradients are still scaled, an error must leave the optimizer as it was.
                if error_if_nonfinite:
                    clip.raise_if_nonfinite(total, norm_type)
            state["found_inf_per_device"] = found_infs
            state["stage"] = OptState.UNSCALED
        else:
            total = clip.total_norm(buckets, norm_type)
        if error_if_nonfinite:
            clip.raise_if_nonfinite(total, norm_type)
        if fold:
            self._fold_clip(optimizer, state, clip.clip_coefficient(total, max_norm), scaled=ready)
        else:
            _clip_unless_overflown_(buckets, total, max_norm, list(state["found_inf_per_device"].values()))
        return total

    def _fold_clip(self, optimizer: Any, state: dict[str, Any], coefficient: Tensor, scaled: bool) -> None:
        """Hands the clip to the fused step the way a user's own factor is: as ``optimizer.grad_scale``, which
        step() passes on unchanged for an optimizer that is UNSCALED."""
        assert self._scale is not None
        coefficient = coefficient.to(device=self._scale.device, dtype=torch.float32)
        divisor = self._scale / coefficient if scaled else coefficient.reciprocal()
        existing = getattr(optimizer, "grad_scale", None)
        optimizer.grad_scale = divisor if existing is None else divisor * existing
        state["folded"] = _Folded(optimizer, existing)

    # ---- the step ------------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the optimizer's gradients unless that was done, and steps unless one of them is NaN or
        infinite.

        As :meth:`torch.amp.GradScaler.step`. For an optimizer that unscales in its own step (``fused=True``)
        gradients are checked with one read and nothing synchronises; for others the host waits once for the
        outcome.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returned; None if it was skipped.

        Raises:
            RuntimeError: ``closure`` given as a keyword, or called twice for this optimizer since the last
                ``update``.
            AssertionError: ``scale()`` has not been called, or no parameter has a gradient.
            ValueError: as ``unscale_``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if self._history is None:
            self._history = _StepHistory()

        if getattr(optimizer, "_step_supports_amp_scaling", False):
            if _takes_grad_scaler(optimizer):
                warnings.warn(
                    "GradScaler is going to stop passing itself as a keyword argument to the passed "
                    "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
                    "`found_inf: Tensor` to the passed "
                    "optimizer and let the optimizer use them directly.",
                    FutureWarning,
                    stacklevel=2,
                )
                kwargs["grad_scaler"] = self
                with profiling.span("step"):
                    retval = optimizer.step(*args, **kwargs)
            else:
                with profiling.span("step"):
                    retval = self._step_with_scale(optimizer, state, args, kwargs)
            self._history.record(optimizer, list(state["found_inf_per_device"].values()))
            if "accelerate.optimizer" in sys.modules:
                teach_accelerate()
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            found_infs = list(state["found_inf_per_device"].values())
            if not found_infs:
                raise AssertionError(_no_checks_message(optimizer))
            self._history.record(optimizer, found_infs)
            with profiling.span("step"):
                retval = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return retval

    def _step_with_scale(
        self, optimizer: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float | None:
        """Steps an optimizer that reads ``grad_scale`` and ``found_inf`` from its attributes."""
        ready = state["stage"] is OptState.READY
        if ready:
            self._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        if scale is None:
            raise AssertionError("_get_scale_async returned None")
        found_infs = list(state["found_inf_per_device"].values())
        own_flag = (
            ready
            and len(found_infs) == 1
            and found_infs[0].device == scale.device
            and self._is_own("_unscale_grads_")
            and self._is_own("_check_inf_per_device")
        )
        if own_flag:
            found_inf = found_infs[0]
        elif found_infs:
            # Fused kernels skip at exactly 1. Trainers that sum the flags over ranks leave larger numbers.
            found_inf = _combine(found_infs, scale.device).clamp(max=1.0)
        elif any(p.grad is not None for p in _parameters(optimizer)):
            raise AssertionError(_no_checks_message(optimizer))
        else:
            found_inf = _scalars.zero(scale.device)
        grad_scale = existing = getattr(optimizer, "grad_scale", None)
        if ready:
            grad_scale = scale if grad_scale is None else scale * grad_scale
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = found_inf
        try:
            retval = optimizer.step(*args, **kwargs)
        except BaseException:
            # For another try: our factor would be multiplied in twice by the next step; the user's, or a folded clip,
            # must not be lost.
            _set_grad_scale(optimizer, existing)
            del optimizer.found_inf
            raise
        _set_grad_scale(optimizer, None)
        del optimizer.found_inf
        return retval

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """torch's hook: steps unless a found_inf is set. Synchronises once, for any number of devices."""
        skip = _is_set(list(optimizer_state["found_inf_per_device"].values()))
        if self._history is not None:
            self._history.record(optimizer, skip)
        return None if skip else optimizer.step(*args, **kwargs)

    # ---- what became of it ---------------------------------------------------------------------------------

    @property
    def step_was_skipped(self) -> bool:
        """True if the last iteration's ``step`` was skipped because of NaN or infinity; of several
        optimizers, any.

        Right for fused optimizers too, whose own kernel skips. Valid from ``step`` until the next iteration's
        first ``step``, so before and after ``update``; False before the first step and for a disabled scaler.
        Reading it synchronises with the device after a fused step; nothing does until it is read. Captured in
        a CUDA graph, it tells of the last replay.
        """
        return self._history is not None and self._history.any_skipped(self._history.steps.values())

    def step_was_skipped_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """:attr:`step_was_skipped` for one optimizer of several; synchronises as that does. False if it took
        no part in the last iteration."""
        if self._history is None or id(optimizer) not in self._history.steps:
            return False
        return self._history.any_skipped([self._history.steps[id(optimizer)]])

    def overflow_report(self, named_parameters: Iterable[tuple[str, Tensor]]) -> list[OverflowedParameter]:
        """Which parameters' gradients hold NaN or infinity, after a step that was skipped.

        Costs nothing until called; then it reads all gradients and synchronises. It reports what ``.grad``
        holds at the time, so call it after ``step`` (before or after ``update``) and before ``zero_grad`` or
        the next backward pass. Clipping an overflowed gradient with ``torch.nn.utils.clip_grad_norm_``
        spreads NaN over all of them; :meth:`clip_grad_norm_` does not.

        Args:
            named_parameters: (name, parameter) pairs, as ``model.named_parameters()``.

        Returns:
            One entry a parameter at fault, in the order given. Empty if the last step was not skipped, and
            with a ``process_group`` if the overflow was another rank's.

        Raises:
            RuntimeError: the last step was skipped, but the gradients that made it so are gone.
        """
        if not self.step_was_skipped:
            return []
        named_grads = [(name, p.grad) for name, p in named_parameters if p.grad is not None]
        if named_grads:
            report = nonfinite(named_grads)
            if report or self._group() is not None:
                return report
            reason = f"the {len(named_grads)} gradients of the given parameters are all finite"
        else:
            reason = "none of the given parameters has a gradient"
        raise RuntimeError(
            f"overflow_report: the last step was skipped, but {reason}. Call it before "
            "optimizer.zero_grad() and the next backward pass, with all parameters of the optimizer that "
            "was skipped."
        )

    def _end_iteration(self, history: _StepHistory) -> None:
        history.closed = True
        outcomes = history.steps.values()
        if True in outcomes:
            history.skips_in_a_row += 1
            if history.skips_in_a_row % _COLLAPSE_CHECK_INTERVAL == 0:
                # The host has just waited for the device anyway.
                scale = super().get_scale()
                if scale < 1.0 or scale == self._min_scale:
                    self._warn_of_collapse(scale, stacklevel=4)
        elif outcomes and all(outcome is False for outcome in outcomes):
            history.skips_in_a_row = 0

    def _warn_of_collapse(self, scale: float, stacklevel: int) -> None:
        skips = self._history.skips_in_a_row if self._history is not None else 0
        after = f" after {skips} skipped steps in a row" if skips else ""
        stuck = ", and no update can make it grow again" if scale == 0.0 else ""
        warnings.warn(
            f"GradScaler: the loss scale is {scale:g}{after}{stuck}. Gradients that are NaN or infinite at "
            "every scale are not the scale's doing: look at the loss, the learning rate and the data, ask "
            "scaler.overflow_report(model.named_parameters()) which layers overflow, or use bfloat16. "
            "min_scale sets a floor.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, plus ``min_scale``, ``max_scale``, ``hysteresis`` and ``_hysteresis_tracker``
        where those are switched on. Empty if disabled. Synchronises with the device, as torch's does."""
        state = super().state_dict()
        if state and self._has_scale_policy():
            if self._min_scale is not None:
                state["min_scale"] = self._min_scale
            if self._max_scale is not None:
                state["max_scale"] = self._max_scale
            if self._hysteresis != 1:
                state["hysteresis"] = self._hysteresis
                state["_hysteresis_tracker"] = self._get_hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` of torch's scaler or of this one gave. Policies that the state does not
        hold stay as they are. No sync.

        Raises:
            RuntimeError: the state is empty, as a disabled scaler's is (as torch).
            KeyError: an entry is missing. Nothing has been changed then.
            ValueError: policies that contradict each other. Nothing has been changed then.
        """
        if self._enabled and state_dict:
            for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
                state_dict[key]
            min_scale = state_dict.get("min_scale", self._min_scale)
            max_scale = state_dict.get("max_scale", self._max_scale)
            hysteresis = state_dict.get("hysteresis", self._hysteresis)
            _check_policies(min_scale, max_scale, hysteresis)
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        if min_scale is not None:
            self._min_scale = min_scale
        if max_scale is not None:
            self._max_scale = max_scale
        if hysteresis != 1:
            left = state_dict.get("_hysteresis_tracker", hysteresis)
            self._hysteresis, self._init_hysteresis_tracker = hysteresis, left
            if self._hysteresis_tracker is not None:
                self._hysteresis_tracker.fill_(left)
            elif self._scale is not None:
                self._hysteresis_tracker = torch.full((), left, dtype=torch.int32, device=self._scale.device)

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def __getstate__(self) -> dict[str, Any]:
        if self._process_group is not None:
            raise TypeError(
                "GradScaler: a scaler with a process_group cannot be pickled or copied, because process "
                "groups cannot. Save scaler.state_dict() and load it into a scaler made with the group."
            )
        state = super().__getstate__()
        state.pop("_history", None)
        if self._hysteresis_tracker is not None:
            state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
            state["_hysteresis_tracker"] = None
        return state


_OWN_METHODS = {name: getattr(GradScaler, name) for name in ("unscale_", "_unscale_grads_", "_check_inf_per_device")}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Params:
    """As much of an optimizer as torch's ``_unscale_grads_`` reads."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]


# ---- found_inf flags ---------------------------------------------------------------------------------------


def _move(scalar: Tensor, device: torch.device) -> Tensor:
    # A copy to the CPU that does not wait would be read before it arrives.
    return scalar if scalar.device == device else scalar.to(device, non_blocking=device.type != "cpu")


def _combine(found_infs: list[Tensor], device: torch.device) -> Tensor:
    """Their largest, 0-dim unless there is one; itself if it is there already. By max, never by sum: fused
    kernels skip at exactly 1."""
    if len(found_infs) == 1:
        return _move(found_infs[0], device)
    return torch.stack([_move(found_inf, device).reshape(()) for found_inf in found_infs]).amax()


def _is_set(found_infs: list[Tensor]) -> bool:
    """Whether any flag is set. Synchronises once: flags on several devices are brought together first."""
    if not found_infs:
        return False
    device = next((f.device for f in found_infs if f.device.type != "cpu"), found_infs[0].device)
    return bool(_combine(found_infs, device).item())


# ---- clipping ----------------------------------------------------------------------------------------------


def _norm_pass(buckets: GradientBuckets, inv_scale: Tensor | None) -> tuple[Tensor, dict[torch.device, Tensor]]:
    """Unscales (with ``inv_scale``), checks and sums squares in one pass. Returns the norm and found_inf by
    device."""
    found_infs: dict[torch.device, Tensor] = {}
    norms = []
    for device in buckets.devices:
        factor = _scalars.one(device) if inv_scale is None else _move(inv_scale, device)
        found_infs[device] = flag = _scalars.zero(device)
        norms.append(buckets.unscale_norm(device, factor, flag)[0])
    return (clip.combine_norms(norms) if norms else torch.tensor(0.0)), found_infs


def _clip_unless_overflown_(buckets: GradientBuckets, total: Tensor, max_norm: float, found_infs: list[Tensor]) -> None:
    if not buckets.devices:
        return
    coefficient = clip.clip_coefficient(total, max_norm)
    if found_infs:
        overflown = _combine(found_infs, coefficient.device) != 0
        coefficient = coefficient.masked_fill(overflown, 1.0)
    clip.clip_buckets_(buckets, coefficient)


def _is_nonfinite(total: Tensor) -> Tensor:
    """1 if a norm is not finite, else 0: float32, on the norm's device."""
    return (total - total != 0).float()


def _unscales_in_step(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not _takes_grad_scaler(optimizer)


# Reading a signature costs as much as a small optimizer's step.
_takes_grad_scaler_cache: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _takes_grad_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` has the deprecated parameter. Looked up anew each time: others replace ``step``."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        known = _takes_grad_scaler_cache.get(step)
    except TypeError:  # neither hashable nor weakly referable
        return "grad_scaler" in inspect.signature(step).parameters
    if known is None:
        known = "grad_scaler" in inspect.signature(step).parameters
        _takes_grad_scaler_cache[step] = known
    return known


class _Folded(NamedTuple):
    """A clip that waits for the optimizer's step, and the ``grad_scale`` that the user had set before."""

    optimizer: Any
    grad_scale: Tensor | None


def _set_grad_scale(optimizer: Any, value: Tensor | None) -> None:
    if value is not None:
        optimizer.grad_scale = value
        return
    with contextlib.suppress(AttributeError):
        del optimizer.grad_scale


def _refuse_folded(states: Iterable[dict[str, Any]], parameters: list[Tensor] | None) -> None:
    """Raises if a folded clip waits for any of the parameters (None: for any at all)."""
    clipped = {id(p) for state in states if "folded" in state for p in _parameters(state["folded"].optimizer)}
    if clipped and (parameters is None or any(id(p) in clipped for p in parameters)):
        raise RuntimeError(
            "clip_grad_norm_: a clip with fold=True is waiting for the optimizer's step, and its gradients "
            "are still scaled. Clip once for each step, or without fold."
        )


def _drop_folded_clip(state: dict[str, Any]) -> None:
    """An iteration that ended without the step must not leave its clip to the next."""
    folded: _Folded | None = state.get("folded")
    if folded is not None and state["stage"] is not OptState.STEPPED:
        _set_grad_scale(folded.optimizer, folded.grad_scale)


# ---- checks and messages -----------------------------------------------------------------------------------


def _check_positive(name: str, value: Any) -> Any:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"GradScaler: {name} must be a positive number, got {value}")
    return value


def _check_interval(value: Any) -> Any:
    if not value >= 0:
        raise ValueError(
            f"GradScaler: growth_interval must be a number of steps, at least 1 (0: never grow), got {value}"
        )
    return value


def _check_policies(min_scale: Any, max_scale: Any, hysteresis: Any) -> None:
    if min_scale is not None:
        _check_positive("min_scale", min_scale)
    if max_scale is not None:
        _check_positive("max_scale", max_scale)
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise ValueError(
            f"GradScaler: min_scale must not be above max_scale, got min_scale={min_scale} and max_scale={max_scale}"
        )
    if not isinstance(hysteresis, int) or hysteresis < 1:
        raise ValueError(
            f"GradScaler: hysteresis must be a number of overflows, an int of at least 1, got {hysteresis!r}"
        )


def _refuse_fp16(optimizer: torch.optim.Optimizer, buckets: GradientBuckets, allow_fp16: bool) -> None:
    if not allow_fp16 and buckets.first_fp16 is not None:
        raise ValueError(_fp16_message(optimizer, *buckets.first_fp16))


def _fp16_message(optimizer: torch.optim.Optimizer, group_index: int, param_index: int) -> str:
    group = optimizer.param_groups[group_index]
    param = group["params"][param_index]
    names = group.get("param_names")
    name = f" ({names[param_index]!r})" if names and param_index < len(names) else ""
    return (
        f"Attempting to unscale FP16 gradients. Parameter {param_index}{name} of group {group_index} of "
        f"{type(optimizer).__name__}, of shape {tuple(param.shape)}, has a torch.float16 gradient, where "
        "unscaling would lose what scaling saved. Keep parameters in float32 (model.float()) and run the "
        "forward pass under torch.autocast; or use bfloat16 without a scaler; or, to unscale in float16 "
        "all the same, make the scaler with fastamp.GradScaler(..., allow_fp16_grads=True)."
    )


def _no_checks_message(optimizer: torch.optim.Optimizer) -> str:
    params = _parameters(optimizer)
    with_grad = sum(p.grad is not None for p in params)
    if not params:
        why = "it has no parameters"
    elif not with_grad:
        why = (
            f"none of its {len(params)} parameters has a gradient. Was backward() called on a scaled loss "
            "that depends on them, do they require grad, and does zero_grad() come before backward() "
            "rather than after it?"
        )
    else:
        why = (
            f"{with_grad} of its {len(params)} parameters have a gradient now, but none had one when "
            "unscale_() was called. Call unscale_() after backward()."
        )
    return f"No inf checks were recorded for this optimizer. {type(optimizer).__name__}: {why}"
