"""How many micro-batches a window holds: a constant, pairs, a function of the optimizer step, or the caller's decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import cast

from gradaccum._validation import require_int
from gradaccum.errors import ArgumentTypeError, ArgumentValueError, explain
from gradaccum.state import Scalar

Schedule = int | tuple[tuple[int, int], ...] | Callable[[Scalar], Scalar] | None
"""`steps` as the options hold it."""

_EXPECTED = "an int >= 1, pairs (first optimizer_step, steps), a callable of optimizer_step, or None"


def make_schedule(steps: object) -> Schedule:
    """The checked form of the user's ``steps=``.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none of the four forms.
    """
    if steps is None:
        return None
    if callable(steps):
        return cast(Callable[[Scalar], Scalar], steps)
    # A framework's scalar, such as jnp.int32(4), can be iterated over by its type, but not by its value.
    if isinstance(steps, Iterable) and not isinstance(steps, (str, bytes)) and getattr(steps, "shape", None) != ():
        return _make_pairs(steps)
    if isinstance(steps, bool) or not hasattr(steps, "__index__"):
        raise explain(ArgumentTypeError, "steps", expected=_EXPECTED, got=steps, fix="Write for example steps=4.")
    return require_int("steps", steps, at_least=1)


def require_steps(steps: object, optimizer_step: int) -> int:
    """The answer of a callable ``steps`` for `optimizer_step`, as an int >= 1.

    Each backend asks this wherever the value is known: when it wraps, for step 0, and for each window outside compiled code. Compiled
    code cannot raise: there a size below 1 makes each micro-batch one that is not finite, so that no update is made and the result says so.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none.
    """
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
