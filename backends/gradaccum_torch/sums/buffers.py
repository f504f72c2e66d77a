"""Sums in buffers: `BufferStrategy` checks a micro-batch before it is added,
`MovingStrategy` moves each gradient into a buffer of another dtype once autograd has
filled it, and `SeparateStrategy` leaves ``.grad`` to the user between two steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.checks import Size, interrupted_error
from gradaccum_torch.parameters import Parameters
from gradaccum_torch.private.names import (
    flattened,
    foreach_add_,
    keep_own,
    unflattened,
    untraced,
    version,
)
from gradaccum_torch.sums import arithmetic
from gradaccum_torch.sums.arithmetic import (
    DTYPE,
    GRAD,
    IS_SPARSE,
    REQUIRES_GRAD,
    added_up,
    gradient_dtype,
    sum_dtype,
)
from gradaccum_torch.sums.strategy import Strategy, Undivided
from gradaccum_torch.window.watch import (
    NOTHING_SEEN,
    Allowed,
    Event,
    Hook,
    Watched,
    can_be_hooked,
    seen,
)

_MOVERS: WeakValueDictionary[int, MovingStrategy] = WeakValueDictionary()
"""The strategy that moves a parameter's gradients, by the parameter's id. The strategy
holds the parameter, so no other gets that id.
"""


class Usual(NamedTuple):
    """The gradients that each micro-batch brings, and their sums: looked at once, and
    not in each micro-batch.
    """

    positions: list[int]
    """The ids of all parameters of the optimizer."""
    filled: list[Tensor]
    """The parameters with a gradient, which is plain, dense and of the dtype of its
    sum.
    """
    others: list[Tensor]
    packs: bool
    """They are so small that one copy of them side by side saves time."""
    sums: Sequence[Tensor] = ()
    """By filled parameter; none: the open window has no sums, or others."""
    packed: Tensor | None = None
    """The tensor that the sums are parts of, if they are."""

    def gradients(self, positions: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of a micro-batch, none if it brings others."""
        found: list[Tensor] = list(map(GRAD, self.filled))
        special = (
            set(map(type, found)) != {Tensor}
            or any(map(IS_SPARSE, found))
            or any(map(REQUIRES_GRAD, found))
        )
        other = (
            special
            or self.positions != list(map(id, positions))
            or any(each.grad is not None for each in self.others)
        )
        return [] if other else found

    def begun_with(self, gradients: list[Tensor]) -> Usual:
        """Return this with the sums of a window that begins with these gradients.

        They are copied, as somebody else may hold them. And a CPU's allocator, to which
        each later gradient returns its memory, would give that memory back to the
        system, and fetch it again, if it lay above the sums.
        """
        if not self.packs:
            return self._replace(sums=list(map(Tensor.clone, gradients)))
        packed = flattened(gradients)
        return self._replace(sums=unflattened(packed, gradients), packed=packed)

    def without_sums(self) -> Usual:
        return self._replace(sums=(), packed=None)


untraced(Usual.begun_with)  # torch 2.11's Dynamo returns such a tuple without fields.


