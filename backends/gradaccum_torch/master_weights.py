"""The float32 master weights of a model's half-precision parameters.

The inner optimizer's groups contain the master weights only during an update. If other
code has changed a parameter, the new value is copied into the master weight before the
update. After the update, the rounded master weights are copied into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum_torch.arithmetic import HALF, is_zero
from gradaccum_torch.torch_private.names import Versions, local, parameters_of

Group = dict[str, Any]
"""A parameter group in torch's format."""


class MasterWeights:
    """The parameters of an inner optimizer, in the order of its groups, and the float32
    master weights of the half-precision parameters.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        is_wanted: bool,
        masters: Mapping[int, Tensor] | None,
    ) -> None:
        self.inner = inner
        self.is_wanted = is_wanted
        self.masters: dict[Tensor, Tensor] = {}
        """The float32 master weight of each half-precision parameter."""
        self.are_known_to_move = False
        """Whether the inner optimizer has already updated a master weight."""
        parameters = self.parameters()
        for index, master in (masters or {}).items():
            self.masters[parameters[index]] = master
        self.groups_changed()

    def parameters(self) -> list[Tensor]:
        """Return the model's parameters, even while the optimizer's groups contain
        their master weights.
        """
        parameters = parameters_of(self.inner)
        if self.masters and self.are_in_place:
            models = {master: parameter for parameter, master in self.masters.items()}
            parameters = [models.get(tensor, tensor) for tensor in parameters]
        return parameters

    def worked_on(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the inner optimizer updates: the master weight of
        `parameter`, or `parameter` itself if it has no master weight.
        """
        return self.masters.get(parameter, parameter) if self.masters else parameter

    def by_index(self) -> dict[int, Tensor]:
        return {
            index: self.masters[parameter]
            for index, parameter in enumerate(self.parameters())
            if parameter in self.masters
        }

    def groups_changed(self) -> None:
        """Called after the optimizer's groups have changed. Create a master weight for
        each half-precision parameter that has none, and cast the optimizer's
        half-precision state for this parameter to float32. Delete the master weight of
        each parameter that is no longer in the groups, or whose dtype is no longer half
        precision.
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
                state = self.inner.state.get(parameter, {})
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dtype in HALF:
                        state[name] = value.float()

    @torch.no_grad()
    def load(self, masters: Mapping[int, Tensor]) -> None:
        """Load saved master weights. `masters` maps the index of each parameter to its
        master weight. If a value in the model differs from the rounded master weight,
        the next update starts from the model's value.
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
        """Inside the block, replace the parameters in the inner optimizer's groups with
        their master weights.
        """
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
            # Modify the list in place, because the optimizer may refer to it elsewhere
            # too.
            group["params"][:] = [
                replacements.get(each, each) for each in group["params"]
            ]
        state: MutableMapping[Tensor, Any] = self.inner.state
        for tensor, replacement in replacements.items():
            if tensor in state:
                state[replacement] = state.pop(tensor)

    @contextmanager
    def work_on_masters(self) -> Iterator[None]:
        """Inside the block, the inner optimizer reads and changes the master weights.
        At the end of the block, the rounded master weights are written into the model.
        """
        if not self.are_in_place:
            self.copy_model_into_masters()
        try:
            with self.in_place():
                yield
        finally:
            self.round()

    @contextmanager
    def required_to_move(self, sums: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Raise at the end of the block if the inner optimizer has ignored the master
        weights. An optimizer ignores the master weights if it neither modifies a master
        weight nor has state for one.

        If all learning rates are 0, or if the master weight with the fewest elements
        has a zero gradient, no error is raised, because even a correct optimizer may
        then change nothing. In this case, the next update is checked too. Once the
        optimizer has used a master weight, no later update is checked.

        - `sums`: the gradient of each parameter.
        """
        masters = {self.masters[each]: each for each in sums if each in self.masters}
        if self.are_known_to_move or not masters:
            yield
            return
        # Compare values too: writes through ``.data`` do not change a tensor's version.
        smallest = min(masters, key=Tensor.numel)
        value = local(smallest).detach().clone()
        versions = Versions(masters)
        yield
        self.are_known_to_move = (
            versions.moved()
            or any(master in self.inner.state for master in masters)
            or not torch.equal(local(smallest), value)
        )
        if self.are_known_to_move or is_zero(sums[masters[smallest]]):
            return
        if any(group.get("lr") != 0 for group in self.inner.param_groups):
            raise UsageError(
                "master_weights: expected an inner optimizer that updates the tensors"
                f" in its own param_groups; got {type(self.inner).__name__}, which left"
                " the master weights in its param_groups unchanged. Most likely it"
                " updates the parameters through other references, such as the"
                " param_groups of other optimizers. Wrap it without"
                " master_weights=True, and keep the model's parameters in float32."
            )

    @contextmanager
    def only(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Inside the block, `masters` contains only the master weights of `parameters`.
        An update inside the block therefore neither reads nor writes any other master
        weight.
        """
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

    @torch.no_grad()
    def copy_model_into_masters(self) -> None:
        """If a value of a parameter differs from the rounded master weight, other code
        has changed this value. Copy such values into the master weight.
        """
        for parameter, master in self.masters.items():
            is_same = master.to(parameter.dtype) == parameter
            master.copy_(torch.where(is_same, master, parameter))

    @torch.no_grad()
    def round(self) -> None:
        """Write the rounded master weights into the model's parameters."""
        for parameter, master in self.masters.items():
            rounded_master = master.to(parameter.dtype)
            # Do not write unchanged values, because autograd raises an error if a
            # parameter was written to after the forward pass. On an accelerator, always
            # write the values, because a comparison would wait for the device.
            if not parameter.is_cpu or not torch.equal(rounded_master, parameter):
                parameter.copy_(rounded_master)


def through(action: Callable[[], None]) -> None:
    """Run `action`. If an exception such as KeyboardInterrupt interrupts `action`, run
    it again from the start and then let the exception propagate. `action` must
    therefore be safe to run twice.
    """
    try:
        action()
    except BaseException:
        action()
        raise
