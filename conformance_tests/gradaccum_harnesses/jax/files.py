"""A session's trees in a NumPy archive, each leaf under its path, which every JAX reads
without a further package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from gradaccum_jax.saving import by_path


def write(file: Path, tree: dict[str, Any]) -> None:
    np.savez(file, **{path: np.asarray(leaf) for path, leaf in by_path(tree).items()})


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the leaves by the first name of their path, then by the rest, as a library
    restores plain dicts.
    """
    trees: dict[str, dict[str, Any]] = {}
    with np.load(file) as archive:
        for path, array in archive.items():
            tree, _, rest = path.partition(".")
            trees.setdefault(tree, {})[rest] = _typed(array)
    return trees


def _typed(array: Any) -> Any:
    """Restore the dtype: NumPy's archive forgets bfloat16."""
    return array.view(jnp.bfloat16) if array.dtype.kind == "V" else array