class BufferStrategy(Strategy):
    """The sum is in buffers; ``.grad`` holds at most the micro-batch under way, which
    is dropped if asked for and not finite.
    """

    keeps_micro_batch_apart = True

    def __init__(
        self,
        parameters: Parameters,
        accumulate_dtype: torch.dtype | None,
        drops: bool = False,
    ) -> None:
        self._held: dict[Tensor, Tensor] = {}
        super().__init__(parameters, accumulate_dtype, drops)

    def pack(self, packed: Tensor | None = None) -> None:
        self._usual: Usual | None = None

    def take(self, size: Size, begin: Callable[[], None]) -> bool:
        usual, first = self._usual, not self._held
        gradients = (
            usual.gradients(self._parameters.positions())
            if usual is not None and (first or usual.sums)
            else []
        )
        filled = (
            usual.filled
            if gradients and usual
            else [each for each in self._parameters.unique() if each.grad is not None]
        )
        if first or not gradients:
            self._require_takeable(filled, size)
        finite = (
            not self._drops
            or arithmetic.measure(
                [added_up(each.grad) for each in filled if each.grad is not None]
            ).finite
        )
        if finite and usual and gradients:
            begun = usual.begun_with(gradients) if first else usual
            begin()
            if first:
                self._held, self._usual = (
                    dict(zip(filled, begun.sums, strict=True)),
                    begun,
                )
            else:
                foreach_add_(usual.sums, gradients)
        elif finite:
            self._add_one_by_one(filled, begin)
            self._usual = self._learnt() if first else usual and usual.without_sums()
        else:
            begin()
        for parameter in filled:
            parameter.grad = None
        self._took(filled)
        return finite

    def _learnt(self) -> Usual | None:
        """Return what the first micro-batch of a window has brought, if it was
        usual.
        """
        filled, sums = list(self._held), list(self._held.values())
        dtypes = {*map(DTYPE, sums), *map(DTYPE, filled), *map(gradient_dtype, filled)}
        if (
            set(map(type, sums)) != {Tensor}
            or len(dtypes) > 1
            or any(map(IS_SPARSE, sums))
        ):
            return None
        others = [
            parameter
            for parameter in self._parameters.unique()
            if parameter not in self._held
        ]
        return Usual(
            list(map(id, self._parameters.positions())),
            filled,
            others,
            arithmetic.are_small(sums),
            sums,
        )

    def _require_takeable(self, filled: Sequence[Tensor], size: Size) -> None:
        """Raise unless the gradients of `filled` are a micro-batch of a window of this
        `size`.
        """

    def _add_one_by_one(
        self, filled: Sequence[Tensor], begin: Callable[[], None]
    ) -> None:
        begin()
        for parameter in filled:
            self._absorb(parameter)

    def _took(self, filled: Sequence[Tensor]) -> None:
        """Forget the micro-batch, which was moved out of ``.grad``."""
        self.watch.reset()

    def settle(self) -> list[Tensor]:
        if self._usual is not None and self._usual.packed is not None:
            self._parameters.note_gradients(self._usual.filled)
            return [self._usual.packed]
        # In the order of the parameters, not of arrival: a resumed window must have the
        # same norm to the last bit.
        self._held = {
            parameter: added_up(self._held[parameter])
            for parameter in self._parameters.unique()
            if parameter in self._held
        }
        self._parameters.note_gradients(self._held)
        return list(self._held.values())

    def fits(self, norm: float, divisor: float) -> bool:
        # No element exceeds the norm. So this seldom needs the largest element.
        return all(
            norm / divisor <= torch.finfo(gradient_dtype(parameter)).max
            or arithmetic.fits(
                self._held[parameter], divisor, gradient_dtype(parameter)
            )
            for parameter in self._narrowed()
        )

    def hands_over_whole(self) -> bool:
        return not self._narrowed()

    def undivided(self) -> Undivided:
        return Undivided(
            list(self._held), list(map(version, self._held.values())), [], []
        )

    def hand_over(self, undivided: Undivided, divisor: float, unclipped: float) -> None:
        dtypes, masters = self._narrowed(), self._parameters.masters
        whole = (
            [held for parameter, held in self._held.items() if parameter not in dtypes]
            if dtypes
            else list(self._held.values())
        )
        packed = self._usual and self._usual.packed
        arithmetic.divide(whole if packed is None else [packed], divisor)
        undivided.divided.extend(whole)
        for parameter, held in self._held.items():
            if dtypes and (dtype := dtypes.get(parameter)) is not None:
                # One by one, each frees the sum it came from: the gradients and the
                # sums never live in full at once.
                held = self._held[parameter] = arithmetic.narrowed(held, divisor, dtype)
            masters.get(parameter, parameter).grad = held

    def take_back(self, undivided: Undivided, divisor: float, spoiled: bool) -> None:
        for parameter, noted in zip(
            undivided.parameters, undivided.versions, strict=True
        ):
            held, dtype = (
                self._held[parameter],
                sum_dtype(parameter, self._accumulate_dtype),
            )
            divided = held.dtype != dtype or undivided.is_divided(held, noted)
            self._parameters.worked_on(parameter).grad = None
            self._held[parameter] = held = held.to(dtype)
            if divided:
                arithmetic.multiply([held], divisor)
        self.watch.reset(seen(NOTHING_SEEN, Event.CHANGED) if spoiled else NOTHING_SEEN)

    def sums(self) -> list[Tensor | None]:
        return [self._held.get(parameter) for parameter in self._parameters.positions()]

    def load(self, sums: Sequence[Tensor | None]) -> None:
        self._usual = None
        pairs = zip(self._parameters.positions(), sums, strict=True)
        self._held = {parameter: held for parameter, held in pairs if held is not None}

    def release(self) -> list[Tensor | None]:
        self.take(None, lambda: None)
        return super().release()

    def pickled(self) -> dict[str, Any]:
        return {**super().pickled(), "sums": self.sums()}

    def unpickle(self, pickled: Mapping[str, Any]) -> None:
        self.load(pickled["sums"])
        super().unpickle(pickled)

    def clear(self) -> None:
        usual = self._usual and self._usual.without_sums()
        self._held.clear()
        super().clear()
        self._usual = usual

    def _is_all_in_grad(self, first: bool, flushing: bool) -> bool:
        return first and self.keeps_micro_batch_apart and not flushing

    def _absorb(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        held = self._held.get(parameter)
        if held is None:
            self._held[parameter] = gradient.detach().to(
                sum_dtype(parameter, self._accumulate_dtype)
            )
        elif (total := arithmetic.add(held, gradient)) is not held:
            self._held[parameter] = total
        parameter.grad = None

    def _narrowed(self) -> dict[Tensor, torch.dtype]:
        """Return the parameters that get their gradient in another dtype than that of
        its sum, and this dtype.
        """
        masters = self._parameters.masters
        if self._usual is not None and self._usual.sums and not masters:
            return {}
        own = list(
            map(
                gradient_dtype,
                (
                    [masters.get(parameter, parameter) for parameter in self._held]
                    if masters
                    else self._held
                ),
            )
        )
        return {
            parameter: dtype
            for (parameter, held), dtype in zip(self._held.items(), own, strict=True)
            if held.dtype != dtype
        }


class MovingStrategy(BufferStrategy):
    """The strategy that moves gradients out of ``.grad`` as autograd produces them.

    Small ones, or the last to arrive, stay until `take`, so that a write into ``.grad``
    is noticed; in a window of one micro-batch all.
    """

    expects = True

    def __init__(
        self,
        parameters: Parameters,
        accumulate_dtype: torch.dtype | None,
        drops: bool = False,
    ) -> None:
        self._staying: set[int] = set()
        self._stays: Watched | Literal["small ones"] | None = None
        """The parameter whose gradient stays until a small one arrives in this
        micro-batch, and then the small ones.
        """
        super().__init__(parameters, accumulate_dtype)
        self.watch.allowed = Allowed.NONE

    @property
    def keeps_micro_batch_apart(self) -> bool:  # type: ignore[override]
        """True in a window of one micro-batch."""
        return self.watch.allowed is Allowed.SAME_VALUES

    def expect(self, size: Size) -> None:
        self.watch.allowed = Allowed.SAME_VALUES if size == 1 else Allowed.NONE

    def groups_changed(self) -> None:
        super().groups_changed()
        self._staying.clear()
        self._staying.update(
            id(parameter)
            for group in self._parameters.groups()
            for parameter in _small(group["params"])
        )

    def _require_takeable(self, filled: Sequence[Tensor], size: Size) -> None:
        if self._staying and not self._hooks:
            raise _replaced_error()
        self._stays = None

    def forget_micro_batch(self) -> None:
        self._held.clear()
        self._stays = None
        super().forget_micro_batch()

    def _hook_for(self, parameter: Tensor) -> Hook:
        self._replace_other(parameter)
        _MOVERS[id(parameter)] = self
        watched, alive = self.watch.of(parameter), weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            watched.arrive(parameter)
            living = alive()
            if living is not None and not living.keeps_micro_batch_apart:
                living._move(watched)

        untraced(hook)
        return hook

    def _move(self, arrived: Watched) -> None:
        """Add the arrived gradient to the sum, or the one that stayed before."""
        if (
            self.watch.allowed is Allowed.ALL
            # Nothing need be noticed, and no `take` may come before the next
            # micro-batch arrives.
        ):
            self._absorb(arrived.parameter)
            return arrived.note()
        stayed = moving = self._stays
        if id(arrived.parameter) in self._staying:
            self._stays = "small ones"
        elif stayed == "small ones":
            moving = arrived
        else:
            self._stays = arrived
        if isinstance(moving, Watched) and moving is not self._stays:
            self._absorb(moving.parameter)
            moving.note()

    def _replace_other(self, parameter: Tensor) -> None:
        """Take the gradients over from an older wrapper, which raises at its next
        step.
        """
        other = _MOVERS.get(id(parameter))
        if other is not None and other is not self and parameter in other._hooks:
            other._hooks.keep({})


def _small(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the smallest parameters, up to a 256th of the memory, whose gradients may
    stay in ``.grad``.
    """
    trainable = sorted(filter(can_be_hooked, parameters), key=Tensor.numel)
    budget = sum(map(Tensor.numel, trainable)) // 256
    ends = itertools.accumulate(map(Tensor.numel, trainable))
    fitting = [each for each, end in zip(trainable, ends, strict=True) if end <= budget]
    return fitting or trainable[:1]


def _replaced_error() -> UsageError:
    expected = (
        "one wrapped optimizer per parameter where the sum has another dtype than the"
        " gradient"
    )
    found, fix = (
        "parameters that were wrapped again",
        "Use the optimizer that gradaccum.wrap returned last, and drop this one.",
    )
    return explain(UsageError, "optimizer", expected=expected, found=found, fix=fix)


# Sums apart from ``.grad``, which stays the user's between two steps: to clear, assign,
# reduce or clip, as beside a bare optimizer.
#
# ``step`` copies the micro-batch out of ``.grad``, since somebody else may hold that
# tensor (the bucket of a reducer, a loop that assigned it), and empties ``.grad``.
# Nothing is watched: every change is the user's to make. A flushed window leaves
# ``.grad`` as the user has it.


class SeparateStrategy(BufferStrategy):
    """The sum is in buffers, and ``.grad`` holds the micro-batch when ``step`` is
    called.
    """

    def __init__(
        self,
        parameters: Parameters,
        accumulate_dtype: torch.dtype | None,
        drops: bool = False,
    ) -> None:
        self._users: list[tuple[Tensor, Tensor]] | None = None
        """What is in ``.grad`` beside the window, while the inner optimizer has the
        window's gradient there.
        """
        self._rivals: list[weakref.ref[SeparateStrategy]] = []
        """Those that share one of these parameters. Taking turns does no harm; after
        one backward pass the second finds nothing.
        """
        self._lost: list[Tensor] = []
        """The parameters whose gradients another one took last."""
        super().__init__(parameters, accumulate_dtype, drops)
        self.watch.allowed = Allowed.ALL

    def groups_changed(self) -> None:
        super().groups_changed()
        for other in _ALIVE:
            if other is not self and other._shared(self._parameters.unique()):
                self._rivals.append(weakref.ref(other))
                other._rivals.append(weakref.ref(self))
        _ALIVE.add(self)

    @property
    def begun(self) -> bool:
        """False: autograd may deliver for somebody else until ``step`` takes the
        gradients.
        """
        return False

    def require_whole(self) -> None:
        """Raise unless ``.grad`` is free of what a backward pass that raised had
        delivered.
        """
        gradients = (
            parameter.grad
            for parameter in self._parameters.unique()
            if self.watch.known.under_way
        )
        if any(
            gradient is not None and version(gradient) > 0 for gradient in gradients
        ):
            raise interrupted_error(apart=True)

    def _hook_for(self, parameter: Tensor) -> Hook:
        watch = self.watch

        def hook(parameter: Tensor) -> None:
            known = watch.known
            if not known.under_way:
                if not watch.begin(id(parameter)):
                    keep_own(parameter)
                if known.arrived:
                    watch.expect_passes(parameter)

        untraced(hook)
        return hook

    def _require_takeable(self, filled: Sequence[Tensor], size: Size) -> None:
        if (
            self._lost
            and not self.watch.known.arrived
            and any(parameter.grad is None for parameter in self._lost)
        ):
            raise _taken_error()
        for parameter in filled:
            gradient = parameter.grad
            if gradient is not None and gradient.requires_grad:
                if self.watch.known.arrived:
                    raise _graph_error()
                # `torch.func.grad` by parameters has a graph that nobody asked for.
                parameter.grad = gradient.detach()
        if size != 1 and filled and hasattr(filled[0], "summed_grad"):
            raise _noise_error()

    def _add_one_by_one(
        self, filled: Sequence[Tensor], begin: Callable[[], None]
    ) -> None:
        # A gradient without a sum is copied, since somebody else may hold it. Memory
        # may run out here, before anything was added.
        new = {
            each: (
                each.grad.detach().to(
                    sum_dtype(each, self._accumulate_dtype), copy=True
                )
            )
            for each in filled
            if each not in self._held and each.grad is not None
        }
        super()._add_one_by_one([each for each in filled if each in self._held], begin)
        self._held.update(new)

    def _took(self, filled: Sequence[Tensor]) -> None:
        if self._rivals:
            self._lost.clear()
        for (
            reference
        ) in self._rivals:  # They find nothing in ``.grad`` of these parameters.
            if (other := reference()) is not None and (lost := other._shared(filled)):
                other.pack()  # Its `take` then looks at what is lost.
                other._lost[:], other.watch.known = lost, NOTHING_SEEN

    def hand_over(self, undivided: Undivided, divisor: float, unclipped: float) -> None:
        if self._users is None:
            self._users = [
                (parameter, parameter.grad)
                for parameter in self._parameters.unique()
                if parameter.grad is not None
            ]
            self._parameters.free_gradients()
        super().hand_over(undivided, divisor, unclipped)

    def take_back(self, undivided: Undivided, divisor: float, spoiled: bool) -> None:
        super().take_back(undivided, divisor, spoiled)
        self._give_users_back()

    def window_ended(self) -> None:
        self._usual = self._usual and self._usual.without_sums()
        self._held.clear()
        self.watch.window_ended()
        if self._users is not None:
            self._parameters.free_gradients()
            self._give_users_back()

    def clear(self) -> None:
        self._users = None
        self._lost.clear()
        super().clear()

    def _shared(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        own = set(map(id, self._parameters.unique()))
        return [parameter for parameter in parameters if id(parameter) in own]

    def _give_users_back(self) -> None:
        for parameter, gradient in self._users or ():
            parameter.grad = gradient
        self._users = None


_ALIVE: WeakSet[SeparateStrategy] = WeakSet()


def _graph_error() -> UsageError:
    expected, found = (
        "gradients without a graph",
        "a .grad that can be differentiated again, after backward(create_graph=True)",
    )
    fix = (
        "Leave create_graph=True out; for an optimizer that needs it, such as"
        " AdaHessian, leave separate_sums=True out."
    )
    return explain(UsageError, "separate_sums", expected=expected, found=found, fix=fix)


def _noise_error() -> UsageError:
    """Return the error for Opacus' optimizer, which adds noise before it calls
    ``step``.
    """
    found = (
        "a longer window of micro-batches, to each of which Opacus has added the noise"
        " of a whole batch"
    )
    fix = (
        "Take opacus.utils.batch_memory_manager.BatchMemoryManager in place of"
        " gradaccum.wrap: it adds noise once per batch."
    )
    return explain(
        UsageError,
        "make_private",
        expected="an optimizer that is not wrapped, or with steps=1",
        found=found,
        fix=fix,
    )


def _taken_error() -> UsageError:
    expected = (
        "a backward pass since the step() of another wrapped optimizer of these"
        " parameters, which took their gradients"
    )
    found, fix = (
        "two calls of step() after one",
        (
            "Give each optimizer parameters of its own, or call backward() before each"
            " step()."
        ),
    )
    return explain(UsageError, "separate_sums", expected=expected, found=found, fix=fix)
