"""Runs a training step on fake tensors: every shape and lifetime, not one byte of the model's memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fastamp.memory._held import Held, classes_of
from fastamp.memory._not_traceable import NotTraceable


def fake_mode_of(model: nn.Module) -> FakeTensorMode:
    """The mode that a model built on fake tensors belongs to, or a new one."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


class FakeModel:
    """`with FakeModel(model, mode) as fake:` the model's parameters and buffers are fake; all is as it was
    afterwards.

    The model is changed in place rather than copied, so closures over its modules (checkpoint wrappers,
    hooks) see the fake tensors too. Whatever the step does to attributes of its modules, and to what they hold in
    containers and objects of any depth, is undone, random states included.

    dtype: floating parameters and buffers become this type; None keeps each one's own.
    trains: which parameters require gradients, called with (name, parameter).
    others: objects that the step uses too. What it does to them is undone, and their tensors stay real.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: FakeTensorMode,
        device: torch.device,
        dtype: torch.dtype | None,
        trains: Callable[[str, nn.Parameter], bool],
        others: Iterable[Any] = (),
    ) -> None:
        self.model = model
        self.mode = mode
        self.device = device
        self.dtype = dtype
        self.trains = trains
        self.others = list(others)
        self.parameters: dict[int, nn.Parameter] = {}
        """id of each parameter within the model's reach -> its fake one."""
        self.complete = True
        """Whether all was found that has to be restored."""
        self._fakes: dict[int, tuple[Any, Any]] = {}
        self._saved: list[Held] = []

    def __enter__(self) -> FakeModel:
        for module in self.model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                where = next(name for name, each in self.model.named_modules() if each is module)
                raise NotTraceable(
                    f"module {where!r} ({type(module).__name__}) is compiled TorchScript, which cannot "
                    "run on fake tensors: measure it with fastamp.memory.track instead",
                    where,
                )
        self._random = random.getstate(), torch.get_rng_state(), _numpy_state()
        try:
            held = Held(self.model.modules())
            # Tensors of the classes stay real: other models, which other threads may run, have them too.
            self._saved = [held, Held([*self.others, *classes_of(self.model.modules())])]
            self.complete = all(each.complete for each in self._saved)
            for name, parameter in self.model.named_parameters():
                self._parameter(parameter, name)
            held.replace(self._swapped)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for held in self._saved:
            held.restore()
        self._saved.clear()
        python, cpu, numpy_state = self._random
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)

    def fake(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor on the simulated device, the same one each time."""
        if id(tensor) not in self._fakes:
            dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
            as_is = (dtype, tensor.device) == (tensor.dtype, self.device)
            # A tensor made under inference_mode gives a fake of the same kind, which autograd refuses.
            if as_is and not isinstance(tensor, FakeTensor) and not tensor.is_inference():
                # This way tensors that share a storage go on sharing it.
                fake: Tensor = self.mode.from_tensor(tensor.detach())
            else:
                with self.mode:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self.device)
            self._fakes[id(tensor)] = tensor, fake
        return self._fakes[id(tensor)][1]

    def fake_tree(self, values: Any) -> Any:
        """`fake` of each tensor in a nest of containers, `dtype` applied; None and numbers stay."""
        return pytree.tree_map_only(Tensor, self.fake, values)

    def _parameter(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        if id(parameter) not in self.parameters:
            if type(parameter) is not nn.Parameter and not isinstance(parameter, FakeTensor):
                raise NotTraceable(
                    f"parameter {name!r} is a {type(parameter).__name__}, whose memory only a run on its "
                    "device shows: measure the model with fastamp.memory.track instead",
                    name.rpartition(".")[0],
                )
            trained = self.trains(name, parameter) and (parameter.is_floating_point() or parameter.is_complex())
            self.parameters[id(parameter)] = nn.Parameter(self.fake(parameter), requires_grad=trained)
        return self.parameters[id(parameter)]

    def _swapped(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and id(tensor) not in self.parameters:
            # Of a module that is no submodule: kept in a list, say.
            trained = tensor.requires_grad and self.trains("", tensor)
            self.parameters[id(tensor)] = nn.Parameter(self.fake(tensor), requires_grad=trained)
        return self.parameters[id(tensor)] if id(tensor) in self.parameters else self.fake(tensor)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
