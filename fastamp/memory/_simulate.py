"""Runs a training step on fake tensors: every shape and lifetime, not one byte of the model's memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

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
    hooks) see the fake tensors too. Whatever the step does to attributes of its modules is undone, random
    states included.

    dtype: floating parameters and buffers become this type; None keeps each one's own.
    trains: which parameters require gradients, called with (name, parameter).
    """

    def __init__(
        self,
        model: nn.Module,
        mode: FakeTensorMode,
        device: torch.device,
        dtype: torch.dtype | None,
        trains: Callable[[str, nn.Parameter], bool],
    ) -> None:
        self.model = model
        self.mode = mode
        self.device = device
        self.dtype = dtype
        self.trains = trains
        self.parameters: dict[int, nn.Parameter] = {}
        """id of each of the model's own parameters -> its fake one."""
        self._fakes: dict[int, tuple[Any, Any]] = {}
        self._saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []

    def __enter__(self) -> FakeModel:
        names = {id(p): name for name, p in self.model.named_parameters()}
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
            for module in self.model.modules():
                containers = [(value, _copy(value)) for value in module.__dict__.values() if type(value) in _CONTAINERS]
                self._saved.append((module, dict(module.__dict__), containers))
            for module in self.model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = self._parameter(parameter, names[id(parameter)])
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = self.fake(buffer)
                for name, value in list(module.__dict__.items()):
                    if name not in ("_parameters", "_buffers", "_modules"):
                        self._replace(module, name, value)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for module, attributes, containers in self._saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for value, copy in containers:
                _restore(value, copy)
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
            if (dtype, tensor.device) == (tensor.dtype, self.device) and not isinstance(tensor, FakeTensor):
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

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Tensors in plain attributes, and in lists, tuples and dicts of them (an RNN's flat weights)."""

        def swap(item: Any) -> Any:
            if isinstance(item, Tensor):
                return self.parameters[id(item)] if id(item) in self.parameters else self.fake(item)
            return item

        if isinstance(value, Tensor):
            module.__dict__[name] = swap(value)
        elif type(value) is list:
            value[:] = [swap(item) for item in value]
        elif type(value) is tuple:
            module.__dict__[name] = tuple(swap(item) for item in value)
        elif type(value) is dict and not name.startswith("_"):
            for key, item in value.items():
                value[key] = swap(item)


_CONTAINERS = (
    list,
    dict,
    set,
    *(type(getattr(nn.Module(), name)) for name in ("_parameters", "_buffers", "_modules")),
)


def _copy(value: Any) -> Any:
    return value.copy()


def _restore(value: Any, copy: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(copy)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
