"""Windows taken from a loader, with totals that are known before the first forward pass.

A loss with one denominator needs none of this: give each micro-batch its weight. A loss of several terms, each divided by its own total
(tokens, sequences, masked tokens), has no weight that fits all of them. So each term is divided by the window's total of it, which must be
known before the first forward pass, and the window is summed with ``reduction="sum"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradaccum._validation import require_int
from gradaccum.errors import ArgumentTypeError, ArgumentValueError, explain
from gradaccum.schedule import Schedule, UntilWeight, make_schedule
from gradaccum.window_counts import Count, Counts, M, Reduce
from gradaccum.window_reading import Windows


def windows(
    loader: Iterable[M],
    steps: object,
    count: Mapping[str, Count[M]] | None = None,
    weight: str | Count[M] | None = None,
    reduce: Reduce | None = None,
    *,
    start: int = 0,
) -> Windows[M]:
    """Read the micro-batches of a loader window by window, with totals that are known before the first forward pass.

    ``for window in windows(loader, 4, count={"tokens": f})``: `window` is iterable over its micro-batches, has `len` and
    ``window.totals["tokens"]``; the short last one too. Wrap the optimizer with ``steps=None``, and ``flush`` after each window. One window
    is held in memory, and nothing of it after the next is asked for.

    Args:
        loader: yields the micro-batches, of any type, each in memory of its own: a window is read before it is used, so a loader that fills
            one buffer again and again must yield copies. An error of it passes through; the next ``next`` of the same iterator goes on.
        steps: micro-batches per window, as for `gradaccum.wrap`: an int >= 1, pairs ``(first number, steps)`` or a callable of the window's
            number, 0, 1, ...; that is `optimizer_step` only while no window was skipped. ``until_weight(n)``: a window ends with
            the micro-batch by which its weight reaches n.
        count: functions of a micro-batch by name; each returns a finite number >= 0, or a framework's scalar. A scalar on a device makes
            the loop wait for it: count before the micro-batch is sent there.
        weight: with ``until_weight``: the name of a count, or a function as in `count`.
        reduce: with several workers: a function of a list of floats that returns the list summed over all of them, best in float64: float32
            holds whole numbers up to 2^24. It is called once per window, and once more at the end; with ``until_weight`` once per
            micro-batch. Totals are then those of all workers, and so is the weight. Every worker must go through every window: one
            whose loader ends early gets windows of `len` 0 until all have ended.
        start: the number of the first window, for a schedule that goes on after a resume. A second ``for`` over the same object goes on as
            well.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is not as above, at once or, for what functions return, when it is read.

    Examples:
        >>> lengths = [[5, 3], [2], [7, 1, 4], [6]]  # of the sequences of four micro-batches
        >>> for window in windows(lengths, 3, count={"tokens": sum, "sequences": len}):
        ...     print(len(window), dict(window.totals))
        3 {'tokens': 22.0, 'sequences': 6.0}
        1 {'tokens': 6.0, 'sequences': 1.0}
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise explain(ArgumentTypeError, "loader", expected="an iterable over micro-batches", got=loader, fix="Hand in the loader itself.")
    schedule = make_schedule(steps)
    if schedule is None:
        expected, fix = "the size of a window", "Write for example steps=4, or steps=gradaccum.until_weight(4096) with weight=."
        raise explain(ArgumentTypeError, "steps", expected=expected, got=steps, fix=fix)
    _require_fitting(schedule, weight)
    if reduce is not None and not callable(reduce):
        fix = "Write for torch: def reduce(values): all_reduce a float64 tensor of them, and return its tolist()."
        raise explain(ArgumentTypeError, "reduce", expected="a function of a list of floats", got=reduce, fix=fix)
    return Windows(loader, schedule, Counts(count, weight), reduce, require_int("start", start, at_least=0))


def _require_fitting(schedule: Schedule, weight: object) -> None:
    """A weight where windows end by it, and none where nothing would read it."""
    ends_by_weight = isinstance(schedule, UntilWeight)
    if ends_by_weight == (weight is not None):
        return
    if ends_by_weight:
        expected, fix = "the name of a count or a function of a micro-batch", 'Write weight="tokens" with count={"tokens": ...}.'
        raise explain(ArgumentTypeError, "weight", expected=expected, got=weight, fix=fix)
    expected, fix = "None where windows end by their number of micro-batches", "Leave it out, or write steps=gradaccum.until_weight(4096)."
    raise explain(ArgumentValueError, "weight", expected=expected, got=weight, fix=fix)
