"""FSDP2 with deferred reduction: it keeps the gradients of a window, and reduces them
when the window ends.

Where a micro-batch is known to end the window, and all workers have a gradient of every
parameter, FSDP2 reduces under its backward pass. Otherwise it reduces without a pass at
the window's end: workers first tell each other which parameters have a gradient, and
the others add zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import Options, explain, torn_window_error
from gradaccum_torch.arithmetic import sum_dtype
from gradaccum_torch.checks import Change, changed_gradients_error
from gradaccum_torch.gradient_sum import (
    GetParameters,
    Gradients,
    GradientSum,
    UpdateGuard,
)
from gradaccum_torch.gradient_watch import GradientWatch
from gradaccum_torch.torch_private.fsdp import (
    Private,
    Sync,
    Unit,
    drop,
    reduce,
    unreduced,
)
from gradaccum_torch.torch_private.names import (
    keep_own,
    local,
    untraced,
    version,
)

GradientSync = Literal["micro_batch", "window", "all_reduce_per_window"]
"""When FSDP2 reduces: all of it in each micro-batch, all of it once per window, or only
the all-reduce once per window.
"""

_FOUND: WeakKeyDictionary[Private, list[Sync]] = WeakKeyDictionary()
"""What a unit did when it was first told to wait, once for each that told it: the last
one to let go restores it.
"""


class _Notes:
    """The gradients that autograd has delivered. The hooks hold this, not its owner."""

    def __init__(self) -> None:
        self.watch = GradientWatch()
        self.reached: set[int] = set()
        self.arrived: set[int] = set()
        """Those of `reached` that have a gradient, and not the zeros of a weight of 0.
        """
        self.weightless = False

    def note(self, number: int, whole: Tensor) -> None:
        if number not in self.reached:
            keep_own(whole)
            self.reached.add(number)
        if not self.weightless:
            self.arrived.add(number)
        if not self.watch.is_running:
            self.watch.pass_began(number)


class Deferred:
    """Units of FSDP2 that wait, for as long as this object lives."""

    def __init__(
        self, units: Sequence[Unit], mesh: DeviceMesh, sync: GradientSync
    ) -> None:
        self._units = units
        self._mesh = mesh
        self._waits_for_all = sync == "window"
        self._notes = _Notes()
        self._kept: list[tuple[Unit, list[Tensor], list[int]]] | None = []
        """What FSDP2 held when the last micro-batch was counted; None: a reduction
        failed, and nobody knows what it holds.
        """
        self._reduces_under_pass = False
        """The next backward pass reduces what FSDP2 keeps."""
        self._handles: dict[int, RemovableHandle] = {}
        forward_handles = self._look_after_forward()
        for unit in units:
            _FOUND.setdefault(unit.group, []).append(unit.sync)
        self._ending = weakref.finalize(
            self, _let_go, units, forward_handles, self._handles
        )
        self._ending.atexit = False
        self._wait()

    def let_go(self) -> None:
        """Let FSDP2 reduce by itself again."""
        self._ending()

    def tell(self, watch: GradientWatch) -> None:
        self._notes.watch = watch

    def expect_micro_batch(self, is_last: bool) -> None:
        """Reduce under the next backward pass if it is the window's last, and every
        worker has a gradient of each parameter, so that all reduce the same; collective
        if `is_last`.
        """
        if is_last and self._waits_for_all:
            here = [has for unit in self._units for has in self._here(unit)]
            if all(self._compared(here, dist.ReduceOp.MIN)):
                for unit in self._units:
                    unit.sync = Sync(True, True, _FOUND[unit.group][0].unused)
                self._reduces_under_pass = True
        elif self._reduces_under_pass:
            self._wait()
            self._reduces_under_pass = False

    def count(self) -> None:
        """Count the micro-batch as a part of the sum.

        Raises:
            UsageError: FSDP2 no longer has an earlier part, something changed the part
                in ``.grad``, or the reduction failed.
        """
        self.require_whole()
        self._require_kept()
        self.note()

    def note(self) -> None:
        self._kept = [(unit, unit.held(), _versions(unit)) for unit in self._units]

    @contextmanager
    def weightless(self) -> Iterator[None]:
        """Make backward passes inside the block deliver zeros, and no new gradient."""
        without = [
            each
            for unit in self._units
            for each in unit.trainable()
            if not unreduced(each)
        ]
        self._notes.weightless = True
        try:
            yield
        finally:
            self._notes.weightless = False
            for each in without:
                drop(each)

    def reduce(self) -> None:
        """Add what FSDP2 keeps to ``.grad``, reduced; collective."""
        self._require_kept()
        if self._reduces_under_pass and not any(unit.held() for unit in self._units):
            return self._forget()
        try:
            self._reduce_present()
        except RuntimeError as error:
            self._kept = None
            raise _alone_error(dist.get_rank()) from error
        self._forget()

    def require_whole(self) -> None:
        if self._kept is None:
            raise torn_window_error("the window")

    def _reduce_present(self) -> None:
        trainable = [(unit, each) for unit in self._units for each in unit.trainable()]
        here = [has for unit in self._units for has in self._here(unit)]
        anywhere = self._compared(here, dist.ReduceOp.MAX)
        if not any(anywhere):
            return
        if self._waits_for_all:
            for (unit, each), own, some in zip(trainable, here, anywhere, strict=True):
                if some and not own:
                    unit.fill(each)
            return self._reduce_all(unused=False)
        empty = [
            each.sharded_param
            for (_, each), some in zip(trainable, anywhere, strict=True)
            if not some
        ]
        empty = [parameter for parameter in empty if parameter.grad is None]
        self._reduce_all(unused=True)
        # FSDP2 has filled it with zeros, which momentum and weight decay would take for
        # a gradient.
        for parameter in empty:
            parameter.grad = None

    def drop(self) -> None:
        for unit in self._units:
            unit.drop()
        self._forget()

    def _forget(self) -> None:
        self._notes.arrived.clear()
        self._notes.reached.clear()
        self.note()

    def _require_kept(self) -> None:
        for unit, tensors, versions in self._kept or ():
            held = unit.held()
            written = versions != _versions(unit)
            if written and (held or not any(self._here(unit))):
                raise changed_gradients_error(Change.WRITTEN)
            if not written and not set(map(id, held)).issuperset(map(id, tensors)):
                raise _lost_error()

    def _reduce_all(self, unused: bool) -> None:
        for unit in self._units:
            unit.sync = Sync(True, True, unused)
        try:
            reduce(self._units)
        finally:
            self._wait()

    def _wait(self) -> None:
        for unit in self._units:
            if self._waits_for_all:
                unit.sync = Sync(False, False, _FOUND[unit.group][0].unused)
            # FSDP2 adds reduced gradients up side by side, and so needs the same ones
            # in each micro-batch.
            else:
                unit.sync = Sync(True, False, True)

    def _here(self, unit: Unit) -> list[bool]:
        trainable = list(unit.trainable())
        # A backward pass that went around the hooks: rather zeros for a gradient than a
        # gradient lost.
        around = unit.held() and self._notes.reached.isdisjoint(map(id, trainable))
        return [around or id(each) in self._notes.arrived for each in trainable]

    def _compared(
        self, here: Sequence[bool], operation: dist.ReduceOp.RedOpType
    ) -> list[bool]:
        """Return whether any worker has each gradient (MAX), or all have (MIN)."""
        numbers = torch.tensor(here, dtype=torch.int32, device=self._mesh.device_type)
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(numbers, operation, group=self._mesh.get_group(dimension))
        return [bool(number) for number in numbers.tolist()]

    def _look_after_forward(self) -> list[RemovableHandle]:
        alive = weakref.ref(self)

        def look(unit: Unit, *_: object) -> None:
            living = alive()
            if living is not None:
                living._hook(unit)

        untraced(look)
        return [
            handle
            for unit in self._units
            for handle in unit.after_forward(partial(look, unit))
        ]

    def _hook(self, unit: Unit) -> None:
        for each, whole in unit.whole_parameters():
            if id(each) not in self._handles:
                hook = whole.register_post_accumulate_grad_hook(
                    partial(self._notes.note, id(each))
                )  # type: ignore[no-untyped-call]
                self._handles[id(each)] = cast(RemovableHandle, hook)


def _let_go(
    units: Sequence[Unit],
    forward_handles: Sequence[RemovableHandle],
    handles: dict[int, RemovableHandle],
) -> None:
    for handle in (*forward_handles, *handles.values()):
        handle.remove()
    for unit in units:
        found = _FOUND[unit.group]
        first = found[0]
        found.pop()
        if not found:
            unit.sync = first


def _versions(unit: Unit) -> list[int]:
    gradients = [parameter.grad for parameter in unit.parameters]
    return [
        -1 if gradient is None else version(local(gradient)) for gradient in gradients
    ]


def _lost_error() -> UsageError:
    expected = "a call between two windows, or after opt.discard()"
    found = "an open window whose sum FSDP2 has dropped"
    fix = "Call opt.discard() on every worker."
    return explain(
        UsageError,
        "fsdp_model.reset_iter_state()",
        expected=expected,
        found=found,
        fix=fix,
    )


def _alone_error(rank: int) -> UsageError:
    expected = "every worker to come to it too, by step(), flush() or state_dict()"
    found = "one that failed or timed out"
    fix = "Give every worker as many micro-batches, and save on every worker."
    return explain(
        UsageError,
        f"the reduction of a window on rank {rank}",
        expected=expected,
        found=found,
        fix=fix,
    )


untraced(_Notes.note)


# The sum of a window in FSDP2's hands, until something asks for it: then it is reduced,
# sharded, in ``.grad``.


class SumInFSDP(GradientSum):
    """The sum is what FSDP2 keeps, and, after a checkpoint, ``.grad``."""

    def __init__(
        self,
        parameters: GetParameters,
        watch: GradientWatch,
        options: Options,
        deferred: Deferred,
    ) -> None:
        super().__init__(parameters, watch)
        self._deferred = deferred
        self._is_reduced = False
        """All of the sum is in ``.grad``."""
        deferred.tell(watch)
        for parameter in parameters():
            dtype = sum_dtype(parameter, options.accumulate_dtype)
            if dtype != parameter.dtype:
                raise explain(
                    UsageError,
                    "model.to(dtype)",
                    expected="parameters in the dtype of their sums beside"
                    " gradient_sync=",
                    found="parameters that were cast",
                    fix="Wrap the optimizer after the cast.",
                )

    def add_micro_batch(self, guard: UpdateGuard) -> bool:
        guard.is_broken = True
        self._deferred.count()
        self._is_reduced = False
        return True

    def gradients(self) -> Gradients:
        self._deferred.require_whole()
        if not self._is_reduced:
            self._deferred.reduce()
            self._is_reduced = True
            self.watch.reset()
        return super().gradients()

    def replace(self, gradients: Gradients) -> None:
        super().replace(gradients)
        self._deferred.note()

    def clear(self) -> None:
        super().clear()
        self._deferred.drop()


# Refusals where FSDP2 cannot keep a window's gradients, as ``gradient_sync=`` asks for,
# without a change of what they add up to.


def require_deferrable(
    units: Sequence[Unit],
    parameters: Sequence[Tensor],
    options: Options,
    sync: GradientSync,
    module: object,
) -> None:
    """Raise unless FSDP2 can reduce the sum of micro-batches in place of each."""
    if module is None or not units:
        raise _error(
            sync,
            "to stand beside a module= of fully_shard",
            "none",
            "Write module=fsdp_model, or leave gradient_sync= out.",
        )
    if options.on_overflow == "drop_micro_batch":
        found = 'on_overflow="drop_micro_batch", which looks at each reduced gradient'
        raise _error(
            sync,
            "no look at a single micro-batch",
            found,
            'Leave one of them out: gradient_sync="micro_batch" reduces each.',
        )
    if options.separate_sums:
        fix = 'Leave one of them out: gradient_sync="micro_batch" leaves .grad to you.'
        raise _error(
            sync,
            "to keep the sum",
            "separate_sums=True, which takes each micro-batch out of .grad",
            fix,
        )
    if sync == "all_reduce_per_window" and not any(unit.copies > 1 for unit in units):
        found = "a mesh without a dimension of copies, on which nothing is all-reduced"
        raise _error(
            sync,
            "a mesh of two dimensions (HSDP)",
            found,
            'Write gradient_sync="micro_batch", which reduce-scatters each.',
        )
    if sync == "all_reduce_per_window" and not all(unit.fills_unused for unit in units):
        fix = 'Write gradient_sync="window", or install a newer torch.'
        raise _error(
            sync,
            "a torch that has FSDPModule.set_reduce_scatter_unused_params",
            f"torch {torch.__version__}",
            fix,
        )
    for unit in units:
        _require_dtype(unit, options, sync)
        _require_whole_unit(unit, parameters, sync)


def _require_dtype(unit: Unit, options: Options, sync: GradientSync) -> None:
    for parameter in (each for each in unit.parameters if each.requires_grad):
        wanted = sum_dtype(parameter, options.accumulate_dtype)
        if not unit.sum_dtype == wanted == parameter.dtype:
            found = (
                f"a parameter in {parameter.dtype} whose gradients FSDP2 adds up in"
                f" {unit.sum_dtype}, and that are to be added in {wanted}"
            )
            policy = (
                "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16,"
                f" reduce_dtype={wanted})"
            )
            fix = (
                f"Keep the parameters in {wanted} and give fully_shard {policy}, or"
                ' write gradient_sync="micro_batch".'
            )
            raise _error(
                sync,
                "one dtype for parameters, FSDP2's sums and accumulate_dtype",
                found,
                fix,
            )


def _require_whole_unit(
    unit: Unit, parameters: Sequence[Tensor], sync: GradientSync
) -> None:
    own = set(map(id, parameters))
    others = sum(id(each) not in own for each in unit.parameters if each.requires_grad)
    if others:
        found = (
            f"{others} parameters of another optimizer, which FSDP2 reduces together"
            " with these"
        )
        fix = (
            "Call fully_shard on the part of each optimizer, or write"
            ' gradient_sync="micro_batch".'
        )
        raise _error(sync, "a part of the model with one optimizer", found, fix)


def _error(
    sync: GradientSync, expected: str, found: str, fix: str
) -> ArgumentValueError:
    return explain(
        ArgumentValueError,
        f'gradient_sync="{sync}"',
        expected=expected,
        found=found,
        fix=fix,
    )
