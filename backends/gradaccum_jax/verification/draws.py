"""The random numbers of a traced loss: which follow the keys of the batch, and which item meets which of them.

Accumulation with a fresh key per micro-batch is right, and gives another gradient than the large batch: other numbers are drawn. To compare
the two, each item has to meet the same numbers in both. So the equations that draw are run for the large batch, and in a micro-batch each
gives the rows of its items. Numbers that follow an item's own values, such as a key per item, need no such help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from gradaccum_jax.types import Array
from gradaccum_jax.verification.program import Around, Equation, Program, Step, bind, inner

DRAWING = ("random_bits", "random_split", "random_fold_in", "random_seed")


class Draw(NamedTuple):
    """One equation that makes random numbers or keys."""

    place: str
    shape: tuple[int, ...]
    bits: bool
    """Whether it makes numbers, not keys."""
    by_key: bool
    """Whether it follows a key that each micro-batch has its own of."""
    by_items: bool
    """Whether it follows values of the items."""
    within: bool
    """Whether it stands in a loop, a branch or a function with a derivative of its own, where it cannot be replaced."""


def draws_of(program: Program, keys: Set[int], items: Set[int]) -> list[Draw]:
    """The draws in the order of the equations.

    Args:
        program: the loss.
        keys: the places among its arguments of keys that each micro-batch has its own of.
        items: the places of arrays with an axis of items.
    """
    jaxpr = program.closed.jaxpr
    marks = {variable: (place in keys, place in items) for place, variable in enumerate(jaxpr.invars)}
    return list(_walk(jaxpr, marks, Around(), within=False))


Mark = tuple[bool, bool]
"""Whether a value follows a key, and whether it follows an item."""
NEITHER: Mark = (False, False)


def _walk(jaxpr: Any, marks: dict[Any, Mark], around: Around, *, within: bool) -> Iterator[Draw]:
    """Adds a mark to `marks` for each value. Inside of loops every value counts as following what the loop is given."""
    for eqn in jaxpr.eqns:
        given = [NEITHER if isinstance(v, core.Literal) else marks.get(v, NEITHER) for v in eqn.invars]
        every = (any(key for key, _ in given), any(item for _, item in given))
        called = inner(eqn)
        if called is not None:
            below = dict(zip(called[0].invars, given, strict=True))
            yield from _walk(called[0], below, around.within(eqn), within=within)
            made = [NEITHER if isinstance(v, core.Literal) else below.get(v, NEITHER) for v in called[0].outvars]
        else:
            yield from _draws_at(eqn, every, around.within(eqn), within)
            made = [every] * len(eqn.outvars)
        marks.update(zip(eqn.outvars, made, strict=True))


def _draws_at(eqn: Equation, mark: Mark, around: Around, within: bool) -> Iterator[Draw]:
    if eqn.primitive.name in DRAWING:
        shape = tuple(eqn.outvars[0].aval.shape)
        yield Draw(Step(eqn, around).place, shape, eqn.primitive.name == "random_bits", *mark, within)
    for value in eqn.params.values():
        for body in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(body, (core.Jaxpr, core.ClosedJaxpr)):
                jaxpr = body.jaxpr if isinstance(body, core.ClosedJaxpr) else body
                yield from _walk(jaxpr, dict.fromkeys(jaxpr.invars, mark), around, within=True)


def rows(value: Array, axis: int, items: int, part: Sequence[int]) -> Array:
    """Those of the items of `part`."""
    if value.shape[axis] == items:
        return value[(slice(None),) * axis + (np.asarray(part),)]
    each = value.shape[axis] // items
    places = [item * each + row for item in part for row in range(each)]
    return value[(slice(None),) * axis + (np.asarray(places),)]


class Replay:
    """Runs a program with given random numbers in place of the drawn ones, or remembers those that it draws.

    Args:
        given: by the number of the draw among the program's own (those inside of loops have none): its value; None: drawn.
    """

    def __init__(self, given: dict[int, Array] | None = None) -> None:
        self.drawn: list[Array] = []
        self._given = given or {}

    def __call__(self, step: Step, values: list[Array]) -> list[Array]:
        """A hook of `Program.run`."""
        if step.eqn.primitive.name not in DRAWING:
            return bind(step.eqn, values)
        given = self._given.get(len(self.drawn))
        made = bind(step.eqn, values) if given is None else [given]
        self.drawn += made
        return made
