"""How far gradients are from proportional to the loss's scale: what both looks of `check` share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import SCALES
from gradaccum_jax.paths import unique

Gradients = dict[str, Any]
"""Float64 arrays by path."""

FLOAT16_SCALES = 4
"""How many scales are compared where float16's narrow range is in the way."""


def unscaled_gradients(pull_back: Any, cotangent: Any) -> Iterator[Gradients]:
    """The pull-back of ``scale * cotangent``, divided by the scale, for each of `SCALES`."""
    for scale in SCALES:
        scaled = jax.tree.map(lambda leaf, s=scale: (leaf * jnp.float32(s)).astype(leaf.dtype) if is_float(leaf) else leaf, cotangent)
        flat = jax.tree_util.tree_flatten_with_path(pull_back(scaled))[0]
        names = unique(jax.tree_util.keystr(path[1:]) or "params" for path, _ in flat)
        yield {name: _wide(leaf) / scale for name, (_, leaf) in zip(names, flat, strict=True) if is_float(leaf)}


def errors_by_scale(gradients: Iterable[Gradients], dtypes: Iterable[Any]) -> Iterator[dict[str, float]]:
    """``||g(s) / s - g(1)|| / ||g(1)||`` for each scale; with float16 of the largest scales alone, relative to the first of them.

    Args:
        gradients: divided by their scales, in the order of `SCALES`.
        dtypes: those in the program.
    """
    compared = iter(_largest_scales(gradients) if jnp.dtype(jnp.float16) in set(dtypes) else gradients)
    first = next(compared)
    yield {name: 0.0 if np.isfinite(g).all() else np.inf for name, g in first.items()}
    for other in compared:
        yield {name: _relative(g - first[name], first[name]) for name, g in other.items()}


def tolerance(dtypes: Iterable[Any]) -> float:
    """Four units in the last place of the coarsest of `dtypes`."""
    return 4 * max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def is_float(leaf: Any) -> bool:
    """Whether it is of a real or complex floating dtype."""
    return bool(jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf), jnp.inexact))


def _largest_scales(gradients: Iterable[Gradients]) -> Iterable[Gradients]:
    """The last `FLOAT16_SCALES` that are finite: at smaller ones gradients may have vanished, larger ones overflow."""
    every = iter(gradients)
    first = next(every)
    finite = (tree for tree in chain([first], every) if all(np.isfinite(g).all() for g in tree.values()))
    return deque(finite, FLOAT16_SCALES) or [first]


def _relative(difference: Any, size: Any) -> float:
    off, whole = float(np.linalg.norm(difference)), float(np.linalg.norm(size))
    return 0.0 if off == 0 else off / whole if whole else np.inf


def _wide(leaf: Any) -> Any:
    return np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64)
