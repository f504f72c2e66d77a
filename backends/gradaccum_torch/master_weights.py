"""The model's parameters, and float32 masters of the half-precision parameters.

The inner optimizer's groups contain the masters only during an update. After the update
the rounded masters are copied into the model. Before it, a master takes over any value
that something else wrote into its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradaccum_torch.arithmetic import HALF
from gradaccum_torch.torch_private.names import parameters_of

Group = dict[str, Any]
"""A parameter group in torch's format."""


class MasterWeights:
    """The parameters of an inner optimizer, in the order of its groups, and the masters
    of the half-precision parameters.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        is_wanted: bool,
        masters: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.inner = inner
        self.is_wanted = is_wanted
        self.masters: dict[Tensor, Tensor] = {}
        """The masters by half-precision parameter."""
        parameters = self.parameters()
        for index, master in (masters or {}).items():
            self.masters[parameters[index]] = master
        self.groups_changed()

    def parameters(self) -> list[Tensor]:
        """Return the model's parameters, each of them once."""
        parameters = parameters_of(self.inner)
        if self.masters and self.are_in_place:
            models = {master: parameter for parameter, master in self.masters.items()}
            parameters = [models.get(tensor, tensor) for tensor in parameters]
        return parameters

    def groups(self) -> list[Group]:
        """Return copies of the groups, which contain the model's parameters."""
        parameters = iter(self.parameters())
        return [
            {**group, "params": [next(parameters) for _ in group["params"]]}
            for group in self.inner.param_groups
        ]

    def worked_on(self, parameter: Tensor) -> Tensor:
        """Return the parameter's master, or the parameter itself if it has no
        master.
        """
        return self.masters.get(parameter, parameter) if self.masters else parameter

    def by_index(self) -> dict[int, Tensor]:
        return {
            index: self.masters[parameter]
            for index, parameter in enumerate(self.parameters())
            if parameter in self.masters
        }

    def groups_changed(self) -> None:
        """Create the masters that are missing and widen the optimizer's state for them.
        Drop the masters of parameters that were replaced or cast.
        """
        half_parameters = [
            parameter
            for parameter in (self.parameters() if self.is_wanted else ())
            if parameter.dtype in HALF
        ]
        for parameter in set(self.masters).difference(half_parameters):
            del self.masters[parameter]
        for parameter in half_parameters:
            if parameter not in self.masters:
                master = parameter.detach().float()
                self.masters[parameter] = torch.nn.Parameter(
                    master, requires_grad=parameter.requires_grad
                )
                self._widen_state(parameter)

    def _widen_state(self, parameter: Tensor) -> None:
        state = self.inner.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALF:
                state[name] = value.float()

    @torch.no_grad()
    def load(self, masters: Mapping[int, Tensor]) -> None:
        """Load the masters by the index of their parameter. If a model's value differs
        from its master, the model's value still takes precedence.
        """
        for index, parameter in enumerate(self.parameters()):
            if index in masters:
                self.masters[parameter].copy_(masters[index])

    @property
    def are_in_place(self) -> bool:
        first = next(iter(self.masters), None)
        return first is not None and not any(
            first is tensor for tensor in parameters_of(self.inner)
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the masters into the inner optimizer's groups inside the block."""
        if not self.masters or self.are_in_place:
            yield
            return
        models = {master: parameter for parameter, master in self.masters.items()}
        try:
            self._swap(self.masters)
            yield
        finally:
            through(lambda: self._swap(models))

    def _swap(self, replacements: Mapping[Tensor, Tensor]) -> None:
        for group in self.inner.param_groups:
            # Modify the list in place, because an optimizer may hold a reference to it.
            group["params"][:] = [
                replacements.get(each, each) for each in group["params"]
            ]
        state: MutableMapping[Tensor, Any] = self.inner.state
        for tensor, replacement in replacements.items():
            if tensor in state:
                state[replacement] = state.pop(tensor)

    @contextmanager
    def work_on_masters(self) -> Iterator[None]:
        """Run a method of the inner optimizer on the masters inside the block, then
        round them.
        """
        if not self.are_in_place:
            self.copy_model_into_masters()
        try:
            with self.in_place():
                yield
        finally:
            self.round()

    @contextmanager
    def only(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Hide the masters of all other parameters inside the block."""
        every_master = dict(self.masters)
        ids = set(map(id, parameters))
        try:
            for parameter in every_master:
                if id(parameter) not in ids:
                    del self.masters[parameter]
            yield
        finally:
            self.masters.clear()
            self.masters.update(every_master)

    def copy_model_into_masters(self) -> None:
        """Copy every value that something else wrote into a parameter to its master."""
        if not self.masters:
            return
        with torch.no_grad():
            for parameter, master in self.masters.items():
                is_same = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(is_same, master, parameter))

    def round(self) -> None:
        """Write the rounded masters into the model wherever they differ."""
        if not self.masters:
            return
        with torch.no_grad():
            for parameter, master in self.masters.items():
                rounded_master = master.to(parameter.dtype)
                # Autograd raises if a parameter was written to after the forward pass,
                # even with the same value.
                if not parameter.is_cpu or not torch.equal(rounded_master, parameter):
                    parameter.copy_(rounded_master)


def through(action: Callable[[], None]) -> None:
    """Run `action` to its end, even if an interrupt comes; raise the interrupt
    afterwards. It must be safe to run `action` twice.
    """
    try:
        action()
    except BaseException:
        action()
        raise
