"""A loss in JAX as `gradaccum.verify` runs it: in parts and under conditions. It has no
state and no mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.kit import (
    Column,
    Conditions,
    HostRandom,
    Precision,
    Run,
    item_axis,
)
from gradaccum_jax.arrays import Array, is_key
from gradaccum_jax.verification.batch import (
    Batch,
    Parameters,
    folded,
    is_float,
    loss_in,
    perturbed,
    require_scalar,
    wide,
)
from gradaccum_jax.verification.custom_backward import float_dtypes, non_linear_rules
from gradaccum_jax.verification.draws import (
    Draw,
    Program,
    Replay,
    draws_of,
    rows,
    trace,
)

SEEDED = 1_000_000
"""Beyond the number of any micro-batch: a key of another seed is no key of a
micro-batch.
"""
READABLE = 200_000
"""Numbers of a leaf above which it is not read as a mask or label."""
PYTHONS = "numpy.random or random, which JAX calls once, when it traces the loss"

Arguments = tuple[list[Array], list[Array]]
"""The parameters' arrays and the batch's leaves."""
Drawn = Mapping[int, tuple[Array, int]]
"""By the number of a draw: the large batch's numbers, and their axis of items."""
Weight = Callable[[Sequence[int]], float]
"""The weight of a micro-batch, by its items."""


