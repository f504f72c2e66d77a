"""The JAX parameters, loss and batch that `gradaccum.verify` examines. A JAX loss has
no state and no training mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.kit import Conditions, Subject, places_of

ROUNDOFFS = {
    "f8": 2.0**-2,
    "bf16": 2.0**-7,
    "f16": 2.0**-10,
    "f32": 2.0**-23,
    "f64": 2.0**-52,
}
"""The relative rounding error of each floating-point dtype, beginning with the coarsest
dtype. The keys are prefixes of the dtypes' names in the text of a JAX program (jaxpr).
"""
Numbers = np.ndarray[Any, Any]


class JaxSubject(Subject):
    """JAX parameters, a loss and one batch. The gradient of the loss is compiled once
    for each seed and each micro-batch size.
    """

    def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(params, *arguments, **options)
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._parameters = jax.tree.map(
            lambda leaf: leaf if is_floating(leaf) else None, params
        )
        self._perturbed_parameters = self._parameters
        self.places = places_of(
            {
                jax.tree_util.keystr(path) or "params": wide(leaf).size
                for path, leaf in jax.tree_util.tree_leaves_with_path(self._parameters)
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
        return array[(*(slice(None),) * axis, np.asarray(items))]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        # Suppress NumPy's warnings, because the report says which gradients are not
        # finite.
        with np.errstate(all="ignore"), super().isolated():
            yield

    def prepare(self, conditions: Conditions) -> None:
        self._perturbed_parameters = self._parameters
        super().prepare(conditions)

    def perturb(self, seed: int) -> None:
        roundoff, _ = self.precision
        generator = np.random.default_rng(seed)

        def perturbed(leaf: Any) -> Numbers:
            signs = generator.choice((-1.0, 1.0), leaf.shape)
            value: Numbers = np.asarray(leaf)
            factor: Numbers = 1 + roundoff * signs
            return (value * factor).astype(value.dtype)

        self._perturbed_parameters = jax.tree.map(perturbed, self._parameters)

    def gradient(self, part: Sequence[int], conditions: Conditions) -> Numbers:
        # Compile a program for each seed, because random numbers that the loss draws
        # with Python or NumPy become constants of the program.
        if conditions.seed not in self._compiled:
            self._compiled[conditions.seed] = jax.jit(jax.grad(self._scaled_loss))
        differentiate = self._compiled[conditions.seed]
        gradients = differentiate(
            self._perturbed_parameters, self.batch.part(part), conditions.scale
        )
        vectors = [wide(leaf) for leaf in jax.tree.leaves(gradients)]
        gradient: Numbers = np.concatenate(vectors) / conditions.scale
        return gradient

    def arrays(self, part: Sequence[int]) -> list[tuple[str, Any]]:
        return [
            (path, array)
            for path, array in self.batch.arrays(part)
            if isinstance(array, np.ndarray)
        ]

    def _scaled_loss(self, parameters: Any, arguments: Any, scale: Any) -> Any:
        params = jax.tree.map(
            lambda old, new: old if new is None else new, self.model, parameters
        )
        with jax.default_matmul_precision("highest"):
            loss = self.loss(params, arguments)
        return loss * jnp.asarray(scale, jnp.result_type(loss))

    def is_divided_by(self, steps: int, reduction: str) -> bool:
        """True if the loss ends with a division by `steps` that is most likely a
        mistake. Dividing a sum is no mistake, because it computes a mean. With the
        reduction "sum", no division is a mistake.
        """
        operations = self._program.eqns[-3:-1]  # the operations before the scaling
        names = [operation.primitive.name for operation in operations]
        if reduction == "sum" or names[-1:] != ["div"]:
            return False
        if names[0] in ("add", "reduce_sum"):
            return False
        return bool(getattr(operations[-1].invars[1], "val", 0) == steps)

    @cached_property
    def _program(self) -> Any:
        """The loss of the whole batch as a JAX program (jaxpr)."""
        arguments = self.batch.part(range(self.batch.items))
        loss = partial(self._scaled_loss, scale=1.0)
        return jax.make_jaxpr(loss)(self._parameters, arguments)

    @cached_property
    def precision(self) -> tuple[float, float]:
        """A pair of numbers. The first is the relative rounding error of the coarsest
        dtype in the compiled loss. The second is the smallest number that is positive
        and normal in the dtypes of all parameters. Subnormal numbers do not count,
        because XLA flushes them to 0.
        """
        names = re.findall(r"\b(b?f\d+)", str(self._program))
        roundoff = max(ROUNDOFFS[name] for name in names if name in ROUNDOFFS)
        limits = [jnp.finfo(leaf.dtype) for leaf in jax.tree.leaves(self._parameters)]
        return roundoff, max(float(each.smallest_normal) for each in limits)


def is_floating(leaf: object) -> bool:
    return JaxSubject.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)  # type: ignore[attr-defined]


def wide(array: Any) -> Numbers:
    """Return an array as a float64 vector, in which a complex number becomes two real
    numbers.
    """
    dtype = np.complex128 if jnp.iscomplexobj(array) else np.float64
    return np.asarray(array).astype(dtype).reshape(-1).view(np.float64)
