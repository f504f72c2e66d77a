"""FSDP2 with deferred reduction: the gradients stay unreduced until the window ends.

If a call to `opt.backward` is known to be the last of its window, and every worker has
a gradient for every parameter, FSDP2 reduces the gradients during that backward pass.
Otherwise the gradients are reduced after the last backward pass, and a worker that
lacks a gradient contributes zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
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
from gradaccum_torch.torch_private.fsdp import Private, Unit, has_gradient, reduce
from gradaccum_torch.torch_private.names import keep_own, untraced

GradientSync = Literal["micro_batch", "window"]
"""When FSDP2 reduces gradients: in each micro-batch, or once per window."""


class DeferredReduction:
    """A set of FSDP2 modules, whose gradient reduction is deferred while this object is
    alive.
    """

    def __init__(self, units: Sequence[Unit], mesh: DeviceMesh) -> None:
        self.units = units
        self.mesh = mesh
        self.watch: GradientWatch | None = None
        self.is_reduced = False
        """Whether the gradients were reduced during the window's last backward pass."""
        self.handles: dict[int, RemovableHandle] = {}
        forward_handles = self.look_after_forward()
        for unit in units:
            unit.set_reduces(False)
        weakref.finalize(
            self, reduce_again, units, forward_handles, self.handles
        ).atexit = False

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """If every worker already has a gradient for every parameter, make FSDP2 reduce
        gradients during the backward pass inside the block. The condition ensures that
        all workers reduce gradients of the same parameters. This is a collective call.
        """
        has_gradients = [has_gradient(parameter) for _, parameter in self.trainable()]
        if all(self.compare_flags(has_gradients, dist.ReduceOp.MIN)):
            self.set_reduces(True)
            self.is_reduced = True
        try:
            yield
        finally:
            self.set_reduces(False)

    def reduce(self) -> None:
        """Reduce the gradients that FSDP2 has not reduced yet, and add the results to
        ``.grad``. This is a collective call.
        """
        if self.is_reduced and not any(unit.has_unreduced() for unit in self.units):
            self.is_reduced = False
            return
        self.is_reduced = False
        trainable = self.trainable()
        has_gradients = [has_gradient(parameter) for _, parameter in trainable]
        exists = self.compare_flags(has_gradients, dist.ReduceOp.MAX)
        if not any(exists):
            return
        for (unit, parameter), has_here, has_somewhere in zip(
            trainable, has_gradients, exists, strict=True
        ):
            if has_somewhere and not has_here:
                unit.fill(parameter)
        self.set_reduces(True)
        try:
            reduce(self.units)
        finally:
            self.set_reduces(False)

    def drop(self) -> None:
        self.is_reduced = False
        for unit in self.units:
            unit.drop()

    def trainable(self) -> list[tuple[Unit, Private]]:
        pairs: list[tuple[Unit, Private]] = []
        for unit in self.units:
            pairs += [(unit, parameter) for parameter in unit.trainable()]
        return pairs

    def set_reduces(self, reduces: bool) -> None:
        for unit in self.units:
            unit.set_reduces(reduces)

    def compare_flags(
        self, flags: Sequence[bool], operation: dist.ReduceOp.RedOpType
    ) -> list[bool]:
        """For each flag, return whether it is true on any worker (if `operation` is
        MAX) or on all workers (if `operation` is MIN).
        """
        numbers = torch.tensor(flags, dtype=torch.int32, device=self.mesh.device_type)
        for group in self.mesh.get_all_groups():
            dist.all_reduce(numbers, operation, group=group)
        return [bool(number) for number in numbers.tolist()]

    def look_after_forward(self) -> list[RemovableHandle]:
        """Register forward hooks. Once a forward pass gathers a parameter, the hooks
        watch the gradient of this parameter.
        """
        # Use a weak reference, because a hook that refers to this object would keep it
        # alive.
        reference = weakref.ref(self)
        gradient_handles = self.handles

        def gradient_arrived(parameter: Tensor) -> None:
            watch = getattr(reference(), "watch", None)
            if watch is not None and not watch.is_running:
                watch.pass_began(id(parameter))
            keep_own(parameter)

        def look(unit: Unit, *_: object) -> None:
            for parameter in unit.gathered_parameters():
                if id(parameter) not in gradient_handles:
                    hook = parameter.register_post_accumulate_grad_hook(
                        gradient_arrived
                    )  # type: ignore[no-untyped-call]
                    gradient_handles[id(parameter)] = cast(RemovableHandle, hook)

        untraced(gradient_arrived)
        untraced(look)
        handles: list[RemovableHandle] = []
        for unit in self.units:
            for module in unit.modules:
                handles.append(module.register_forward_hook(partial(look, unit)))
        return handles


def reduce_again(
    units: Sequence[Unit],
    forward_handles: Sequence[RemovableHandle],
    handles: dict[int, RemovableHandle],
) -> None:
    for handle in (*forward_handles, *handles.values()):
        handle.remove()
    for unit in units:
        unit.set_reduces(True)


class SumInFSDP(GradientSum):
    """The sum of the open window's gradients. FSDP2 reduces the sum only when it is
    needed, and then puts each worker's shard of the sum into ``.grad``.
    """

    def __init__(
        self,
        parameters: GetParameters,
        watch: GradientWatch,
        options: Options,
        deferred_reduction: DeferredReduction,
    ) -> None:
        super().__init__(parameters, watch)
        self.deferred_reduction = deferred_reduction
        self.is_reduced = False
        """Whether the sum has been reduced, so that ``.grad`` contains this worker's
        complete shard of the sum.
        """
        deferred_reduction.watch = watch

    def add_micro_batch(self, guard: UpdateGuard) -> bool:
        self.is_reduced = False
        return True

    def gradients(self) -> Gradients:
        if not self.is_reduced:
            self.deferred_reduction.reduce()
            self.is_reduced = True
            self.watch.reset()
        return super().gradients()

    def clear(self) -> None:
        super().clear()
        self.deferred_reduction.drop()
