"""The JAX parameters, loss and batch that `gradaccum.verify` examines. A JAX loss has no
state and no training mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.kit import Conditions, HostRandom, Subject, places_of

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


class JaxSubject(Subject):
    """The loss is compiled once for each size of micro-batch."""

    calls_model = False

    def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(params, *arguments, **options)
        self._host = HostRandom()
        self._compiled: dict[int, Callable[..., Any]] = {}
        paths_and_leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._leaves = [leaf for _, leaf in paths_and_leaves]
        self._indices: dict[str, int] = {}
        """The index of each floating-point parameter in `_leaves`, by the parameter's
        name.
        """
        for index, (path, leaf) in enumerate(paths_and_leaves):
            if self.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact):
                self._indices[jax.tree_util.keystr(path) or "params"] = index
        self._parameters = [self._leaves[index] for index in self._indices.values()]
        self._values = self._parameters
        self.places = places_of(
            {
                name: self._leaves[index].size
                * (1 + jnp.iscomplexobj(self._leaves[index]))
                for name, index in self._indices.items()
            }
        )

    @staticmethod
    def is_array(value: object) -> bool:
        return isinstance(value, jax.Array | np.ndarray)

    @staticmethod
    def take(array: Any, axis: int | None, items: Sequence[int]) -> Any:
        if axis is None:
            return array
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = np.asarray(array)  # NumPy takes rows without compiling.
        places = (slice(None),) * (axis % array.ndim)
        return array[(*places, np.asarray(items))]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        try:
            # NumPy need not warn, because the report says which gradients are not
            # finite.
            with np.errstate(all="ignore"):
                yield
        finally:
            self._host.restore()

    def prepare(self, conditions: Conditions) -> None:
        self._values = self._parameters
        if conditions.perturbation is None:
            return
        roundoff, _ = self.precision
        generator = np.random.default_rng(conditions.perturbation)
        self._values = []
        for value in self._parameters:
            signs = generator.choice((-1.0, 1.0), value.shape)
            perturbed_value = wide(value) * (1 + roundoff * signs)
            self._values.append(perturbed_value.astype(value.dtype))

    def set_random_state(self, seed: int) -> None:
        self._host.restore(seed)

    def gradient(self, part: Sequence[int], conditions: Conditions) -> Numbers:
        # A program is compiled for each seed, because random numbers that the loss
        # draws from Python and NumPy are constants of a program.
        if conditions.seed not in self._compiled:
            self._compiled[conditions.seed] = jax.jit(jax.grad(self._scaled_loss))
        differentiate = self._compiled[conditions.seed]
        arguments = self.batch.part(part)
        gradients = differentiate(self._values, arguments, conditions.scale)
        vectors = [wide(gradient).reshape(-1) for gradient in gradients]
        return np.concatenate([v.view(np.float64) for v in vectors]) / conditions.scale

    def arrays(self, part: Sequence[int]) -> list[tuple[str, Any]]:
        return [
            (path, array)
            for path, array in self.batch.arrays(part)
            if isinstance(array, np.ndarray)
        ]

    def _scaled_loss(self, values: list[Any], arguments: Any, scale: Any) -> Any:
        leaves = list(self._leaves)
        for index, value in zip(self._indices.values(), values, strict=True):
            leaves[index] = value
        params = jax.tree.unflatten(self._structure, leaves)
        with jax.default_matmul_precision("highest"):
            loss = self.loss(params, arguments)
        return loss * jnp.asarray(scale, jnp.result_type(loss))

    @cached_property
    def precision(self) -> tuple[float, float]:
        """The relative rounding error of the coarsest dtype in the compiled loss. The
        smallest number is a normal number, because XLA flushes subnormal numbers to 0.
        """
        arguments = self.batch.part(range(self.batch.items))
        program = jax.make_jaxpr(self._scaled_loss)(self._parameters, arguments, 1.0)
        names = re.findall(r"\b(b?f\d+)", str(program))
        roundoff = max(ROUNDOFFS[name] for name in names if name in ROUNDOFFS)
        limits = [jnp.finfo(value.dtype) for value in self._parameters]
        return roundoff, max(float(each.smallest_normal) for each in limits)


def wide(array: Any) -> Numbers:
    dtype = np.complex128 if jnp.iscomplexobj(array) else np.float64
    return np.asarray(array).astype(dtype)
