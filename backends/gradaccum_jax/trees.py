"""Trees that other libraries and users build: flax nnx's variables, None in place of a leaf, two leaves under one path."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from gradaccum_jax.types import Tree


def plain(tree: Tree) -> Tree:
    """`tree` with the array of each flax nnx variable in the variable's place, as `flax.nnx.pure` does; other trees as they are.

    A variable is known by an attribute, so flax need not be installed.
    """
    return jax.tree.map(lambda node: node[...] if is_variable(node) else node, tree, is_leaf=is_variable)


def is_none(node: object) -> bool:
    """Whether `node` is None: ``is_leaf=is_none`` keeps the place of a leaf that is not there."""
    return node is None


def unique(names: Iterable[str]) -> list[str]:
    """`names` of leaves in their order, with a prime at each repeated one: a pytree node may report one key for several children."""
    seen: dict[str, None] = {}
    for name in names:
        while name in seen:
            name += "'"
        seen[name] = None
    return list(seen)


def is_variable(node: object) -> bool:
    """True if `node` is a variable of flax nnx."""
    return hasattr(type(node), "raw_value")
