"""Random states and module buffers, noted before a forward pass and restored after an
error.

The modules of a loss function are found in its cells, globals, defaults, ``self`` and
partial arguments; others as they are called.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradaccum_torch.torch_private.names import buffers_of

_DEPTH = 6
"""How many objects deep the look goes: a closure over a trainer over a list of models
is three.
"""
_ATOMS = (
    Tensor,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    torch.device,
    torch.dtype,
    torch.optim.Optimizer,
)


class Reached(NamedTuple):
    """The modules and random generators that functions use."""

    modules: list[nn.Module]
    """Each once, children included."""
    generators: list[torch.Generator]


def reached_by(*roots: object) -> Reached:
    found: dict[int, nn.Module] = {}
    generators: list[torch.Generator] = []
    seen: set[int] = set()
    waiting: list[tuple[object, int]] = [(root, 0) for root in roots]
    while waiting:
        each, depth = waiting.pop()
        if id(each) in seen or depth > _DEPTH or isinstance(each, _ATOMS):
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            found.update((id(module), module) for module in each.modules())
        elif isinstance(each, torch.Generator):
            generators.append(each)
        else:
            waiting.extend((inside, depth + 1) for inside in _inside(each))
    return Reached(list(found.values()), generators)


def _inside(each: Any) -> Iterator[object]:
    if isinstance(each, types.FunctionType):
        yield from _of_function(each)
    elif isinstance(each, types.MethodType):
        yield from (each.__self__, each.__func__)
    elif isinstance(each, partial):
        yield from (each.func, *each.args, *each.keywords.values())
    elif isinstance(each, Mapping):
        yield from each.values()
    elif isinstance(each, list | tuple | set | frozenset):
        yield from each
    elif not isinstance(each, type | types.ModuleType) and not type(
        each
    ).__module__.startswith(("torch.", "numpy")):
        yield from getattr(each, "__dict__", {}).values()
        yield vars(type(each)).get("__call__")


def _of_function(function: types.FunctionType) -> Iterator[object]:
    if (function.__module__ or "").startswith("torch."):
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # A name that is not bound yet.
            continue
    yield from (
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
        getattr(function, "__wrapped__", None),
    )
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            yield from (
                vars(value).get(other)
                for other in _names(function.__code__)
                if isinstance(vars(value).get(other), nn.Module)
            )
        else:
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class RandomState:
    """The random states of Python, of NumPy if loaded, of torch on the CPU and on
    `devices`, and of `generators`.
    """

    def __init__(
        self,
        devices: Iterable[torch.device] = (),
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self._devices = [
            device for device in devices if device.type not in ("cpu", "meta")
        ]
        self._python = random.getstate()
        self._cpu = torch.get_rng_state()
        if "numpy" in sys.modules:
            self._numpy = sys.modules["numpy"].random.get_state()
        else:
            self._numpy = None
        self._generators = [
            (generator, generator.get_state()) for generator in generators
        ]
        self._others = [
            torch.get_device_module(device).get_rng_state(device)
            for device in self._devices
        ]

    def moved(self) -> bool:
        """True if something has drawn numbers since."""
        return self._values() != self.again()._values()

    def again(self) -> RandomState:
        return RandomState(
            self._devices, [generator for generator, _ in self._generators]
        )

    def _values(self) -> list[object]:
        numbers = [
            each.tobytes() if hasattr(each, "tobytes") else each
            for each in self._numpy or ()
        ]
        tensors = self._cpu, *self._others, *(state for _, state in self._generators)
        return [self._python, numbers, *(each.numpy().tobytes() for each in tensors)]

    def put_back(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._generators:
            generator.set_state(state)
        for device, state in zip(self._devices, self._others, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)


class Buffers:
    """The buffers of `modules` as they are now: which tensors, and copies of their
    values.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._noted: list[tuple[nn.Module, str, Tensor | None]] = []
        self._copies: list[Tensor | None] = []
        for module in modules:
            self.note(module)

    def note(self, module: nn.Module) -> None:
        new = [(module, name, tensor) for name, tensor in buffers_of(module).items()]
        self._copies.extend(
            None if tensor is None else tensor.detach().clone() for _, _, tensor in new
        )
        self._noted.extend(new)

    def put_back(self) -> None:
        for (module, name, tensor), copied in zip(
            self._noted, self._copies, strict=True
        ):
            if getattr(module, name, None) is not tensor:
                setattr(module, name, tensor)
            if tensor is not None and copied is not None:
                # A batch norm's kernel moves its statistics without counting a write,
                # so versions cannot tell; nor is one counted here.
                tensor.data.copy_(copied)


class Before:
    """The random states and buffers before a call."""

    def __init__(self, reached: Reached, devices: Iterable[torch.device]) -> None:
        own = (
            each.device
            for module in reached.modules
            for each in module.parameters(recurse=False)
        )
        self._reached = reached
        self._devices = {*devices, *own}
        self._random = self.random_state()
        self._buffers = Buffers(reached.modules)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note each module that is called in the block and was not reached, as it is
        before that call.

        Not beside a module of `torch.compile`, which warns of every global hook; nor
        inside compiled code.
        """
        if any(hasattr(module, "_orig_mod") for module in self._reached.modules):
            yield
            return
        thread = threading.get_ident()
        known = set(map(id, self._reached.modules))

        def note(called: nn.Module, _: object) -> None:
            if (
                torch.compiler.is_compiling()
                or id(called) in known
                or threading.get_ident() != thread
            ):
                return
            for module in called.modules():
                if id(module) not in known:
                    known.add(id(module))
                    self._reached.modules.append(module)
                    self._buffers.note(module)

        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def random_state(self) -> RandomState:
        return RandomState(self._devices, self._reached.generators)

    def put_buffers_back(self) -> None:
        self._buffers.put_back()

    def put_back(self) -> None:
        self._random.put_back()
        self._buffers.put_back()


def trained_by(reached: Reached) -> list[Tensor]:
    held = {
        id(each): each
        for module in reached.modules
        for each in module.parameters(recurse=False)
        if each.requires_grad
    }
    return list(held.values())
