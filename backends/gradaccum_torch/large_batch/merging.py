"""The other outputs of a loss function, merged as they come into those of the large batch. The core has the arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import (
    Nest,
    children_of,
    concatenate_error,
    explain,
    finished,
    kinds_of,
    leaves_of,
    merged,
    require_kind,
    share,
    with_leaves,
)
from gradaccum_torch.large_batch.batch import MicroBatch
from gradaccum_torch.sums import HALF


class _Ops:
    """The three operations that merging asks a framework for."""

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b)

    def widened(self, value: Tensor) -> Tensor:
        if value.dtype in HALF:
            return value.float()
        return value.long() if value.dtype is torch.bool else value


_OPS = _Ops()


class Merged:
    """The aux of the micro-batches seen so far.

    Args:
        declared: the user's ``aux=``: a kind, or a prefix nest of kinds.

    Raises:
        ArgumentTypeError, ArgumentValueError: a kind is unknown.
    """

    def __init__(self, declared: Nest) -> None:
        self._declared = declared
        self._nest: Nest = None
        self._paths: list[str] = []
        self._kinds: list[str] = []
        self._so_far: list[Any] = []
        self._items, self._weight = 0, 0.0
        require_kinds(declared)

    def add(self, aux: Nest, micro_batch: MicroBatch) -> None:
        """Merge one micro-batch's; leaves are tensors of any dtype or Python numbers, and are detached.

        Raises:
            ArgumentTypeError, ArgumentValueError: it has another structure than `declared` or than before, or a leaf that cannot merge.
        """
        leaves = leaves_of(aux, "aux")
        values = [_value(leaf.path, leaf.value) for leaf in leaves]
        first = not self._kinds
        if first:
            self._nest, self._paths, self._kinds = aux, [leaf.path for leaf in leaves], kinds_of(self._declared, aux)
        elif [leaf.path for leaf in leaves] != self._paths:
            fix = "Return the same structure for every micro-batch."
            raise explain(
                ArgumentValueError, "aux", expected=f"the leaves {self._paths}", found=f"{[leaf.path for leaf in leaves]}", fix=fix
            )
        shares = [self._share(*each, micro_batch) for each in zip(self._kinds, self._paths, values, strict=True)]
        if first:
            self._so_far = [[given] if kind == "concatenate" else given for kind, given in zip(self._kinds, shares, strict=True)]
        else:
            self._so_far = [_joined(*each) for each in zip(self._kinds, self._so_far, shares, self._paths, strict=True)]
        self._items += micro_batch.items or 0
        self._weight += micro_batch.weight

    def result(self) -> Nest:
        """The large batch's aux: the user's nest with tensors. Means of half precision are in float32; a total weight of 0 gives 0."""
        pairs = zip(self._kinds, self._so_far, self._paths, strict=True)
        return with_leaves(self._nest, iter([self._finished(*each) for each in pairs]))

    def _share(self, kind: str, path: str, value: Tensor, micro_batch: MicroBatch) -> Tensor:
        if kind == "concatenate" and value.dim() == 0:
            raise concatenate_error(path, "a scalar")
        if kind == "mean" and micro_batch.items is None:
            fix = "Declare weighted_mean for this leaf: a micro-batch of your own split has a weight, and no number of items."
            raise explain(ArgumentValueError, path, expected="a kind that needs no number of items", got=kind, fix=fix)
        if kind == "weighted_mean" and micro_batch.weight == 0:  # Adds nothing, even if it is NaN.
            value = torch.zeros_like(value)
        return share(kind, value, micro_batch.items, micro_batch.weight, _OPS)

    def _finished(self, kind: str, so_far: Any, path: str) -> Tensor:
        if kind == "concatenate":
            return _concatenated(so_far, path)
        made: Tensor = finished(kind, so_far, self._items, self._weight or 1.0)
        return made


def require_kinds(declared: Nest) -> None:
    """Refuse a declaration with an unknown kind, before anything runs.

    Raises:
        ArgumentValueError: naming the kind.
    """
    inside = [(step, part) for step, part in enumerate(declared)] if isinstance(declared, list | tuple) else children_of(declared)
    if inside is None:
        require_kind(declared)
    for _, part in inside or ():
        require_kinds(part)


def _value(path: str, value: object) -> Tensor:
    """`value` as a tensor of its own without a graph; a Python float in float64, whose digits it has."""
    if isinstance(value, Tensor):
        return value.detach().clone()  # The next micro-batch may write into it: a buffer, or what a CUDA graph returns.
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    fix = "Return tensors and numbers."
    raise explain(ArgumentTypeError, path, expected="a tensor or a number", got=value, fix=fix)


def _joined(kind: str, so_far: Any, given: Tensor, path: str) -> Any:
    if kind == "concatenate":
        so_far.append(given)
        return so_far
    if so_far.shape != given.shape:
        fix = "Reduce it to one shape in the loss function, or declare concatenate."
        raise explain(ArgumentValueError, path, expected=f"the shape {tuple(so_far.shape)}", found=f"{tuple(given.shape)}", fix=fix)
    return merged(kind, so_far, given, _OPS)


def _concatenated(parts: list[Tensor], path: str) -> Tensor:
    try:
        return torch.cat(parts)
    except RuntimeError as error:
        raise concatenate_error(path, f"shapes {sorted({tuple(part.shape) for part in parts})}") from error
