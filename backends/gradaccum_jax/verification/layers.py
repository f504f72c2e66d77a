"""Layers of a loss whose output for one item depends on the other items: batch
normalisation by whatever name.

The loss's program runs on the large batch and on its first half. If an item's value
changes after an equation whose inputs did not, the items are mixed: by a layer, if
parameters then work on the mixed values item by item, otherwise by a coupled loss,
which the core finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradaccum.kit import ROUNDING_LIMIT, Layer, item_axis
from gradaccum_jax.arrays import Array, is_key
from gradaccum_jax.verification.draws import Program, Replay, Step, rows

Given = tuple[Program, list[Array], dict[int, Array]]
"""A program, its arguments, and random numbers in place of the drawn ones."""


class Ran(NamedTuple):
    """One equation, as it was run."""

    step: Step
    inputs: list[int]
    """Their places in the list of all values; constants have none."""
    outputs: list[int]


class Trail:
    """All that a program computes."""

    def __init__(self, given: Given) -> None:
        program, arguments, draws = given
        self.values: list[Any] = list(arguments)
        self.ran: list[Ran] = []
        self._places: dict[int, int] = {
            id(value): place for place, value in enumerate(self.values)
        }
        self._replay = Replay(draws)
        program.run(arguments, self._hook)

    def _hook(self, step: Step, inputs: list[Array]) -> list[Array]:
        before = [
            self._places[id(value)] for value in inputs if id(value) in self._places
        ]
        made = self._replay(step, inputs)
        after = list(range(len(self.values), len(self.values) + len(made)))
        self.values += made  # Kept, so that an id stays that of one value.
        self._places.update(zip(map(id, made), after, strict=True))
        self.ran.append(Ran(step, before, after))
        return made


def mixing_layers(
    large: Given,
    moved: Given,
    small: Given,
    parameters: Iterable[int],
    items: int,
    part: Sequence[int],
    roundoff: float,
) -> list[Layer]:
    """Return the layers in the order in which they run; none if the two programs have
    different equations.
    """
    trails = Trail(large), Trail(moved), Trail(small)
    if (
        len({len(trail.values) for trail in trails}) != 1
        or len({len(trail.ran) for trail in trails}) != 1
    ):
        return []
    axes = [
        item_axis(np.shape(a), np.shape(b), items, len(part))
        for a, b in zip(trails[0].values, trails[2].values, strict=True)
    ]
    values = zip(*(trail.values for trail in trails), strict=True)
    differs = [
        axis is not None and _differs(each, axis, items, part, roundoff)
        for axis, each in zip(axes, values, strict=True)
    ]
    mixing = [ran for ran in trails[0].ran if _mixes(ran, axes, differs)]
    return _layers(trails[0], mixing, axes, set(parameters))


def _mixes(ran: Ran, axes: Sequence[int | None], differs: Sequence[bool]) -> bool:
    return any(differs[place] for place in ran.outputs) and not any(
        differs[place] for place in ran.inputs if axes[place] is not None
    )


def _differs(
    values: Sequence[Array], axis: int, items: int, part: Sequence[int], roundoff: float
) -> bool:
    large, moved, small = values
    if is_key(large):
        return False
    a, b, c = (
        np.asarray(value).astype(complex)
        for value in (
            rows(large, axis, items, part),
            rows(moved, axis, items, part),
            small,
        )
    )
    largest = float(np.max(np.abs(a), initial=0.0))
    unit = max(float(np.max(np.abs(b - a), initial=0.0)), roundoff * largest)
    return not float(np.max(np.abs(c - a), initial=0.0)) <= ROUNDING_LIMIT * unit


def _layers(
    trail: Trail,
    mixing: Sequence[Ran],
    axes: Sequence[int | None],
    parameters: set[int],
) -> list[Layer]:
    """Return the equations that mix items and whose outcome parameters work on."""
    alone = _by_parameters(trail, parameters)
    found: dict[str, Layer] = {}
    for ran in mixing:
        if _meets_parameters(trail, ran, axes, alone):
            found.setdefault(
                ran.step.place, Layer(ran.step.place, _kind(ran.step.place), True)
            )
    return list(found.values())


def _by_parameters(trail: Trail, parameters: set[int]) -> set[int]:
    arguments = len(trail.values) - sum(len(ran.outputs) for ran in trail.ran)
    batch = {place for place in range(arguments) if place not in parameters}
    alone = set(parameters)
    for ran in trail.ran:
        if any(place in batch for place in ran.inputs):
            batch.update(ran.outputs)
        elif any(place in alone for place in ran.inputs):
            alone.update(ran.outputs)
    return alone


def _meets_parameters(
    trail: Trail, mixing: Ran, axes: Sequence[int | None], alone: set[int]
) -> bool:
    reached = set(mixing.outputs)
    for ran in trail.ran:
        if any(place in reached and axes[place] is not None for place in ran.inputs):
            if any(place in alone for place in ran.inputs):
                return True
            reached.update(place for place in ran.outputs if axes[place] is not None)
    return False


def _kind(place: str) -> str:
    """Return the module's class for ``Net/BatchNorm_0``, the function for
    ``norm at model.py:3``.
    """
    return (
        place.partition(" at ")[0].rpartition("/")[2].rstrip("0123456789").rstrip("_")
    )
