"""Run a JAX loss on parts of a batch, under the conditions that `gradaccum.verify`
compares. A JAX loss has no state and no training mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.kit import Batch, Conditions, HostRandom, Precision, Run

ROUNDOFFS = {
    "f8": 2.0**-2,
    "bf16": 2.0**-7,
    "f16": 2.0**-10,
    "f32": 2.0**-23,
    "f64": 2.0**-52,
}
"""The relative rounding error of each floating-point dtype, beginning with the coarsest
dtype. A key is the beginning of a dtype's name in the text of a JAX program (jaxpr).
"""
Numbers = np.ndarray[Any, Any]


class JaxSubject:
    """The JAX implementation of `gradaccum.kit.Subject`: a loss with its parameters and
    a batch.
    """

    def __init__(
        self,
        params: Any,
        loss_fn: Callable[..., Any],
        batch: Batch,
        weight: Callable[[Sequence[int]], float],
        has_aux: bool,
    ) -> None:
        self._loss_fn = loss_fn
        self._batch = batch
        self._weight = weight
        self._has_aux = has_aux
        self._host = HostRandom()
        self._compiled: dict[int, Callable[..., Any]] = {}
        paths_and_leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._leaves = [leaf for _, leaf in paths_and_leaves]
        self._places: dict[str, int] = {}
        """The index of each floating-point parameter in `_leaves`, by the parameter's
        name.
        """
        for place, (path, leaf) in enumerate(paths_and_leaves):
            if is_floating(leaf):
                self._places[jax.tree_util.keystr(path) or "params"] = place
        self.items = batch.items
        self.names: Sequence[str] = list(self._places)

    def window(
        self, parts: Sequence[Sequence[int]], conditions: Conditions
    ) -> list[Run]:
        values = self._values(conditions.perturbation)
        runs = []
        for part in parts:
            arguments = self._batch.part(part)
            try:
                # The loss may draw random numbers from Python or NumPy while JAX traces
                # it, so their generators are seeded first.
                self._host.restore(conditions.seed)
                differentiate = self._differentiate(conditions.seed)
                gradient_list = differentiate(values, arguments, conditions.scale)
            finally:
                self._host.restore()
            gradients = {
                name: wide(gradient) / conditions.scale
                for name, gradient in zip(self.names, gradient_list, strict=True)
            }
            runs.append(Run(gradients, self._weight(part)))
        return runs

    def dot(self, a: Numbers, b: Numbers) -> float:
        return float(np.vdot(a, b).real)

    def precision(self, name: str) -> Precision:
        """Return the floating-point precision of the parameter `name`. Its smallest
        number is a normal number, because XLA flushes subnormal numbers to 0.
        """
        value = self._leaves[self._places[name]]
        smallest = float(jnp.finfo(value.dtype).smallest_normal)
        return Precision(self._roundoff, smallest, value.size, self._batch.terms)

    def arrays(self, part: Sequence[int]) -> list[tuple[str, Any]]:
        return [
            (path, array)
            for path, array in self._batch.arrays(part)
            if isinstance(array, np.ndarray)
        ]

    def statistics_layers(self) -> Sequence[str]:
        return ()

    def random_layers(self) -> Sequence[str]:
        return ()

    def is_divided_by(self, steps: int | None) -> bool:
        """True if the last operation of the loss is a division by `steps` that does not
        compute a mean. It computes a mean if the dividend is a sum.
        """
        operations = self._program.eqns[-3:-1]  # the operations before the scaling
        names = [operation.primitive.name for operation in operations]
        if names[-1:] != ["div"] or names[0] in ("add", "reduce_sum"):
            return False
        return bool(getattr(operations[-1].invars[1], "val", 0) == steps)

    def _values(self, perturbation: int | None = None) -> list[Any]:
        """Return the floating-point parameters. If the seed `perturbation` is given,
        each element is increased or decreased at random by one rounding error.
        """
        values = [self._leaves[place] for place in self._places.values()]
        if perturbation is None:
            return values
        generator = np.random.default_rng(perturbation)
        return [
            (
                wide(value)
                * (1 + self._roundoff * generator.choice((-1.0, 1.0), value.shape))
            ).astype(value.dtype)
            for value in values
        ]

    def _differentiate(self, seed: int) -> Callable[..., Any]:
        """Return the compiled gradient of the loss. A program is compiled for each
        seed, because random numbers from Python and NumPy are constants of a program.
        """
        if seed not in self._compiled:
            self._compiled[seed] = jax.jit(jax.grad(self._scaled_loss))
        return self._compiled[seed]

    def _scaled_loss(self, values: list[Any], arguments: Any, scale: Any) -> Any:
        leaves = list(self._leaves)
        for place, value in zip(self._places.values(), values, strict=True):
            leaves[place] = value
        params = jax.tree.unflatten(self._structure, leaves)
        with jax.default_matmul_precision("highest"):
            loss = self._loss_fn(params, *arguments)
        if self._has_aux:
            loss, _ = loss
        return loss * jnp.asarray(scale, jnp.result_type(loss))

    @cached_property
    def _program(self) -> Any:
        arguments = self._batch.part(range(self.items))
        loss = partial(self._scaled_loss, scale=1.0)
        program = jax.make_jaxpr(loss)(self._values(), arguments)
        self._host.restore()
        return program

    @cached_property
    def _roundoff(self) -> float:
        """The relative rounding error of the coarsest floating-point dtype in the
        compiled loss.
        """
        names = re.findall(r"\b(b?f\d+)", str(self._program))
        return max(ROUNDOFFS[name] for name in names if name in ROUNDOFFS)


def is_floating(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and bool(
        jnp.issubdtype(leaf.dtype, jnp.inexact)
    )


def wide(array: Any) -> Numbers:
    dtype = np.complex128 if jnp.iscomplexobj(array) else np.float64
    return np.asarray(array).astype(dtype)
