"""Layers that are objects, and the state of a flax nnx module in a recomputed function.

An nnx module changes its state in place: running statistics, the counter of a random stream. In a traced function such a change would be
lost, or made twice. So the state goes in as a value, both runs start from it, and the first run's state is written back once. flax is known
by what is imported already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_jax.arrays import Tree

Layer = Callable[..., Any]
"""A function, an nnx module, or a bound method of one."""


def owner_of(layer: Layer) -> object:
    """Return the nnx module that `layer` is, or is a method of; None for a plain function."""
    nnx = sys.modules.get("flax.nnx")
    return next((one for one in (layer, getattr(layer, "__self__", None)) if nnx and isinstance(one, nnx.Module)), None)


def applied(layers: Sequence[Layer], arguments: tuple[Any, ...], named: dict[str, Any], owners: Sequence[Any] = ()) -> Any:
    """Apply the layers one after the other; `owners` replace those of `owner_of`. All but the first argument goes to every layer."""
    for layer, owner in zip(layers, owners or [None] * len(layers), strict=True):
        method = getattr(layer, "__func__", None)
        bound = layer if owner is None else owner if method is None else functools.partial(method, owner)
        arguments = (bound(*arguments, **named), *arguments[1:])
    return arguments[0]


def threaded(run: Callable[..., Tree], nest: Tree, replay: Callable[..., Tree]) -> Tree:
    nodes, structure = jax.tree.flatten(nest, is_leaf=_is_stateful)
    places = [place for place, node in enumerate(nodes) if _is_stateful(node)]
    if not places:
        return replay(run, nest)
    nnx: Any = sys.modules["flax.nnx"]
    modules = [nodes[place] for place in places]
    definition, state = nnx.split(modules)

    def pure(state: Tree, others: list[Any]) -> Tree:
        copies = nnx.merge(definition, state)
        given = dict(zip(places, copies, strict=True))
        result = run(*jax.tree.unflatten(structure, [given.get(place, node) for place, node in enumerate(others)]))
        after, state = nnx.split(copies)
        if after != definition:
            expected, found = "modules that keep their structure", "one that made or dropped variables"
            fix = "Make its variables before: run the module once without recompute, or keep such a layer outside."
            raise explain(UsageError, "recompute", expected=expected, found=found, fix=fix)
        return result, state

    result, state = replay(pure, (state, [None if place in places else node for place, node in enumerate(nodes)]))
    nnx.update(modules, state)
    return result


def _is_stateful(node: object) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, (nnx.Module, nnx.Variable, nnx.Rngs, nnx.RngStream))


def require_functional(layer: Layer) -> None:
    """Raise unless the layer is free of flax linen modules: JAX would leak or drop what they write."""
    linen: Any = sys.modules.get("flax.linen")
    cells = getattr(layer, "__closure__", None) or ()
    enclosed = [cell.cell_contents for cell in cells if cell != type(cell)()]  # An empty cell is not assigned yet.
    for one in (layer, getattr(layer, "__self__", None), *enclosed):
        if linen and isinstance(one, linen.Module) and (one is layer or one.scope is not None):
            name = type(one).__name__
            fix = f"Write recompute({name}(...).apply), or flax.linen.remat({name}) inside a module."
            raise explain(UsageError, "recompute", expected="a pure function", found=f"{name}, a flax linen module", fix=fix)
