"""Copies random states and module buffers before a forward pass, and restores them
after an error or for a second forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradaccum.kit import HostRandom
from gradaccum_torch.torch_private.names import buffers_of, untraced, version


class RandomState:
    """A copy of torch's random states on the CPU and on `devices`. If `with_host` is
    True, it also contains the random states of Python and NumPy.
    """

    def __init__(
        self, devices: Iterable[torch.device], *, with_host: bool = True
    ) -> None:
        self._host = HostRandom() if with_host else None
        self._cpu = torch.get_rng_state()
        self._of_devices = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in devices
            if device.type not in ("cpu", "meta")
        }

    def put_back(self) -> None:
        if self._host is not None:
            self._host.restore()
        torch.set_rng_state(self._cpu)
        for device, state in self._of_devices.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def has_torch_moved(self) -> bool:
        now = RandomState(self._of_devices, with_host=False)
        states = [now._cpu, *now._of_devices.values()]
        return not all(
            map(torch.equal, states, [self._cpu, *self._of_devices.values()])
        )


def random_devices(tensors: Iterable[Tensor]) -> set[torch.device]:
    """Return the devices of `tensors`, and the current CUDA device if CUDA is in
    use.
    """
    devices = {tensor.device for tensor in tensors}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return devices


class BufferCopy(NamedTuple):
    """A buffer of a module, and a copy of its values. `values` is None if the buffer
    need not be restored.
    """

    module: nn.Module
    name: str
    buffer: Tensor | None
    version: int
    values: Tensor | None


SMALL = 2**16
"""Buffers of up to this many elements are always copied and restored, because some
writes, for example to a batch norm's statistics, do not change a buffer's version.
"""


class Buffers:
    """Copies of the buffers of modules and of their submodules."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.modules: dict[int, nn.Module] = {}
        self._copies: list[BufferCopy] = []
        for module in modules:
            self.note(module)

    def note(self, module: nn.Module) -> None:
        if id(module) in self.modules:
            return
        for child in module.modules():
            if id(child) not in self.modules:
                self.modules[id(child)] = child
                for name, buffer in buffers_of(child).items():
                    values = None if buffer is None else buffer.detach().clone()
                    number = 0 if buffer is None else version(buffer)
                    self._copies.append(BufferCopy(child, name, buffer, number, values))

    @contextmanager
    def noting_calls(self) -> Iterator[None]:
        """Inside the block, copy the buffers of each module before the module's first
        call. A forward pre-hook makes the copies. If compiled code calls a module
        without running its hooks, the module's buffers are not copied.
        """

        def note(module: nn.Module, _: object) -> None:
            self.note(module)

        untraced(note)
        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def free_unwritten(self) -> None:
        """Free the copies of large buffers that have not been written to."""
        for index, copy in enumerate(self._copies):
            if copy.buffer is None or copy.buffer.numel() <= SMALL:
                continue
            if version(copy.buffer) == copy.version:
                self._copies[index] = copy._replace(values=None)

    def put_back(self) -> None:
        for module, name, buffer, _, values in self._copies:
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
            if buffer is not None and values is not None:
                # Write through .data. A normal write would increase the version, and
                # autograd would then report that a saved tensor was modified. If the
                # forward pass has resized an empty buffer, replace all of .data.
                if buffer.numel() == values.numel():
                    buffer.data.copy_(values)
                else:
                    buffer.data = values.clone()


class Before:
    """Copies of random states and module buffers from before a call.

    If the ``with`` block raises, the states and buffers are restored.

    Args:
        tensors: the tensors on whose devices random states are copied.
        modules: the modules whose buffers are copied.
        notes_calls: whether the buffers of all modules that are called inside the block
            are copied too.
        copies_host: whether the random states of Python and NumPy are copied too. Pass
            False if the user's functions are not run again, because making these copies
            takes as long as a micro-batch of a small model.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        modules: Iterable[nn.Module],
        *,
        notes_calls: bool,
        copies_host: bool,
    ) -> None:
        self._devices = random_devices(tensors)
        self._random_state = RandomState(self._devices, with_host=copies_host)
        self.buffers = Buffers(modules)
        self.notes_calls = notes_calls
        self._noting = self.buffers.noting_calls() if notes_calls else nullcontext()

    def __enter__(self) -> None:
        self._noting.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._noting.__exit__(None, None, None)
        if error[0] is not None:
            self._random_state.put_back()
            self.buffers.put_back()

    def random_state(self) -> RandomState:
        return RandomState(self._devices)
