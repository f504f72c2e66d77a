"""How long a window is: so many micro-batches, or until a weight is reached; a constant, pairs, a function, or the caller's decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

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

_EXPECTED = "an int >= 1, pairs (first optimizer_step, steps), a callable of optimizer_step, until_weight(...), or None"


def until_weight(weight: object) -> UntilWeight:
    """``steps=until_weight(524_288)``: a window ends with the micro-batch by which its weight, in items or tokens, reaches that number.

    The micro-batches' weights are those that the optimizer is given with them, 1 each if none is given. A window may so hold more than the
    number, by less than its last micro-batch; its gradient is divided by what it holds.

    Args:
        weight: an int >= 1; or, as for ``steps``, pairs ``(first optimizer_step, weight)`` or a callable of the optimizer step.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none of these.

    Examples:
        >>> until_weight(524_288)
        until_weight(524288)
    """
    sizes = weight if isinstance(weight, UntilWeight) or weight is None else make_schedule(weight)
    if sizes is None or isinstance(sizes, UntilWeight):
        expected, fix = "an int >= 1, pairs (first optimizer_step, weight) or a callable of optimizer_step", "Write until_weight(524_288)."
        raise explain(ArgumentTypeError, "weight", expected=expected, got=weight, fix=fix)
    return UntilWeight(sizes)


def is_known(schedule: Schedule) -> bool:
    """Whether the sizes can be known without calling anything."""
    return not callable(schedule.weight if isinstance(schedule, UntilWeight) else schedule)


def make_schedule(steps: object) -> Schedule:
    """The checked form of the user's ``steps=``.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none of the five forms.
    """
    if steps is None or isinstance(steps, UntilWeight):
        return steps
    if callable(steps):
        return cast(Callable[[Scalar], Scalar], steps)
    # A framework's scalar, such as jnp.int32(4), can be iterated over by its type, but not by its value.
    if isinstance(steps, Iterable) and not isinstance(steps, (str, bytes)) and getattr(steps, "shape", None) != ():
        return _make_pairs(steps)
    if isinstance(steps, bool) or not hasattr(steps, "__index__"):
        raise explain(ArgumentTypeError, "steps", expected=_EXPECTED, got=steps, fix="Write for example steps=4.")
    return require_int("steps", steps, at_least=1)


def require_steps(steps: object, optimizer_step: int) -> int | UntilWeight:
    """The answer of a callable ``steps`` for `optimizer_step`, as an int >= 1. An `UntilWeight` of such an answer comes back as one.

    Each backend asks this wherever the value is known: when it wraps, for step 0, and for each window outside compiled code. Compiled
    code cannot raise: there a size below 1 makes each micro-batch one that is not finite, so that no update is made and the result says so.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none.
    """
    if isinstance(steps, UntilWeight):
        argument, fix = f"until_weight(...)({optimizer_step})", "Return the weight of that window, in whole items."
        return UntilWeight(require_int(argument, steps.weight, at_least=1, fix=fix))
    argument, fix = f"steps({optimizer_step})", "Return the number of micro-batches of that window."
    return require_int(argument, steps, at_least=1, fix=fix)


def _make_pairs(steps: Iterable[object]) -> tuple[tuple[int, int], ...]:
    pairs = []
    for pair in steps:
        if not isinstance(pair, Iterable) or len(values := tuple(pair)) != 2:
            raise explain(ArgumentTypeError, "steps", expected=_EXPECTED, got=pair, fix="Write steps=[(0, 4), (1000, 8)].")
        pairs.append((require_int("steps (first optimizer_step)", values[0], at_least=0), require_int("steps", values[1], at_least=1)))
    starts = [first for first, _ in pairs]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise explain(
            ArgumentValueError,
            "steps",
            expected="pairs that begin at optimizer_step 0 and go up",
            got=pairs,
            fix="Write steps=[(0, 4), (1000, 8)].",
        )
    return tuple(pairs)
