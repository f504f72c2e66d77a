"""The Cells that mix the items of a batch. Each is run again by itself: on the large
batch's inputs, and on the rows of half of the items.

A Cell is named if the half's outputs are not those rows of all outputs, by more than
rounding moves them, and no Cell inside of it is. A Cell whose output has no axis of
items, or that fails when it is run alone, is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn

from gradaccum.kit import ROUNDING_LIMIT, item_axis
from gradaccum_mindspore.verification.batch import perturbed, rows, wide


class Call(NamedTuple):
    """The first call of a Cell."""

    cell: nn.Cell
    inputs: tuple[Any, ...]
    output: Any


class Calls:
    """The first calls of the Cells of a model."""

    def __init__(self, model: nn.Cell) -> None:
        self._cells = dict(model.cells_and_names())
        self.of: dict[str, Call] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            cell.register_forward_hook(self._hook(name))
            for name, cell in self._cells.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def note(cell: nn.Cell, inputs: tuple[Any, ...], output: Any) -> None:
            self.of.setdefault(name, Call(self._cells[name], inputs, output))

        return note

    def outputs(self) -> list[Any]:
        return [call.output for call in self.of.values()]


def mixing_layers(
    large: Calls, small: Calls, items: int, part: Sequence[int], roundoff: float
) -> dict[str, str]:
    mixing = [
        name
        for name, call in large.of.items()
        if name in small.of and _mixes(call, small.of[name], items, part, roundoff)
    ]
    return {
        name: type(large.of[name].cell).__name__
        for name in mixing
        if not any(_within(other, name) for other in mixing)
    }


def _within(inner: str, outer: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _mixes(
    call: Call, small: Call, items: int, part: Sequence[int], roundoff: float
) -> bool:
    axis = _axis(call.output, small.output, items, part)
    if axis is None:
        return False
    axes = [
        _axis(value, other, items, part)
        for value, other in zip(call.inputs, small.inputs, strict=True)
    ]
    half = [
        value if at is None else rows(value, at, items, part)
        for value, at in zip(call.inputs, axes, strict=True)
    ]
    rng = np.random.default_rng(0)
    moved = [
        perturbed(value, roundoff, rng, integers_too=True) for value in call.inputs
    ]
    try:
        whole, near, alone = (
            wide(call.cell(*inputs)) for inputs in (call.inputs, moved, half)
        )
    except Exception:  # The user's Cell may need what only the whole model gives it.
        return False
    before = rows(whole, axis, items, part)
    after = rows(near, axis, items, part)
    unit = max(_largest(after - before), roundoff * _largest(before))
    return not _largest(alone - before) <= ROUNDING_LIMIT * unit


def _axis(value: Any, other: Any, items: int, part: Sequence[int]) -> int | None:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return None
    return item_axis(value.shape, other.shape, items, len(part))


def _largest(values: Any) -> float:
    return float(np.max(np.abs(values), initial=0.0))
