"""Trees in which flax nnx keeps its arrays: each stands inside a variable there."""

from __future__ import annotations

from typing import Any

import jax


def plain(tree: Any) -> Any:
    """`tree` with the array of each flax nnx variable in the variable's place, as `flax.nnx.pure` does; other trees as they are.

    Known by an attribute, so that flax need not be installed.
    """
    return jax.tree.map(lambda node: node[...] if _is_variable(node) else node, tree, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    return hasattr(type(node), "raw_value")
