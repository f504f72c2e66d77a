"""How the loss and the other outputs of the micro-batches become those of the large batch, where Python calls them."""

from __future__ import annotations

from typing import Any, cast

import mindspore as ms
from mindspore import Tensor, ops

from gradaccum import ArgumentValueError
from gradaccum.kit import (
    Nest,
    aux_shape_error,
    concatenate_error,
    explain,
    finished,
    kinds_of,
    leaves_of,
    mapped,
    merged,
    scalar_loss_error,
    share,
    with_leaves,
)
from gradaccum_mindspore.sums import FLOATS, HALF
from gradaccum_mindspore.types import DType


class Operators:
    """The three operations that the core asks for; they run in compiled code too."""

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        """The larger one, element by element; NaN where either is."""
        return ops.where((a >= b) | (a != a), a, b)  # ops.maximum forgets a NaN that comes first

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        """The smaller one, element by element; NaN where either is."""
        return ops.where((a <= b) | (a != a), a, b)

    def widened(self, value: Tensor) -> Tensor:
        """`value` in the dtype of its sum."""
        if value.dtype in HALF:
            return value.astype(ms.float32)
        return value.astype(ms.int64) if value.dtype == ms.bool_ else value


OPERATORS = Operators()


class MergedOutputs:
    """The loss and the other outputs of the micro-batches so far.

    Args:
        declared: how the other outputs merge: a prefix nest of kinds.
        loss_kind: how the loss does.
    """

    def __init__(self, declared: Nest, loss_kind: str) -> None:
        self.declared, self.loss_kind = declared, loss_kind
        self.kinds: list[str] = []
        self.shares: list[Any] = []
        self.outline: Nest = None
        self.loss_dtype: DType = ms.float32

    def add(self, value: Nest, items: int | None, weight: float) -> None:
        """Take in what one micro-batch returned: its loss, or a tuple of its loss and other outputs."""
        if not self.shares:
            self.kinds, self.loss_dtype = self._kinds(value), _first(value).dtype
            self.outline = mapped(lambda leaf: object(), value)
        leaves = leaves_of(value, "output")
        if len(leaves) != len(self.kinds):
            raise _structure_error(len(self.kinds), len(leaves))
        given = [self._share(kind, leaf.path, leaf.value, items, weight) for kind, leaf in zip(self.kinds, leaves, strict=True)]
        self.shares = given if not self.shares else [_merged(*each) for each in zip(self.kinds, self.shares, given, strict=True)]

    def finished(self, items: int | None, weight: float, divisor: float) -> Nest:
        """The large batch's loss, or the tuple of it and the other outputs; `divisor` is the loss's."""
        loss, *others = (_joined(kind, each) for kind, each in zip(self.kinds, self.shares, strict=True))
        total = (loss / _number(divisor, loss) if divisor != 1 else loss).astype(self.loss_dtype)
        rest = [
            finished(kind, each, _number(items or 1, each), _number(weight or 1, each))
            for kind, each in zip(self.kinds[1:], others, strict=True)
        ]
        return with_leaves(self.outline, iter([total, *rest]))

    def _kinds(self, value: Nest) -> list[str]:
        if self.declared is None:
            return [self.loss_kind]
        _, *others = cast("tuple[Nest, ...]", value)
        return [self.loss_kind, *kinds_of(self.declared, others[0] if len(others) == 1 else tuple(others))]

    def _share(self, kind: str, path: str, value: Any, items: int | None, weight: float) -> Any:
        value = value if isinstance(value, Tensor) else Tensor(value)
        if kind == "concatenate":
            if value.ndim == 0:
                raise concatenate_error(path, "a scalar")
            return [value]
        if kind == "mean" and items is None:
            raise _items_error(path)
        if kind == "weighted_mean" and weight == 0:
            return ops.zeros_like(OPERATORS.widened(value))  # Not 0 * value: the mean over no tokens is NaN.
        return share(kind, value, _number(items or 1, value), _number(weight, value), OPERATORS)


def require_outputs(value: Any, has_aux: bool) -> None:
    """Refuse what a loss function may not return.

    Raises:
        ArgumentValueError: the loss is no scalar, or other outputs come undeclared, or are missing.
    """
    if isinstance(value, tuple | list) != has_aux:
        raise aux_shape_error(f"a {type(value).__name__} of {len(value)}" if not has_aux else "the loss alone", declared=has_aux)
    loss = _first(value)
    if not isinstance(loss, Tensor):
        raise scalar_loss_error(f"an object of type {type(loss).__name__}")
    require_scalar(tuple(loss.shape), loss.dtype)


def require_scalar(shape: tuple[int, ...], dtype: DType) -> None:
    """Refuse the shape or dtype of a loss; for compiled code too, while it is compiled.

    Raises:
        ArgumentValueError: the loss is no floating scalar.
    """
    if shape:
        raise scalar_loss_error(f"a Tensor of shape {shape}")
    if dtype not in FLOATS.values():
        raise scalar_loss_error(f"a Tensor of dtype {dtype}")


def loss_kind(reduction: str) -> str:
    """How the loss of micro-batches adds up under a reduction: as the gradients do."""
    return "weighted_mean" if reduction == "mean" else "sum"


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


def _number(number: float, like: Tensor) -> Tensor:
    """A Tensor, because MindSpore rounds a Python number to float32."""
    return Tensor(number, ms.float64 if like.dtype == ms.float64 else ms.float32)


def _merged(kind: str, so_far: Any, given: Any) -> Any:
    return [*so_far, *given] if kind == "concatenate" else merged(kind, so_far, given, OPERATORS)


def _joined(kind: str, parts: Any) -> Tensor:
    if kind != "concatenate":
        return parts
    return parts[0] if len(parts) == 1 else ops.concat(parts, 0)


def _structure_error(expected: int, found: int) -> ArgumentValueError:
    fix = "Return the same outputs for every micro-batch."
    return explain(ArgumentValueError, "loss_fn", expected=f"{expected} outputs, as of the first micro-batch", found=f"{found}", fix=fix)


def _items_error(path: str) -> ArgumentValueError:
    fix = "Declare 'weighted_mean' and write weight=, or 'sum'."
    found = "a micro-batch of your own split whose leaves have different lengths"
    return explain(ArgumentValueError, path, expected="a known number of items, to take a mean over items", found=found, fix=fix)
