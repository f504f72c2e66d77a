"""The report of `gradaccum.verify`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
