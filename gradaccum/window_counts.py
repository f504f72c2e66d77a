"""What is counted of micro-batches before any of them is run: the functions that count, their values, and the sum over several workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, SupportsFloat, TypeVar, cast

from gradaccum._validation import require_number
from gradaccum.errors import ArgumentTypeError, ArgumentValueError, GradAccumError, explain

M = TypeVar("M")
Count = Callable[[M], SupportsFloat]
"""How many of something a micro-batch has; a Python number or a framework's scalar."""
Reduce = Callable[[list[float]], Iterable[SupportsFloat]]
"""The list of one worker in, the list summed over all workers out."""

_EXAMPLE = 'Write count={"tokens": lambda batch: batch.mask.sum()}.'
_ROUNDING = 1e-5
"""A reduction may round as float32 does. A mean over workers is farther off, unless all have the same."""


class Counts(Generic[M]):
    """The functions of ``count=`` and ``weight=``, checked, and their values of a micro-batch.

    Values come as a list: 1 for the micro-batch itself, then each count, then the weight if it is a function of its own.

    Args:
        count: functions of a micro-batch, by name.
        weight: the name of one of them, or a function of its own; None: nothing is weighed.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is not as above.
    """

    def __init__(self, count: Mapping[str, Count[M]] | None, weight: str | Count[M] | None) -> None:
        if not isinstance(count, Mapping | None):
            raise explain(ArgumentTypeError, "count", expected="a mapping of names to functions of a micro-batch", got=count, fix=_EXAMPLE)
        self._functions = {_named(name): _callable(_named(name), function) for name, function in (count or {}).items()}
        self._names = tuple(count or {})
        self._weight = self._place_of(weight)

    def _place_of(self, weight: str | Count[M] | None) -> int | None:
        """Where the weight stands among the values."""
        if isinstance(weight, str) and weight not in self._names:
            raise _weight_error(ArgumentValueError, self._names, weight)
        if weight is None or isinstance(weight, str):
            return None if weight is None else 1 + self._names.index(weight)
        if not callable(weight):
            raise _weight_error(ArgumentTypeError, self._names, weight)
        self._functions["weight"] = weight
        return len(self._functions)

    def zeros(self) -> list[float]:
        """The values where there is no micro-batch."""
        return [0.0] * (1 + len(self._functions))

    def of(self, micro_batch: M, place: str) -> list[float]:
        """The values of a micro-batch.

        Raises:
            ArgumentTypeError, ArgumentValueError: a count is no finite number >= 0.
            Exception: whatever a function raises, with a note of its name and of the micro-batch's `place`.
        """
        values = [1.0]
        for name, function in self._functions.items():
            try:
                fix = "Return how many of them the micro-batch has."
                values.append(require_number(name, function(micro_batch), above=0, or_equal=True, fix=fix))
            except Exception as error:
                error.add_note(f"{name} was asked about {place}. The micro-batch is kept: the next call asks about it again.")
                raise
        return values

    def totals(self, values: list[float]) -> dict[str, float]:
        """Values by name."""
        return dict(zip(self._names, values[1:], strict=False))

    def weight(self, values: list[float]) -> float:
        """The value that a window ends by; only if a weight was given."""
        return values[cast(int, self._weight)]


def summed(reduce: Reduce, values: list[float]) -> list[float]:
    """`values` over all workers.

    Raises:
        ArgumentTypeError: `reduce` gave no numbers.
        ArgumentValueError: it gave another number of them, or less than this worker's own.
    """
    fix = "Return the sums over all workers, in the same order, as floats."
    given = reduce(list(values))
    try:
        result = [float(value) for value in given]
    except (TypeError, ValueError):
        expected = f"a function that returns {len(values)} numbers"
        raise explain(ArgumentTypeError, "reduce", expected=expected, got=given, fix=fix) from None
    below = any(not all_of_them >= own * (1 - _ROUNDING) for own, all_of_them in zip(values, result, strict=False))
    if len(result) != len(values) or below or max(result) == float("inf"):
        expected = f"a function that returns {len(values)} finite numbers, none below this worker's own {values}"
        raise explain(ArgumentValueError, "reduce", expected=expected, got=result, fix=fix)
    return result


def _named(name: object) -> str:
    if not isinstance(name, str):
        raise explain(ArgumentTypeError, "count", expected="names as keys", got=name, fix=_EXAMPLE)
    return f'count["{name}"]'


def _callable(name: str, function: Count[M]) -> Count[M]:
    if not callable(function):
        raise explain(ArgumentTypeError, name, expected="a function of a micro-batch", got=function, fix=_EXAMPLE)
    return function


def _weight_error(kind: type[GradAccumError], names: tuple[str, ...], got: object) -> GradAccumError:
    names_of = ", ".join(map(repr, names)) or "there is none"
    fix = 'Write weight="tokens" with count={"tokens": ...}, or weight=lambda batch: ...'
    return explain(kind, "weight", expected=f"the name of a count ({names_of}) or a function of a micro-batch", got=got, fix=fix)
