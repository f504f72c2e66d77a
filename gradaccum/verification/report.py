"""The report of `gradaccum.verify`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradaccum.verification.causes import PAGE, Cause
from gradaccum.verification.comparison import (
    ROUNDING_LIMIT,
    Coefficients,
    Parts,
    moved_names,
)


@dataclass(frozen=True)
class VerificationReport:
    """The findings of `gradaccum.verify`."""

    equivalent: bool
    """True if accumulation is correct for this loss."""
    causes: tuple[Cause, ...]
    """The reasons why accumulation is wrong, in the order in which they were found;
    empty if `equivalent` is true.
    """
    errors: Mapping[str, float]
    """For each parameter, the largest difference between the accumulated gradient of
    one of the `partitions` and the gradient of the large batch (the whole batch as a
    single micro-batch). The difference is a 2-norm, divided by the parameter's entry in
    `units`. It is inf if a gradient was not finite.
    """
    units: Mapping[str, float]
    """For each parameter, the 2-norm of the rounding error in its gradient."""
    partitions: tuple[Parts, ...]
    """The partitions (ways to split the batch into micro-batches) that were compared.
    Each partition contains one tuple per micro-batch, with the indices of the
    micro-batch's items in order.
    """
    notes: tuple[str, ...] = ()
    """Further remarks about the loss, which do not indicate a mistake."""
    coefficients: Coefficients | None = None
    """The factors by which the micro-batches' gradients should be multiplied, so that
    their sum comes nearest to the large batch's gradient. The micro-batches are those
    of the first entry in `partitions`. None if their gradients are too similar to
    distinguish.

    If a cause of the kind ``"hidden_state"`` was found, the gradients are computed with
    the model's state restored before each micro-batch. If a cause of the kind
    ``"batch_statistics"`` was found, they are computed in evaluation mode.
    """

    @property
    def moved(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient differs from the large batch's
        gradient by more than rounding.
        """
        return moved_names(self.errors)

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(cause.kind for cause in self.causes))
        verdict = f"Accumulation is WRONG for this loss: {kinds}."
        if kinds == "not_repeatable":
            verdict = f"Accumulation cannot be compared for this loss: {kinds}."
        if self.equivalent:
            verdict = (
                f"Accumulation is right for this loss: {len(self.errors)} parameters,"
                f" {len(self.partitions)} partitions compared."
            )
        lines = [verdict, *(f"  {cause}" for cause in self.causes)]
        lines += [f"  note: {note}" for note in self.notes]
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

    # Notebooks display the report with repr.
    __repr__ = __str__
