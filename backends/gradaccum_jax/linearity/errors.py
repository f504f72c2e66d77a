"""How far gradients are from proportional to the loss's scale: both looks of `check` ask this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import LinearityReport
from gradaccum.kit import SCALES, comparable, linearity_report
from gradaccum_jax.trees import unique
from gradaccum_jax.types import Array, DType, Tree

Gradients = dict[str, Array]
"""Float64 arrays by path."""


def unscaled_gradients(pull_back: Callable[..., Tree], cotangent: Tree) -> Iterator[Gradients]:
    """The pull-back of ``scale * cotangent``, divided by the scale, for each of `SCALES`."""
    for scale in SCALES:
        scaled = jax.tree.map(lambda leaf, s=scale: (leaf * jnp.float32(s)).astype(leaf.dtype) if is_float(leaf) else leaf, cotangent)
        flat = jax.tree_util.tree_flatten_with_path(pull_back(scaled))[0]
        names = unique(jax.tree_util.keystr(path[1:]) or "params" for path, _ in flat)
        yield {name: _wide(leaf) / scale for name, (_, leaf) in zip(names, flat, strict=True) if is_float(leaf)}


def report(gradients: Iterable[Gradients], culprits: Iterable[str], dtypes: Iterable[DType]) -> LinearityReport:
    """The report on gradients at several scales.

    Args:
        gradients: divided by their scales, in the order of `SCALES`.
        culprits: as for `gradaccum.kit.linearity_report`.
        dtypes: the floating dtypes in the program.
    """
    met = set(map(jnp.dtype, dtypes))
    compared = comparable(gradients, _is_finite, float16=jnp.dtype(jnp.float16) in met)
    return linearity_report(compared, culprits, max((float(jnp.finfo(dtype).eps) for dtype in met), default=0.0), _norm)


def is_float(leaf: Array) -> bool:
    """Whether `leaf` is of a real or complex floating dtype."""
    return bool(jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf), jnp.inexact))


def _is_finite(gradients: Gradients) -> bool:
    return all(np.isfinite(gradient).all() for gradient in gradients.values())


def _norm(gradient: Array) -> float:
    return float(np.linalg.norm(gradient))


def _wide(leaf: Array) -> Array:
    return np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64)
