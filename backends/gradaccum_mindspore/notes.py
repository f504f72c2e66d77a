"""Notes from one branch of compiled code to another: Parameters that hold a value for the time of one call.

MindSpore's runtime copies a value that one branch computes and another uses. It frees the copy at the next run of the same branch, but
only if an even number of calls lay between: with an even ``steps`` it kept 12 KiB of host memory per window, for good. The runtime does not
copy a Parameter. So inside the end of a window no computed value crosses into an inner branch or past it, and each condition there is a
bool Parameter. The code reads each note at one place only: the runtime copies a Parameter that is read again after a branch.

Notes are no state: no checkpoint has them, and a Cell that holds the optimizer does not list or rename them.
"""

from __future__ import annotations

from itertools import count

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from gradaccum.kit import Fields, Terms, encode_terms
from gradaccum_mindspore.types import DType

NUMBERS = count()
"""Tells the notes of one program apart: compiled code takes no two Parameters of one name."""


class Notes(nn.Cell):  # type: ignore[misc]
    """The measure and the decision of the window that ends.

    Args:
        float_dtype: dtype of the norm and of the divisor.
    """

    weight: Parameter
    before: Parameter
    """bool: `State.overflow` before the decision."""
    loss_scale: Parameter
    terms: Parameter
    norm: Parameter
    """inf or NaN if the sums are not finite."""
    measured: Parameter
    """bool: `norm` is right already."""
    overflow: Parameter
    divisor: Parameter
    grad_norm: Parameter
    applied: Parameter
    apply: Parameter
    """bool: `applied`, as a condition."""

    def __init__(self, float_dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        self.float_dtype = float_dtype
        number = next(NUMBERS)
        self.add("loss_scale", Tensor(1.0, ms.float32), number)
        self.add("terms", Tensor(encode_terms(Terms("mean", "skip_window", "unused", 1)), ms.int32), number)
        for field in ("weight", "norm", "divisor", "grad_norm"):
            self.add(field, Tensor(0.0, float_dtype), number)
        for field in ("before", "measured", "overflow", "applied", "apply"):
            self.add(field, Tensor(False), number)

    def add(self, field: str, value: Tensor, number: int) -> None:
        """Make a Parameter that the Cell does not list."""
        object.__setattr__(self, field, Parameter(value, name=f"gradaccum.note{number}.{field}", requires_grad=False))

    def write_state(self, weight: Parameter, overflow: Parameter, loss_scale: Parameter) -> bool:
        """Note the fields that the decision reads. The state itself is written after the decision."""
        ops.assign(self.weight, weight)
        ops.assign(self.before, overflow)
        ops.assign(self.loss_scale, loss_scale)
        return True

    def write_terms(self, terms: Parameter) -> Tensor:
        """Note `Storage.terms`, which hold the window's size."""
        return ops.assign(self.terms, terms)

    def state(self) -> Fields:
        """The noted fields as a state; no decision reads the other fields, which are zero."""
        weight, zero = self.weight.value(), 0 * self.weight.value()
        return zero, zero, zero, weight, self.before & True, self.loss_scale.value(), zero

    def write_measure(self, norm: Tensor, right: Tensor) -> bool:
        """Note the sums' norm, and whether it is known to be right."""
        ops.assign(self.norm, norm.astype(self.float_dtype))
        ops.assign(self.measured, right)
        return True

    def write_decision(self, apply: Tensor, overflow: Tensor, divisor: Tensor, grad_norm: Tensor) -> bool:
        """Note the fields of a `Decision`."""
        ops.assign(self.divisor, divisor.astype(self.float_dtype))
        ops.assign(self.grad_norm, grad_norm.astype(self.float_dtype))
        ops.assign(self.overflow, overflow)
        ops.assign(self.applied, apply)
        ops.assign(self.apply, apply)
        return True
