"""Linearity of a loss in its scale, grad(s x loss) = s x grad(loss), which loss scaling
relies on.

A custom backward that ignores its incoming gradient breaks this silently. An adapter
differentiates at several scales.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeVar

SCALES = tuple(2.0**power for power in range(17))
"""2^0 to 2^16, the initial scale of `torch.amp.GradScaler`; powers of two multiply a
float exactly.
"""

FLOAT16_SCALES = 4

ROUNDINGS = 16
"""Units in the last place that gradients may be apart: threads or atomics add up in
another order, or a constant was rounded.
"""

T = TypeVar("T")
Gradient = Any
"""An array or a tensor in float64 or complex128, divided by the scale that its loss
had.
"""
Norm = Callable[[Gradient], float]
"""The backend's 2-norm."""


class LinearityReport(NamedTuple):
    """The findings of a check of a loss function."""

    linear: bool
    """Every gradient scaled with the loss."""
    errors: dict[str, float]
    """Largest ||g(s) / s - g(1)|| / ||g(1)|| over the scales, by parameter name; inf
    where g(1) is zero and g(s) is not, or is NaN.
    """
    culprits: tuple[str, ...]
    """Names of the custom functions that ignore the gradient handed to them."""

    def __str__(self) -> str:
        if self.linear:
            return "The gradients scale with the loss."
        wrong = ", ".join(
            f"{name} ({error:.2g})" for name, error in self.errors.items() if error
        )
        named = ", ".join(self.culprits) or "not found"
        return (
            "The gradients do not scale with the loss; off by:"
            f" {wrong or 'nothing measured'}. Culprits: {named}."
        )

    def __repr__(self) -> str:
        return str(self)


def relative_error(gradient: Gradient, reference: Gradient, norm: Norm) -> float:
    """Return ||gradient - reference|| / ||reference||; inf if only `reference` is zero,
    or either holds a NaN.
    """
    off = norm(gradient - reference)
    size = norm(reference)
    if off == 0:
        return 0.0
    error = off / size if size else float("inf")
    return error if error == error else float("inf")


def comparable(
    measured: Iterable[T], finite: Callable[[T], bool], *, float16: bool
) -> Iterator[T]:
    """Yield the measurements to compare, of one per scale in the order of `SCALES`; the
    first one is the reference.

    If the program computes in `float16`, these are the last `FLOAT16_SCALES` that are
    `finite`: gradients may underflow at smaller scales.
    """
    every = iter(measured)
    if not float16:
        return every
    first = next(every)
    return iter(deque(filter(finite, chain([first], every)), FLOAT16_SCALES) or [first])


def linearity_report(
    gradients: Iterable[Mapping[str, Gradient]],
    culprits: Iterable[str],
    epsilon: float,
    norm: Norm,
) -> LinearityReport:
    """Return the report on the `comparable` gradients, by parameter name.

    `culprits` is read after all gradients; `epsilon` is the machine epsilon of the
    program's coarsest dtype.
    """
    compared = iter(gradients)
    reference = next(compared, {})
    worst = {
        name: 0.0 if norm(gradient) < float("inf") else float("inf")
        for name, gradient in reference.items()
    }
    for scaled in compared:
        for name, gradient in scaled.items():
            worst[name] = max(
                worst[name], relative_error(gradient, reference[name], norm)
            )
    named = tuple(sorted(set(culprits)))
    return LinearityReport(
        not named and all(error <= ROUNDINGS * epsilon for error in worst.values()),
        worst,
        named,
    )
