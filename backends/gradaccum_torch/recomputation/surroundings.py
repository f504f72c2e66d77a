"""What the forward pass of a recomputed part finds in modules, so that its replay finds the same and leaves nothing behind.

A replay would move BatchNorm's statistics a second time, and read buffers, parameters and modes that other calls have changed since.
So each module is noted before its first call: its mode, its parameters, and copies of its buffers. A replay puts them into the module, and
afterwards takes them out again. Nothing is written into a tensor, as autograd would take that for a change of what it has saved.

torch does not count what BatchNorm writes into its statistics. So a buffer of up to `SMALL` elements is copied in any case, and compared
with its copy only if it is larger: to compare waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from gradaccum_torch.recomputation.checks import changed_tensor_error, lazy_module_error
from gradaccum_torch.torch_private import buffers_of, is_sharded, parameters_of, version, without_dispatch_modes

Table = dict[str, Tensor | None]
"""A module's parameters or buffers, by name."""

SMALL = 2**16
"""Elements of the largest buffer whose copy is kept without a look at whether it changed; BatchNorm's have one for each channel."""


class _Noted(NamedTuple):
    """A module as the forward pass found it."""

    module: nn.Module
    training: bool
    parameters: Table
    buffers: Table


class _Held(NamedTuple):
    """A tensor of a module, its version then, and for a buffer its copy."""

    tensor: Tensor
    version: int
    copy: Tensor | None


class Surroundings:
    """The modules of one call.

    Args:
        modules: those that are known before the call, with all of their submodules; others are noted when they are called.
        in_modes: whether the call runs under a dispatch mode, which must not see the copying.
    """

    def __init__(self, modules: Iterable[nn.Module], in_modes: bool) -> None:
        self._outside = without_dispatch_modes if in_modes else nullcontext
        self._noted: dict[int, _Noted] = {}
        self._held: dict[int, _Held] = {}
        """By the tensor's id, so that a buffer of two modules stays one."""
        for module in modules:
            for each in module.modules():
                self._note(each)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Runs the forward pass: each further module is noted before its first call, and copies of what did not change are dropped."""
        thread = threading.get_ident()

        def note(module: nn.Module, _: object) -> None:
            if threading.get_ident() == thread:
                self._note(module)

        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
        self._drop_unchanged()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Runs the forward pass again: the modules are as they were, and afterwards as they are.

        Raises:
            UsageError: a parameter, or a large buffer, was changed in place since the forward pass.
        """
        self._require_unchanged()
        copies = {key: held.copy.detach().clone() for key, held in self._held.items() if held.copy is not None}
        now = [(each.module.training, dict(buffers_of(each.module))) for each in self._noted.values()]
        lent: list[tuple[Table, Table]] = []
        try:
            for module, training, parameters, buffers in self._noted.values():
                module.training = training
                lent.append((parameters_of(module), _exchanged(parameters_of(module), parameters)))
                _put(buffers_of(module), {name: copies.get(id(buffer), buffer) for name, buffer in buffers.items()})
            yield
        finally:
            for table, taken in lent:
                table.update(taken)
            for each, (training, buffers) in zip(self._noted.values(), now, strict=True):
                each.module.training = training
                _put(buffers_of(each.module), buffers)

    def _note(self, module: nn.Module) -> None:
        if id(module) in self._noted:
            return
        parameters, buffers = dict(parameters_of(module)), dict(buffers_of(module))
        if any(map(is_lazy, (*parameters.values(), *buffers.values()))):
            raise lazy_module_error(module)
        self._noted[id(module)] = _Noted(module, module.training, parameters, buffers)
        for parameter in parameters.values():
            if parameter is not None and not is_sharded(parameter):
                self._held.setdefault(id(parameter), _Held(parameter, version(parameter), None))
        for buffer in buffers.values():
            if buffer is not None and id(buffer) not in self._held:
                with self._outside(), torch.no_grad():
                    self._held[id(buffer)] = _Held(buffer, version(buffer), buffer.detach().clone())

    def _drop_unchanged(self) -> None:
        for key, (tensor, noted, copy) in self._held.items():
            if copy is not None and copy.numel() > SMALL and version(tensor) == noted and torch.equal(tensor, copy):
                self._held[key] = _Held(tensor, noted, None)

    def _require_unchanged(self) -> None:
        for module, _, parameters, buffers in self._noted.values():
            for name, tensor in (*parameters.items(), *buffers.items()):
                held = None if tensor is None else self._held.get(id(tensor))
                if held is not None and held.copy is None and version(held.tensor) != held.version:
                    raise changed_tensor_error(module, name)


def _put(table: Table, tensors: Table) -> None:
    table.clear()
    table.update(tensors)


def _exchanged(table: Table, noted: Table) -> Table:
    """Put in the parameters that were noted; returns those whose place they take.

    FSDP exchanges its parameters itself, sharded ones for whole ones and back, also while a replay runs: they are left to it.
    """
    taken = {name: table[name] for name, tensor in noted.items() if name in table and table[name] is not tensor}
    taken = {name: now for name, now in taken.items() if not any(each is not None and is_sharded(each) for each in (now, noted[name]))}
    table.update({name: noted[name] for name in taken})
    return taken
