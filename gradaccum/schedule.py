"""How long a window is: so many micro-batches, or until a weight is reached; a constant, pairs, a function, or the caller's decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

from gradaccum._validation import require_int
from gradaccum.errors import ArgumentTypeError, ArgumentValueError, explain
from gradaccum.state import Scalar

Sizes = int | tuple[tuple[int, int], ...] | Callable[[Scalar], Scalar]
"""A size for each optimizer step: a constant, pairs, or a function."""


@dataclass(frozen=True)
class UntilWeight:
    """A window that ends when its weight reaches `weight`; see `until_weight`."""

    weight: Sizes

    def __repr__(self) -> str:
        return f"until_weight({self.weight!r})"


Schedule = Sizes | UntilWeight | None
"""`steps` as the options hold it."""
_LARGEST = 2**31 - 1
"""Compiled states and checkpoints hold a size as an int32."""


class _Argument(NamedTuple):
    """What an argument that holds sizes is called, and how it is written."""

    name: str
    expected: str
    fix: str
    fix_pairs: str


_STEPS = _Argument(
    "steps",
    "an int >= 1, pairs (first optimizer_step, steps), a callable of optimizer_step, until_weight(...), or None",
    "Write for example steps=4.",
    "Write steps=[(0, 4), (1000, 8)].",
)
_WEIGHT = _Argument(
    "weight",
    "an int >= 1, pairs (first optimizer_step, weight) or a callable of optimizer_step",
    "Write steps=until_weight(524_288).",
    "Write steps=until_weight([(0, 65_536), (1000, 524_288)]).",
)


def until_weight(weight: object) -> UntilWeight:
    """``steps=until_weight(524_288)``: a window ends with the micro-batch by which its weight, in items or tokens, reaches that number.

    The micro-batches' weights are those that the optimizer is given with them, 1 each if none is given. A window may so hold more than the
    number, by less than its last micro-batch; its gradient is divided by what it holds. The weight of a window is a float32 (a float64
    beside float64 sums): beyond 2^24 it counts in steps of 2, 4, ..., and loses a micro-batch that is lighter than half a step.

    Args:
        weight: an int >= 1 and < 2^31; or, as for ``steps``, pairs ``(first optimizer_step, weight)`` or a callable of the optimizer step.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none of these.

    Examples:
        >>> until_weight(524_288)
        until_weight(524288)
    """
    return UntilWeight(_make_sizes(weight, _WEIGHT))


def is_known(schedule: Schedule) -> bool:
    """Whether the sizes can be known without calling anything."""
    return not callable(schedule.weight if isinstance(schedule, UntilWeight) else schedule)


def make_schedule(steps: object) -> Schedule:
    """The checked form of the user's ``steps=``.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none of the five forms.
    """
    return steps if steps is None or isinstance(steps, UntilWeight) else _make_sizes(steps, _STEPS)


def require_steps(size: object, optimizer_step: int, schedule: Schedule) -> int | UntilWeight:
    """What a callable gave for `optimizer_step`, as an int >= 1 and < 2^31, or an `UntilWeight` of one.

    Each backend asks this wherever the value is known: when it wraps, for step 0, and for each window outside compiled code. Compiled
    code cannot raise: there a size below 1 makes each micro-batch one that is not finite, so that no update is made and the result says so.

    Args:
        size: as `gradaccum.kit.steps_at` gives it.
        optimizer_step: updates before the window.
        schedule: the one that was asked. Only an `UntilWeight` may give one: a backend looks at the schedule for what ends a window.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none.
    """
    if isinstance(schedule, UntilWeight):
        argument, fix = f"until_weight(...)({optimizer_step})", "Return the weight of that window, in whole items."
        return UntilWeight(_require_size(argument, cast(UntilWeight, size).weight, fix))
    fix = "Return the number of micro-batches of that window."
    if isinstance(size, UntilWeight):
        fix = "Return the weight alone, and write steps=until_weight(...) of the callable."
    return _require_size(f"steps({optimizer_step})", size, fix)


def _make_sizes(sizes: object, argument: _Argument) -> Sizes:
    """The checked form of a number, pairs or a callable."""
    if callable(sizes):
        return cast(Callable[[Scalar], Scalar], sizes)
    # A framework's scalar, such as jnp.int32(4), can be iterated over by its type, but not by its value.
    if isinstance(sizes, Iterable) and not isinstance(sizes, (str, bytes)) and getattr(sizes, "shape", None) != ():
        return _make_pairs(sizes, argument)
    if isinstance(sizes, bool) or not hasattr(sizes, "__index__"):
        raise explain(ArgumentTypeError, argument.name, expected=argument.expected, got=sizes, fix=argument.fix)
    return _require_size(argument.name, sizes, argument.fix)


def _require_size(argument: str, size: object, fix: str) -> int:
    number = require_int(argument, size, at_least=1, fix=fix)
    if number > _LARGEST:
        fix = "Count in larger units: give each micro-batch's weight in thousands of tokens, for example."
        raise explain(ArgumentValueError, argument, expected=f"an int <= {_LARGEST}", got=size, fix=fix)
    return number


def _make_pairs(sizes: Iterable[object], argument: _Argument) -> tuple[tuple[int, int], ...]:
    name, fix, pairs = argument.name, argument.fix_pairs, []
    for pair in sizes:
        if not isinstance(pair, Iterable) or len(values := tuple(pair)) != 2:
            raise explain(ArgumentTypeError, name, expected=argument.expected, got=pair, fix=fix)
        first = require_int(f"{name} (first optimizer_step)", values[0], at_least=0, fix=fix)
        by_weight = isinstance(values[1], UntilWeight)
        pairs.append((first, _require_size(name, values[1], _WEIGHT.fix_pairs if by_weight else fix)))
    starts = [first for first, _ in pairs]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise explain(ArgumentValueError, name, expected="pairs that begin at optimizer_step 0 and go up", got=pairs, fix=fix)
    return tuple(pairs)
