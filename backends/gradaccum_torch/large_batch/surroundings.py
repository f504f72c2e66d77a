"""The state of a layer's modules in a pass that runs again.

A second run would move a batch norm's statistics again, and read buffers and modes that
other passes have changed since. So each module is noted before its first call: its
mode, and copies of its buffers. The second run finds these, and leaves the present ones
behind. Nothing is written into a tensor, as autograd would take that for a change of
what it has saved.

torch does not count what a batch norm writes into its statistics. So a buffer of up to
`SMALL` elements is copied in any case, and compared with its copy only if it is larger:
to compare waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradaccum_torch.torch_private.names import buffers_of, version

Buffers = dict[str, Tensor | None]
"""A module's buffers by name."""

SMALL = 2**16
"""Elements of the largest buffer whose copy is kept without a look at whether it
changed; a batch norm's have one for each channel.
"""


class _Module(NamedTuple):
    """A module as it was before its first call."""

    module: nn.Module
    training: bool
    buffers: Buffers


class _Buffer(NamedTuple):
    """A buffer, and the copy for the second run; None if it did not change."""

    tensor: Tensor
    version: int
    copy: Tensor | None


class Surroundings:
    """The modules of one call."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: dict[int, _Module] = {}
        self._buffers: dict[int, _Buffer] = {}
        """By the tensor's id, so that a buffer of two modules stays one."""
        for module in modules:
            for child in module.modules():
                self._note(child)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Note each further module before its first call; drop copies of what did not
        change.
        """
        thread = threading.get_ident()

        def note(module: nn.Module, _: object) -> None:
            if threading.get_ident() == thread:
                self._note(module)

        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
        for key, (tensor, noted, copy) in self._buffers.items():
            if copy is None or copy.numel() <= SMALL or version(tensor) != noted:
                continue
            if torch.equal(tensor, copy):
                self._buffers[key] = _Buffer(tensor, noted, None)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Restore the modules for the second run, and their present state after it."""
        modules = list(self._modules.values())
        copies = {
            key: buffer.copy.detach().clone()
            for key, buffer in self._buffers.items()
            if buffer.copy is not None
        }
        present = [(each.training, dict(buffers_of(each))) for each, _, _ in modules]
        try:
            for module, training, buffers in modules:
                first = {
                    name: copies.get(id(buffer), buffer)
                    for name, buffer in buffers.items()
                }
                _restore(module, training, first)
            yield
        finally:
            for noted, state in zip(modules, present, strict=True):
                _restore(noted.module, *state)

    def _note(self, module: nn.Module) -> None:
        if id(module) in self._modules:
            return
        buffers = dict(buffers_of(module))
        self._modules[id(module)] = _Module(module, module.training, buffers)
        for buffer in buffers.values():
            if buffer is not None and id(buffer) not in self._buffers:
                copy = buffer.detach().clone()
                self._buffers[id(buffer)] = _Buffer(buffer, version(buffer), copy)


def _restore(module: nn.Module, training: bool, buffers: Buffers) -> None:
    module.training = training
    table = buffers_of(module)
    table.clear()
    table.update(buffers)
