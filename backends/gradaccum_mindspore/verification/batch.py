"""The batch of a loss under comparison: its leaves, the rows of each that belong to
items, the arguments of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from gradaccum import ArgumentTypeError, ArgumentValueError, kit


def rows(value: Any, axis: int, items: int, part: Sequence[int]) -> Any:
    each = value.shape[axis] // items
    places = np.asarray(
        [item * each + row for item in part for row in range(each)], np.int32
    )
    return (
        ops.gather(value, Tensor(places), axis)
        if isinstance(value, Tensor)
        else np.take(value, places, axis)
    )


def wide(value: Any) -> NDArray[np.float64]:
    """Return a Tensor or a NumPy array as NumPy's, in float64."""
    if isinstance(value, Tensor):
        value = (
            value.astype(ms.float32) if value.dtype == ms.bfloat16 else value
        ).asnumpy()
    made: NDArray[np.float64] = np.asarray(value).astype(np.float64)
    return made


READABLE = 200_000
"""Numbers of a leaf above which it is no mask or label."""
LIMITS = {
    ms.float16: (2.0**-10, 2.0**-24),
    ms.bfloat16: (2.0**-7, 2.0**-133),
    ms.float32: (2.0**-23, 2.0**-149),
    ms.float64: (2.0**-52, 5e-324),
}
"""Distance from 1 to the next number, and the smallest positive number."""


class Batch:
    """The leaves of a batch, with the axis of items of each."""

    def __init__(self, batch: tuple[kit.Nest, ...], axes: kit.Nest) -> None:
        self.nest = batch
        lists = kit.lists_of_one_kind(batch, axes)
        self.leaves = kit.leaves_of(self.nest, "batch")
        pairs = zip(self.leaves, kit.spread(axes, self.nest, "axes"), strict=True)
        self.axes = [_axis(leaf.value, axis, leaf.path) for leaf, axis in pairs]
        self.items = kit.require_one_size(
            ((leaf.path, _size(leaf.value, axis)) for leaf, axis in self.split), lists
        )

    @property
    def split(self) -> list[tuple[Any, int]]:
        return [
            (leaf, axis)
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
            if axis is not None
        ]

    @property
    def terms(self) -> int:
        return max(
            [
                self.items,
                *(
                    leaf.value.size
                    for leaf in self.leaves
                    if isinstance(leaf.value, Tensor | np.ndarray)
                ),
            ]
        )

    def part(
        self, items: Sequence[int], values: Sequence[object] | None = None
    ) -> tuple[Any, ...]:
        own = values if values is not None else [leaf.value for leaf in self.leaves]
        made: Any = kit.with_leaves(
            self.nest,
            (
                self._taken(value, axis, items)
                for value, axis in zip(own, self.axes, strict=True)
            ),
        )
        return tuple(made)

    def perturbed(self, roundoff: float, rng: np.random.Generator) -> list[object]:
        """Return the leaves' values; each number of a floating one moves by one
        rounding, unless it is an integer.
        """
        return [
            perturbed(leaf.value, roundoff, rng, integers_too=False)
            for leaf in self.leaves
        ]

    def columns(self) -> list[kit.Column]:
        found = []
        for leaf, axis in self.split:
            if (
                isinstance(leaf.value, Tensor | np.ndarray)
                and leaf.value.size <= READABLE
            ):
                numbers = (
                    np.moveaxis(wide(leaf.value), axis, 0)
                    .reshape(self.items, -1)
                    .tolist()
                )
                found.append(
                    kit.Column(
                        leaf.path,
                        numbers,
                        not is_float(leaf.value),
                        leaf.value.ndim == 2 and axis == 0,
                    )
                )
        return found

    def _taken(self, value: Any, axis: int | None, items: Sequence[int]) -> object:
        if axis is None:
            return value
        return (
            rows(value, axis, self.items, items)
            if isinstance(value, Tensor | np.ndarray)
            else type(value)(value[item] for item in items)
        )


def is_float(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dtype in LIMITS
    return isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating)


def require_scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or not is_float(loss) or loss.size != 1:
        found = (
            f"shape {loss.shape}, {loss.dtype}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise kit.scalar_loss_error(found)
    return loss


def perturbed(
    value: Any, roundoff: float, rng: np.random.Generator, *, integers_too: bool
) -> Any:
    """Return `value` with each floating number moved by one rounding, up or down."""
    if not is_float(value):
        return value
    before = wide(value)
    moved = before * (1 + roundoff * rng.choice((-1.0, 1.0), before.shape))
    after = np.where((before == np.round(before)) & (not integers_too), before, moved)
    return (
        Tensor(after).astype(value.dtype)
        if isinstance(value, Tensor)
        else after.astype(value.dtype)
    )


def _axis(value: object, axis: Any, path: str) -> int | None:
    if axis is None:
        return None
    if isinstance(axis, bool) or not isinstance(axis, int):
        fix = "Write axes=0, an axis per argument, or None for what is given whole."
        raise kit.explain(
            ArgumentTypeError, "axes", expected="an int or None", got=axis, fix=fix
        )
    if kit.is_column(value):
        return 0
    if not isinstance(value, Tensor | np.ndarray):
        return None
    if not -value.ndim <= axis < value.ndim:
        fix = "Write None in axes for what is given whole to each micro-batch."
        raise kit.explain(
            ArgumentValueError,
            path,
            expected=f"an array with an axis {axis}",
            found=f"shape {value.shape}",
            fix=fix,
        )
    return int(axis % value.ndim)


def _size(value: Any, axis: int) -> int:
    return (
        int(value.shape[axis]) if isinstance(value, Tensor | np.ndarray) else len(value)
    )
