"""How the other outputs of a loss function (aux) become those of the large batch: by a kind that the user declares per leaf.

The arithmetic stands here once; a backend passes in its `maximum`, its `minimum` and `widened`, the dtype in which it sums.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from gradaccum.errors import ArgumentValueError, GradAccumError, explain
from gradaccum.nests import Nest, spread

KINDS = ("sum", "mean", "weighted_mean", "max", "min", "concatenate")
"""sum: over micro-batches. mean: over items (each micro-batch's value is a mean of its items). weighted_mean: by the micro-batch's weight.
max, min: element by element. concatenate: along the leading axis, in the order of the items."""

A = TypeVar("A", bound=Any)


class MergingOps(Protocol):
    """The three operations that a framework supplies."""

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger one, element by element; NaN where either is."""

    def minimum(self, a: Any, b: Any) -> Any:
        """The smaller one, element by element; NaN where either is."""

    def widened(self, value: Any) -> Any:
        """`value` in the dtype of its sum: float32 for half precision, the default integer for booleans, otherwise its own."""


def kinds_of(declared: Nest, aux: Nest) -> list[str]:
    """The kind of each leaf of `aux`, from the user's declaration: one kind for all, or a prefix nest of kinds.

    Raises:
        ArgumentValueError: a kind is unknown, or the declaration has another structure.
    """
    kinds = spread(declared, aux, "aux")
    for kind in kinds:
        require_kind(kind)
    return kinds  # type: ignore[return-value]


def require_kind(kind: object) -> None:
    """Refuse what is no kind of merging.

    Raises:
        ArgumentValueError: `kind` is not one of `KINDS`.
    """
    if kind not in KINDS:
        raise explain(ArgumentValueError, "aux", expected=f"one of {', '.join(KINDS)}", got=kind, fix="Write aux='mean', say.")


def share(kind: str, value: A, items: Any, weight: Any, ops: MergingOps) -> A:
    """What one micro-batch gives to the merged value: its `value` times its number of items or its `weight` where a mean is asked for."""
    if kind in ("max", "min", "concatenate"):
        return value
    if kind == "sum":
        return ops.widened(value)  # type: ignore[no-any-return]
    return ops.widened(value) * (items if kind == "mean" else weight)  # type: ignore[no-any-return]


def merged(kind: str, so_far: A, given: A, ops: MergingOps) -> A:
    """The merged value with one more `share`; not for "concatenate", which only the backend can do."""
    if kind == "max":
        return ops.maximum(so_far, given)  # type: ignore[no-any-return]
    if kind == "min":
        return ops.minimum(so_far, given)  # type: ignore[no-any-return]
    return so_far + given  # type: ignore[no-any-return]


def finished(kind: str, so_far: A, items: Any, weight: Any) -> A:
    """The value of the large batch, from the shares of all micro-batches, its number of items and its weight."""
    if kind == "mean":
        return so_far / items  # type: ignore[no-any-return]
    if kind == "weighted_mean":
        return so_far / weight  # type: ignore[no-any-return]
    return so_far


def concatenate_error(path: str, found: str) -> GradAccumError:
    """The error for a leaf that is to be concatenated and has no leading axis."""
    fix = "Return an array with one row per item, or declare sum, mean, max or min for this leaf."
    return explain(ArgumentValueError, path or "aux", expected="an array with a leading axis to concatenate", found=found, fix=fix)
