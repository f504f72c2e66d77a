"""Dropout whose numbers belong to the items: an item meets the same ones in the large
batch and in every micro-batch.

MindSpore's random operators cannot be given numbers. So the check lends
`mindspore.nn.Dropout` an operator that multiplies by numbers made for the large batch
once, of which a micro-batch takes its items' rows. Other operators draw as they do, and
are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from gradaccum_mindspore.verification.batch import rows


class Lent:
    """As a context: every `nn.Dropout` of the model runs with an operator of this
    check.
    """

    def __init__(self, model: nn.Cell, items: int) -> None:
        self._items = items
        self._cells = {
            name: cell
            for name, cell in model.cells_and_names()
            if type(cell) is nn.Dropout and hasattr(cell, "dropout")
        }
        self._own = {name: cell.dropout for name, cell in self._cells.items()}
        self._calls: dict[str, int] = {}
        self._part: Sequence[int] | None = None
        self._seed: tuple[int, ...] = (0,)

    def begin(self, part: Sequence[int] | None, seed: tuple[int, ...]) -> None:
        """Begin the calls of the items of `part`, with the numbers of `seed`; None:
        nothing is dropped.
        """
        self._calls = dict.fromkeys(self._cells, 0)
        self._part = part
        self._seed = seed

    def __enter__(self) -> Lent:
        for place, (name, cell) in enumerate(self._cells.items()):
            keep = cell.keep_prob if cell.p is None else 1.0 - cell.p
            cell.dropout = _Operator(self, name, place, float(keep))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, cell in self._cells.items():
            cell.dropout = self._own[name]

    def numbers(
        self, name: str, place: int, keep: float, shape: tuple[int, ...]
    ) -> Any:
        """Return the factors of an input at this call of this dropout."""
        assert self._part is not None
        call = self._calls[name]
        self._calls[name] = self._calls[name] + 1
        rng = np.random.default_rng([*self._seed, place, call])
        for axis, size in enumerate(shape):
            if size % len(self._part) == 0:
                large = (
                    *shape[:axis],
                    size // len(self._part) * self._items,
                    *shape[axis + 1 :],
                )
                return rows(
                    (rng.random(large) < keep) / keep, axis, self._items, self._part
                )
        return (rng.random(shape) < keep) / keep

    @property
    def keeps_all(self) -> bool:
        return self._part is None


class _Operator:
    """The replacement of `mindspore.ops.Dropout`: returns the output and the mask."""

    def __init__(self, lent: Lent, name: str, place: int, keep: float) -> None:
        self._lent = lent
        self._name = name
        self._place = place
        self._keep = keep

    def __call__(self, x: Tensor) -> tuple[Any, Any]:
        if self._lent.keeps_all:
            return x, x
        mask = Tensor(
            self._lent.numbers(self._name, self._place, self._keep, x.shape).astype(
                np.float32
            )
        ).astype(x.dtype)
        return x * mask, mask
