"""The model's parameters and the tensors that the inner optimizer works on: the same
ones, or float32 masters of half-precision parameters.

The inner optimizer's groups hold masters only while its ``step`` runs; after each
update the model gets the rounded copy. The next update takes over, element by element,
what something else wrote into a parameter: values are compared, as torch does not count
writes through ``parameter.data``.
"""

from __future__ import annotations

import math
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaccum import ArgumentValueError
from gradaccum.kit import explain
from gradaccum_torch.private.names import (
    foreach_copy_,
    foreach_norm,
    foreach_sub_,
    is_sharded,
    local,
    untraced,
    version,
)
from gradaccum_torch.sums.arithmetic import HALF

Group = dict[str, Any]
"""A parameter group of a `torch.optim.Optimizer`: its ``"params"``, a list of tensors,
and its options.
"""

_MASTERS: WeakKeyDictionary[torch.optim.Optimizer, dict[Tensor, Tensor]] = (
    WeakKeyDictionary()
)
"""The masters by the model's parameter, of each inner optimizer that has some: it may
be wrapped again.
"""

_NO_SWAP = nullcontext()
_PARAMS = itemgetter("params")


class Parameters:
    """The parameters of a wrapped optimizer, by group and by position."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        master_weights: bool,
        masters: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._inner, self._wanted = inner, master_weights
        if _MASTERS.get(inner) and not master_weights:
            raise _has_masters_error()
        self.masters = _MASTERS.setdefault(inner, {}) if master_weights else {}
        """The masters by their half-precision parameter."""
        self._models = {master: parameter for parameter, master in self.masters.items()}
        for index, master in (masters or {}).items():
            self._pair(self.positions()[index], master)
        self.had_gradients: list[Tensor] = []
        """The parameters that have a gradient as their window ends."""
        self.groups_changed()

    def groups(self) -> list[Group]:
        return [
            {**group, "params": [self._models.get(own, own) for own in group["params"]]}
            for group in self._inner.param_groups
        ]

    def positions(self) -> list[Tensor]:
        own = list(chain.from_iterable(map(_PARAMS, self._inner.param_groups)))
        return (
            [self._models.get(tensor, tensor) for tensor in own]
            if self._models
            else own
        )

    def unique(self) -> list[Tensor]:
        seen = self.positions()
        # By id(): the same identity as hash(tensor), ten times faster.
        return (
            seen
            if len(set(map(id, seen))) == len(seen)
            else list({id(each): each for each in seen}.values())
        )

    def device(self) -> torch.device:
        return next(
            (parameter.device for parameter in self.positions()), torch.device("cpu")
        )

    def worked_on(self, parameter: Tensor) -> Tensor:
        """Return the parameter's master, or the parameter itself."""
        return self.masters.get(parameter, parameter)

    def masters_by_position(self) -> dict[int, Tensor]:
        return {
            index: self.masters[parameter]
            for index, parameter in enumerate(self.positions())
            if parameter in self.masters
        }

    def masters_in_place(self) -> AbstractContextManager[None]:
        return (
            self._swapped() if self.masters and not self._are_in_place() else _NO_SWAP
        )

    def _are_in_place(self) -> bool:
        return any(
            own in self._models
            for group in self._inner.param_groups
            for own in group["params"]
        )

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        try:
            self._put(self.masters)
            yield
        finally:
            through(lambda: self._put(self._models))

    @torch.no_grad()
    def round(self) -> None:
        if self.masters:
            # torch copies many sharded tensors at a time by their parts only.
            foreach_copy_(
                list(map(local, self.masters)), list(map(local, self.masters.values()))
            )

    def strayed(self) -> tuple[Tensor, ...]:
        """Return whether the model differs from the rounded masters: a bool, shape
        ``()``; nothing without masters.
        """
        found = apart(list(self.masters.items())) if self.masters else None
        return () if found is None else (found,)

    def may_have_strayed(self) -> bool:
        """True if the model may differ from the rounded masters; on an accelerator
        always, without a wait.
        """
        if not self.masters:
            return False
        return any(self.strayed()) if self.device().type == "cpu" else True

    @torch.no_grad()
    def take_over(self) -> None:
        for parameter, master in self.masters.items():
            master.copy_(
                torch.where(master.to(parameter.dtype) == parameter, master, parameter)
            )

    @contextmanager
    def published(self) -> Iterator[None]:
        """Let a method of the inner optimizer work on the masters inside the block,
        then round them.
        """
        # In the midst of an update the masters are ahead of the model.
        if not self._are_in_place() and any(self.strayed()):
            self.take_over()
        try:
            with self.masters_in_place():
                yield
        finally:
            # Autograd refuses a graph that has saved a parameter which was written
            # since, even if the value stayed.
            if any(self.strayed()):
                self.round()

    @torch.no_grad()
    def load(self, masters: Mapping[int, Tensor]) -> None:
        """Load the masters by position; the model's values still win where they
        differ.
        """
        for index, parameter in enumerate(self.positions()):
            if index in masters:
                self.masters[parameter].copy_(masters[index])

    def zero_grad(self, set_to_none: bool) -> None:
        if (
            set_to_none
            and getattr(self._inner.zero_grad, "__func__", None)
            is torch.optim.Optimizer.zero_grad
        ):
            # torch's own takes longer over gradients that the window's end has freed
            # than over others.
            return self.free_gradients()
        self._inner.zero_grad(set_to_none)
        if not set_to_none:
            self._zero_those_freed()

    @contextmanager
    def only(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        every, own = dict(self.masters), set(map(id, parameters))
        try:
            for parameter in every:
                if id(parameter) not in own:
                    del self.masters[parameter]
            yield
        finally:
            self.masters.clear()
            self.masters.update(every)

    def free_gradients(self) -> None:
        for tensor in (
            (*self.positions(), *self.masters.values())
            if self.masters
            else self.positions()
        ):
            tensor.grad = None

    def note_gradients(self, parameters: Iterable[Tensor]) -> None:
        self.had_gradients = list(parameters)

    def _zero_those_freed(self) -> None:
        """Leave zeros, so that momentum and weight decay still move the parameters."""
        known = set(map(id, self.positions()))
        for parameter in self.had_gradients:
            if parameter.grad is None and id(parameter) in known:
                parameter.grad = torch.zeros_like(
                    parameter, dtype=getattr(parameter, "grad_dtype", None)
                )

    def groups_changed(self) -> None:
        """Make missing masters, and forget those of parameters that were replaced or
        cast.
        """
        half = (
            [parameter for parameter in self.positions() if parameter.dtype in HALF]
            if self._wanted
            else []
        )
        for parameter in set(self.masters).difference(half):
            del self._models[self.masters.pop(parameter)]
        self.sample = ParameterSample(self.positions())
        for parameter in half:
            if parameter not in self.masters:
                self._pair(
                    parameter,
                    torch.nn.Parameter(
                        parameter.detach().float(),
                        requires_grad=parameter.requires_grad,
                    ),
                )
                self._widen_state(parameter)

    def _pair(self, parameter: Tensor, master: Tensor) -> None:
        self.masters[parameter], self._models[master] = master, parameter

    def _put(self, others: Mapping[Tensor, Tensor]) -> None:
        """Replace parameters in the list itself, which an optimizer may keep."""
        for group in self._inner.param_groups:
            group["params"][:] = [others.get(own, own) for own in group["params"]]
        state: MutableMapping[Tensor, Any] = self._inner.state
        for own, other in others.items() if state else ():
            if own in state:
                state[other] = state.pop(own)

    def _widen_state(self, parameter: Tensor) -> None:
        if parameter in self._inner.state:
            state = self._inner.state[parameter]
            half = {
                name: value
                for name, value in state.items()
                if isinstance(value, Tensor) and value.dtype in HALF
            }
            self._inner.state[parameter] = {
                **state,
                **{name: value.float() for name, value in half.items()},
            }


# A look at a few parameters as a window begins and as it ends: has something written
# other values into them?
#
# A version tells that something wrote. What writes the values that were there, as a
# loop does that validates with averaged weights and puts its own back, changes nothing.


NUMBERS = 4
"""How many of a parameter are looked at."""
_ROUNDINGS = 16
"""Averages that are taken in and out again round a few times."""


class ParameterSample:
    """A few numbers of a few parameters, as they are now and as they were noted."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = _sampled(parameters)
        self._look()

    def _look(self) -> None:
        self._locals = list(map(local, self._parameters))
        self._pointers = list(map(Tensor.data_ptr, self._locals))
        self._parts = list(map(_middle_of, self._locals))
        self.forget()

    def forget(self) -> None:
        self._versions: list[int] = []
        self._noted: list[Tensor] = []

    def note(self) -> None:
        """Note the numbers, without a wait for the device."""
        # A parameter that is moved to another device has other memory.
        if list(map(Tensor.data_ptr, self._locals)) != self._pointers:
            self._look()
        self._versions = list(map(version, self._parts))
        self._noted = list(map(torch.clone, self._parts))

    def is_changed(self) -> bool:
        """True if at least two of the parameters hold other numbers than were noted, or
        the only one does; waits for the device if something wrote.

        An embedding with ``max_norm=`` changes itself, alone.
        """
        if not self._noted or list(map(version, self._parts)) == self._versions:
            return False
        pairs = zip(self._noted, self._parts, strict=True)
        changed = sum(_are_apart(before, now) for before, now in pairs)
        return changed >= min(2, len(self._parts))


untraced(ParameterSample.note)
untraced(ParameterSample.is_changed)


def _middle_of(tensor: Tensor) -> Tensor:
    numbers = tensor.detach().view(-1)
    start = numbers.numel() // 2
    return numbers[start : start + NUMBERS]


def _are_apart(noted: Tensor, part: Tensor) -> bool:
    before, now = noted.tolist(), part.tolist()
    if now == [min(max(number, min(now)), max(now)) for number in before]:
        return False  # A clamp, as a loop makes that repeats it with each step.
    size = max(map(abs, (*before, *now)))
    room = _ROUNDINGS * torch.finfo(part.dtype).eps * size
    return any(not abs(a - b) <= room for a, b in zip(before, now, strict=True))


def _sampled(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the first of `parameters` that can be looked at, the last and one between;
    weights rather than biases.
    """
    usable = [each for each in parameters if _is_readable(each)]
    usable = [each for each in usable if each.ndim > 1] or usable
    places = sorted({0, len(usable) // 2, len(usable) - 1}) if usable else []
    return [usable[place] for place in places]


def _is_readable(parameter: Tensor) -> bool:
    return (
        (type(parameter) in (Tensor, torch.nn.Parameter) or is_sharded(parameter))
        and parameter.layout is torch.strided
        and parameter.is_floating_point()
        and parameter.is_contiguous()
        and local(parameter).numel() > 0
    )


def through(action: Callable[[], None]) -> None:
    """Run `action`, which can be run twice; raise an interrupt only when it has run
    whole.
    """
    try:
        action()
    except BaseException:
        action()
        raise


def _has_masters_error() -> ArgumentValueError:
    fix = (
        "Write master_weights=True, or wrap a new optimizer over the model's"
        " parameters."
    )
    return explain(
        ArgumentValueError,
        "master_weights",
        expected="True for an optimizer that has masters already",
        got=False,
        fix=fix,
    )


# Comparison of half-precision tensors with the rounded values of float32 ones, in one
# pass over both.
#
# A CPU compares the bits: it has no vector instruction that compares half-precision
# numbers, so that would take twice the time. On an accelerator the launch of a kernel
# takes the time: there one call subtracts many tensors, no more than keep the rounded
# copies small.


CHUNK = 2**25
"""Elements that are rounded at a time."""

Pair = tuple[Tensor, Tensor]
"""A half-precision tensor and the float32 tensor that it should be the rounded copy of.
"""


@torch.no_grad()
def apart(pairs: Sequence[Pair]) -> Tensor | None:
    """Return whether a tensor differs from its rounded master or both are not finite: a
    bool, shape ``()``; None without elements.
    """
    parts = [
        (half, wide)
        for half, wide in ((local(half), local(wide)) for half, wide in pairs)
        if half.numel()
    ]
    if not parts:
        return None
    if all(half.is_cpu for half, _ in parts):
        found = [bits_apart(half, wide) for half, wide in parts]
    else:
        found = [
            difference for chunk in _chunks(parts) for difference in differences(chunk)
        ]
    return torch.stack([each.to(found[0].device) for each in found]).any()


def bits_apart(half: Tensor, wide: Tensor) -> Tensor:
    """Return a tensor that is not 0 where a bit differs, shape ``()``."""
    bits = wide.to(half.dtype, copy=True).view(torch.int16)
    lowest, highest = bits.bitwise_xor_(half.view(torch.int16)).aminmax()
    return lowest | highest


def differences(pairs: Sequence[Pair]) -> Sequence[Tensor]:
    """Return the largest difference within each pair, shape ``()``: not 0, or NaN,
    where a number differs.
    """
    rounded = [torch.empty_like(half) for half, _ in pairs]
    foreach_copy_(rounded, [wide for _, wide in pairs])
    foreach_sub_(rounded, [half for half, _ in pairs])
    return foreach_norm(rounded, math.inf)


def _chunks(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    first, elements = 0, 0
    for index, (half, _) in enumerate(pairs):
        elements += half.numel()
        if elements >= CHUNK or index == len(pairs) - 1:
            yield pairs[first : index + 1]
            first, elements = index + 1, 0
