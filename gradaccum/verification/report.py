"""`gradaccum.verify` for every framework, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gradaccum.errors import ArgumentTypeError, BackendNotFoundError
from gradaccum.registry import Backend, available_backends, backend_of, load_backend
from gradaccum.verification.comparison import ROUNDING_LIMIT, Coefficients, moved_names

PAGE = "gradaccum/VERIFY.md"
"""The page with a section for each kind of cause."""


@dataclass(frozen=True)
class Cause:
    """One reason why accumulation does not give the large batch's gradient."""

    kind: str
    """The kind of cause, such as ``"batch_statistics"``. ``gradaccum/VERIFY.md`` has a
    section of that name.
    """
    where: str
    """The layer, state, parameter or part of the batch that is the cause, or "the
    loss".
    """
    explanation: str
    """What the experiments showed, and why it matters."""
    fix: str
    """What to write instead."""

    def __str__(self) -> str:
        return (
            f"{self.kind} ({self.where}): {self.explanation}\n    What to do:"
            f" {self.fix}"
        )


@dataclass(frozen=True)
class VerificationReport:
    """The findings of `gradaccum.verify`."""

    equivalent: bool
    """True if accumulation is right for this loss."""
    causes: tuple[Cause, ...]
    """Why accumulation is wrong, in the order in which the causes were found; empty if
    `equivalent`.
    """
    errors: Mapping[str, float]
    """For each parameter, the distance between the worst partition's gradient and the
    large batch's gradient, divided by the parameter's entry in `units`; inf if a
    gradient was not finite.
    """
    units: Mapping[str, float]
    """For each parameter, the 2-norm of the change that rounding makes to its gradient.
    """
    partitions: tuple[str, ...]
    """The partitions and orders of the batch that were compared, in words."""
    notes: tuple[str, ...] = ()
    """Remarks about the loss that do not report a mistake."""
    coefficients: Coefficients | None = None
    """The best coefficients of the micro-batches, excluding the causes that were found
    before; None if the micro-batches' gradients are too similar to distinguish.
    """

    @property
    def moved(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient differs from the large batch's
        gradient by more than rounding.
        """
        return moved_names(self.errors)

    def __str__(self) -> str:
        lines = [
            self._verdict(),
            *(f"  {cause}" for cause in self.causes),
            *(f"  note: {note}" for note in self.notes),
        ]
        if self.moved:
            name = max(self.moved, key=lambda name: self.errors[name])
            lines.append(
                f"  Parameters whose gradient differs: {len(self.moved)}. The worst is"
                f" {name}, by {self.errors[name]:.3g} units (up to {ROUNDING_LIMIT:g}"
                " units are rounding)."
            )
        if self.coefficients is not None and not self.equivalent:
            lines.append(f"  {self.coefficients}")
        if self.causes:
            lines.append(f"  More about each cause: {PAGE}.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        # A notebook shows the last value of a cell through its repr.
        return str(self)

    def _verdict(self) -> str:
        if self.equivalent:
            return (
                f"Accumulation is right for this loss: {len(self.errors)} parameters,"
                f" {len(self.partitions)} partitions compared."
            )
        kinds = ", ".join(dict.fromkeys(cause.kind for cause in self.causes))
        if kinds == "not_repeatable":
            return "Accumulation cannot be compared for this loss: not_repeatable."
        return f"Accumulation is WRONG for this loss: {kinds}."


# `gradaccum.verify`: one call for every framework.


@runtime_checkable
class VerifyingBackend(Protocol):
    """A backend that can check whether accumulation is right for a loss."""

    def verifies(self, model: object) -> bool:
        """True if `model` belongs to this framework: a module, or a nest of arrays."""
        ...

    def verify(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        batch: Any,
        steps: int | None,
        **options: Any,
    ) -> VerificationReport:
        """Run `gradaccum.verify` in this framework."""
        ...


def verify(
    model_or_params: Any,
    loss_fn: Callable[..., Any],
    batch: Any,
    steps: int | None = None,
    **options: Any,
) -> VerificationReport:
    """Check whether gradient accumulation is right for a loss, and if not, why.

    It computes the gradient of one batch for many partitions and orders. If the
    gradients differ by more than rounding, experiments look for the cause. The model,
    the batch and the random state are unchanged afterwards.

    Args:
        model_or_params: a `torch.nn.Module`, a `mindspore.nn.Cell`, or a nest of JAX
            arrays.
        loss_fn: ``loss_fn(model_or_params, *batch)`` returns a scalar. With a module or
            a Cell it may also be a criterion, ``criterion(output, *targets)``, or a
            function that closes over its model, ``loss_fn(*batch)``.
        batch: a tuple of nests of arrays, with the batch axis first. Use at least
            `steps` real items, with their padding.
        steps: the number of micro-batches, at least 2; by default 4, or the number of
            items if there are fewer.
        options: ``reduction``, ``weight`` and ``axes``, as for accumulation, and
            options of the framework.

    Returns:
        The report: ``print(report)``, ``report.equivalent``, ``report.causes``.

    Raises:
        ArgumentTypeError: `model_or_params` belongs to no installed framework; or
            another argument has the wrong type.
        ArgumentValueError: an argument has an invalid value.
        Exception: `loss_fn` raised this exception for a part of the batch; `verify`
            adds a note to it.
    """
    for backend in _backends(model_or_params):
        if isinstance(backend, VerifyingBackend) and backend.verifies(model_or_params):
            return backend.verify(model_or_params, loss_fn, batch, steps, **options)
    raise ArgumentTypeError(
        "model_or_params: expected a torch.nn.Module, a mindspore.nn.Cell or a nest of"
        " JAX arrays, with its framework installed; got an object of type"
        f" {type(model_or_params).__name__}. The installed frameworks are:"
        f" {', '.join(available_backends()) or 'none'}."
    )


def _backends(model: object) -> Iterator[Backend]:
    """Load the backend that the model's type belongs to first, because loading another
    backend imports another framework.
    """
    with suppress(ArgumentTypeError):
        yield backend_of(model)
    for name in available_backends():
        with suppress(BackendNotFoundError):  # The adapter needs another package.
            yield load_backend(name)