class JaxSubject:
    """`gradaccum.kit.Subject` of a loss in JAX."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        parameters: Parameters,
        batch: Batch,
        weight: Weight | None,
        has_aux: bool,
    ) -> None:
        self._loss_fn = loss_fn
        self._parameters = parameters
        self._batch = batch
        self._weight = weight
        self._has_aux = has_aux
        self.items = batch.items
        self.names: Sequence[str] = tuple(parameters.names)
        self._programs: dict[tuple[int, int], Program] = {}
        self._compiled: dict[tuple[int, int, frozenset[int]], Callable[..., Any]] = {}
        self._remembered: dict[int, Drawn] = {}
        self._host = HostRandom(loss_fn)
        self._python_draws = False

    def window(
        self, parts: Sequence[Sequence[int]], conditions: Conditions
    ) -> list[Run]:
        arguments = self._arguments(conditions)
        drawn = self._drawn(conditions.seed) if conditions.replay else {}
        numbers: Sequence[int | None] = (
            [None] * len(parts) if conditions.replay else range(len(parts))
        )
        return [
            self._run(part, number, conditions, arguments, drawn)
            for part, number in zip(parts, numbers, strict=True)
        ]

    def _run(
        self,
        part: Sequence[int],
        number: int | None,
        conditions: Conditions,
        arguments: Arguments,
        drawn: Drawn,
    ) -> Run:
        given = {
            place: rows(value, axis, self.items, part)
            for place, (value, axis) in drawn.items()
        }
        values, leaves = arguments
        compiled = self._gradients(len(part), conditions.seed, frozenset(given))
        loss, gradients = compiled(
            values, self._batch.part(part, number, leaves), given, conditions.scale
        )
        made = {
            name: wide(gradients[place]) / conditions.scale
            for name, place in self._parameters.names.items()
        }
        return Run(
            float(loss),
            made,
            float(len(part)) if self._weight is None else self._weight(part),
        )

    def _gradients(
        self, size: int, seed: int, replaced: frozenset[int]
    ) -> Callable[..., Any]:
        key = (size, seed if self._python_draws else 0, replaced)
        if key not in self._compiled:
            program = self._program(size, seed)
            places = sorted(self._parameters.names.values())

            def function(
                values: list[Array],
                leaves: list[Array],
                given: dict[int, Array],
                scale: Array,
            ) -> tuple[Array, dict[int, Array]]:
                def loss_of(chosen: dict[int, Array]) -> Array:
                    return program.run(
                        [
                            *(
                                chosen.get(place, value)
                                for place, value in enumerate(values)
                            ),
                            *leaves,
                        ],
                        Replay(given),
                    )[0]

                loss, pull_back = jax.vjp(
                    loss_of, {place: values[place] for place in places}
                )
                return loss, pull_back(
                    jnp.ones_like(loss) * jnp.asarray(scale, loss.dtype)
                )[0]

            self._compiled[key] = jax.jit(function)
        return self._compiled[key]

    def _program(self, size: int, seed: int = 0) -> Program:
        """Return the loss of the first `size` items as a program, with Python's draws
        by `seed`.
        """
        key = (size, seed if self._python_draws else 0)
        if key not in self._programs:
            leaves = self._batch.part(range(size), None)
            with self._python_state(seed):
                self._programs[key] = trace(
                    self._flat_loss, *self._parameters.values, *leaves
                )
        return self._programs[key]

    def _flat_loss(self, *arguments: Array) -> Array:
        count = len(self._parameters.arrays)
        made = self._loss_fn(
            self._parameters.tree(arguments[:count]),
            *self._batch.whole(arguments[count:]),
        )
        return require_scalar(loss_in(made, self._has_aux))

    @contextmanager
    def _python_state(self, seed: int) -> Iterator[None]:
        """Restore Python's and NumPy's random states after the block; note whether the
        loss has used them.
        """
        try:
            self._host.begin(seed)
            before = self._host.states()
            yield
            self._python_draws |= before != self._host.states()
        finally:
            self._host.begin()

    def _arguments(self, conditions: Conditions) -> Arguments:
        values = self._parameters.values
        leaves = list(self._batch.leaves)
        if conditions.seed:
            leaves = [
                folded(leaf, SEEDED + conditions.seed)
                if place in self._seeded
                else leaf
                for place, leaf in enumerate(leaves)
            ]
        if conditions.perturbation is not None:
            rng = np.random.default_rng(conditions.perturbation)
            values = [
                perturbed(value, self._roundoff, rng, integers_too=True)
                for value in values
            ]
            leaves = [
                perturbed(leaf, self._roundoff, rng, integers_too=False)
                for leaf in leaves
            ]
        return values, leaves

    @cached_property
    def _seeded(self) -> frozenset[int]:
        return self._batch.keys | {
            place for place, leaf in enumerate(self._batch.leaves) if is_key(leaf)
        }

    @cached_property
    def _roundoff(self) -> float:
        """One rounding of the coarsest floating dtype in the program."""
        return max(
            float(jnp.finfo(kind).eps)
            for kind in float_dtypes(self._program(self.items).closed.jaxpr)
        )

    @cached_property
    def _draws(self) -> list[tuple[Draw, int | None]]:
        large = self._draws_at(self.items)
        for size in dict.fromkeys((-(-self.items // 2), self.items - 1, 1)):
            small = self._draws_at(size) if 0 < size < self.items else []
            if len(small) == len(large):
                return [
                    (one, item_axis(one.shape, other.shape, self.items, size))
                    for one, other in zip(large, small, strict=True)
                ]
        return [(one, None) for one in large]

    def _draws_at(self, size: int) -> list[Draw]:
        count = len(self._parameters.arrays)
        keys, split = (
            {count + place for place in places}
            for places in (self._batch.keys, self._batch.split)
        )
        return draws_of(self._program(size), keys, split)

    def _drawn(self, seed: int) -> Drawn:
        """Return the large batch's numbers to replay; one run for each seed
        suffices.
        """
        if seed not in self._remembered:
            own = [(draw, axis) for draw, axis in self._draws if not draw.within]
            wanted = {
                number: axis
                for number, (draw, axis) in enumerate(own)
                if axis is not None and not draw.by_items
            }
            remember = Replay()
            if wanted:
                values, leaves = self._arguments(Conditions(seed=seed))
                self._program(self.items, seed).run([*values, *leaves], remember)
            self._remembered[seed] = {
                number: (_still(remember.drawn[number]), axis)
                for number, axis in wanted.items()
            }
        return self._remembered[seed]

    def dot(self, a: Array, b: Array) -> float:
        return float(np.vdot(a, b).real)

    def precision(self, name: str) -> Precision:
        """Return the precision; the smallest number is a normal one, because XLA
        flushes subnormal numbers.
        """
        value = self._parameters.values[self._parameters.names[name]]
        return Precision(
            self._roundoff,
            float(jnp.finfo(value.dtype).smallest_normal),
            value.size,
            self._batch.terms,
        )

    def columns(self) -> list[Column]:
        return [
            self._column(place)
            for place in sorted(self._batch.split)
            if _is_readable(self._batch.leaves[place])
        ]

    def _column(self, place: int) -> Column:
        leaf = self._batch.leaves[place]
        axis = self._batch.axes[place]
        assert isinstance(axis, int)
        items = np.moveaxis(np.asarray(leaf), axis, 0)
        numbers = items.reshape(self.items, -1).astype(np.float64).tolist()
        return Column(
            self._batch.paths[place],
            numbers,
            not is_float(leaf),
            leaf.ndim == 2 and axis == 0,
        )

    def statistics_layers(self) -> list[str]:
        return []

    def fixed_draws(self) -> list[str]:
        places = [
            one.place
            for one, axis in self._draws
            if one.bits and axis is not None and not one.by_key and not one.by_items
        ]
        return list(dict.fromkeys(places) | self._pythons())

    def unreplayed_draws(self) -> list[str]:
        return list(
            dict.fromkeys(
                one.place
                for one, _ in self._draws
                if one.bits and one.within and one.by_key
            )
            | self._pythons()
        )

    def _pythons(self) -> dict[str, None]:
        return {PYTHONS: None} if self._python_draws else {}

    def custom_rules(self) -> list[str]:
        return list(
            dict.fromkeys(non_linear_rules(self._program(self.items).closed.jaxpr))
        )


def _still(drawn: Array) -> Array:
    """Return numbers as NumPy's, of which rows are taken without compiling; keys as
    they are.
    """
    return drawn if is_key(drawn) else np.asarray(drawn)


def _is_readable(leaf: Array) -> bool:
    return not is_key(leaf) and leaf.size <= READABLE and not jnp.iscomplexobj(leaf)
