"""FSDP2 with deferred reduction: it keeps the gradients of a window, and reduces them
when the window ends.

If `opt.backward` is known to end the window, and all workers have a gradient of every
parameter, FSDP2 reduces under that backward pass. Otherwise it reduces without a pass at
the window's end, and workers without a gradient that others have add zeros.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gradaccum.kit import Options
from gradaccum_torch.gradient_sum import (
    GetParameters,
    Gradients,
    GradientSum,
    UpdateGuard,
)
from gradaccum_torch.gradient_watch import GradientWatch
from gradaccum_torch.torch_private.fsdp import (
    Unit,
    begin,
    drop,
    has_gradient,
    reduce,
    units_holding,
)
from gradaccum_torch.torch_private.names import keep_own, mesh_of, untraced

GradientSync = Literal["micro_batch", "window"]
"""When FSDP2 reduces: in each micro-batch, or once per window."""
WAITING: Counter[int] = Counter()
"""How many `Deferred` keep a unit from reducing, by the id of its group."""


class Arrivals:
    """The gradients that autograd has delivered. The hooks hold this, not its owner."""

    def __init__(self) -> None:
        self.watch = GradientWatch()

    def gradient_arrived(self, parameter: Tensor) -> None:
        if not self.watch.is_running:
            self.watch.pass_began(id(parameter))
        keep_own(parameter)


untraced(Arrivals.gradient_arrived)


class Deferred:
    """Units of FSDP2 that wait, for as long as this object lives."""

    def __init__(self, units: Sequence[Unit], mesh: DeviceMesh) -> None:
        self.units = units
        self.mesh = mesh
        self.arrivals = Arrivals()
        self.is_reduced = False
        """The last backward pass has reduced what FSDP2 kept."""
        self.handles: dict[int, RemovableHandle] = {}
        forward_handles = self.look_after_forward()
        for unit in units:
            WAITING[id(unit.group)] += 1
            unit.set_reduces(False)
        self.ending = weakref.finalize(
            self, reduce_again, units, forward_handles, self.handles
        )
        self.ending.atexit = False

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """Reduce under the backward pass in the block, if every worker has a gradient of
        each parameter, so that all reduce the same; collective.
        """
        has_gradients = [
            has_gradient(each) for unit in self.units for each in unit.trainable()
        ]
        if all(self.compared(has_gradients, dist.ReduceOp.MIN)):
            self.set_reduces(True)
            self.is_reduced = True
        try:
            yield
        finally:
            self.set_reduces(False)

    @contextmanager
    def weightless(self) -> Iterator[None]:
        """Make backward passes inside the block leave no new gradient."""
        empty_parameters = [
            each
            for unit in self.units
            for each in unit.trainable()
            if not has_gradient(each)
        ]
        try:
            yield
        finally:
            for each in empty_parameters:
                drop(each)

    def reduce(self) -> None:
        """Add what FSDP2 keeps to ``.grad``, reduced; collective."""
        if self.is_reduced and not any(unit.has_unreduced() for unit in self.units):
            self.is_reduced = False
            return
        self.is_reduced = False
        trainable = [(unit, each) for unit in self.units for each in unit.trainable()]
        has_gradients = [has_gradient(each) for _, each in trainable]
        exists = self.compared(has_gradients, dist.ReduceOp.MAX)
        if not any(exists):
            return
        for (unit, each), has_here, has_somewhere in zip(
            trainable, has_gradients, exists, strict=True
        ):
            if has_somewhere and not has_here:
                unit.fill(each)
        self.set_reduces(True)
        try:
            reduce(self.units)
        finally:
            self.set_reduces(False)

    def drop(self) -> None:
        self.is_reduced = False
        for unit in self.units:
            unit.drop()

    def set_reduces(self, reduces: bool) -> None:
        for unit in self.units:
            unit.set_reduces(reduces)

    def compared(
        self, flags: Sequence[bool], operation: dist.ReduceOp.RedOpType
    ) -> list[bool]:
        """Return for each flag whether it is true on any worker (MAX), or on all (MIN)."""
        numbers = torch.tensor(flags, dtype=torch.int32, device=self.mesh.device_type)
        for dimension in range(self.mesh.ndim):
            dist.all_reduce(numbers, operation, group=self.mesh.get_group(dimension))
        return [bool(number) for number in numbers.tolist()]

    def look_after_forward(self) -> list[RemovableHandle]:
        """Watch the gathered parameters from their first forward pass on."""
        reference = weakref.ref(self)

        def look(unit: Unit, *_: object) -> None:
            deferred = reference()
            if deferred is not None:
                deferred.add_hooks(unit)

        untraced(look)
        return [
            module.register_forward_hook(partial(look, unit))
            for unit in self.units
            for module in unit.modules
        ]

    def add_hooks(self, unit: Unit) -> None:
        for parameter in unit.gathered_parameters():
            if id(parameter) not in self.handles:
                hook = parameter.register_post_accumulate_grad_hook(
                    self.arrivals.gradient_arrived
                )  # type: ignore[no-untyped-call]
                self.handles[id(parameter)] = cast(RemovableHandle, hook)


def reduce_again(
    units: Sequence[Unit],
    forward_handles: Sequence[RemovableHandle],
    handles: dict[int, RemovableHandle],
) -> None:
    for handle in (*forward_handles, *handles.values()):
        handle.remove()
    for unit in units:
        WAITING[id(unit.group)] -= 1
        if not WAITING[id(unit.group)]:
            unit.set_reduces(True)


class SumInFSDP(GradientSum):
    """The sum in FSDP2's hands, until something asks for it: then it is reduced, sharded,
    in ``.grad``.
    """

    def __init__(
        self,
        parameters: GetParameters,
        watch: GradientWatch,
        options: Options,
        deferred: Deferred,
    ) -> None:
        super().__init__(parameters, watch)
        self.deferred = deferred
        self.is_reduced = False
        """All of the sum is in ``.grad``."""
        deferred.arrivals.watch = watch

    def add_micro_batch(self, guard: UpdateGuard) -> bool:
        self.is_reduced = False
        return True

    def gradients(self) -> Gradients:
        if not self.is_reduced:
            self.deferred.reduce()
            self.is_reduced = True
            self.watch.reset()
        return super().gradients()

    def clear(self) -> None:
        super().clear()
        self.deferred.drop()


class LayerShards:
    """The units of FSDP2 of a list of layers, whose passes are one after the other: each
    is gathered once for all of them, and none reduces by itself inside the ``with``
    block.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Module]]) -> None:
        layer_parameters = [
            [each for module in modules for each in module.parameters(recurse=False)]
            for modules in layers
        ]
        units = units_holding([each for layer in layer_parameters for each in layer])
        self._units: list[list[Unit]] = []
        for parameters in layer_parameters:
            ids = set(map(id, parameters))
            self._units.append(
                [unit for unit in units if not ids.isdisjoint(map(id, unit.parameters))]
            )
        first_layers = [
            min(index for index, layer in enumerate(self._units) if unit in layer)
            for unit in units
        ]
        self.first = {
            id(parameter): index
            for unit, index in zip(units, first_layers, strict=True)
            for parameter in unit.parameters
        }
        """The first layer that has a parameter's unit, by the parameter's id: there the
        unit is reduced.
        """
        self._reduced_units: dict[int, list[Unit]] = {}
        for unit, index in zip(units, first_layers, strict=True):
            if any(parameter.requires_grad for parameter in unit.parameters):
                self._reduced_units.setdefault(index, []).append(unit)
        self._deferred: dict[int, Deferred] = {}

    def __bool__(self) -> bool:
        return bool(self.first)

    def __enter__(self) -> None:
        begin([unit for units in self._units for unit in units])
        for index, units in self._reduced_units.items():
            mesh = mesh_of(units[0].parameters[0])
            self._deferred[index] = Deferred(units, mesh)

    def __exit__(self, *_: object) -> None:
        for deferred in self._deferred.values():
            deferred.ending()

    @contextmanager
    def gathered(self, index: int) -> Iterator[None]:
        with ExitStack() as stack:
            for unit in self._units[index]:
                stack.enter_context(unit.gathered())
            yield

    def reduce(self, index: int) -> None:
        """Reduce the units that no earlier layer has; collective."""
        if index in self._deferred:
            self._deferred[index].reduce()
