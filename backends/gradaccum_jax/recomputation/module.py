"""Layers that are objects: which are taken, and how the state of a flax nnx module goes through a recomputed function.

An nnx module changes its state in place: running statistics, the counter of a random stream. In a function that JAX traces, such a change
would be lost, or made twice. So the state goes in as a value, the second run starts from the same one, and the state that the first run
made is written back once. flax is known by what is imported already, so it need not be installed.
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
    """The nnx module that `layer` is, or is a method of; None for a plain function."""
    nnx = sys.modules.get("flax.nnx")
    return next((one for one in (layer, getattr(layer, "__self__", None)) if nnx and isinstance(one, nnx.Module)), None)


def applied(layers: Sequence[Layer], owners: Sequence[object], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The layers one after the other; `owners` stand in for those of `owner_of`. All but the first argument goes to every layer."""
    bound = [_with_owner(layer, owner) for layer, owner in zip(layers, owners, strict=True)]
    value = bound[0](*arguments, **named)
    for layer in bound[1:]:
        value = layer(value, *arguments[1:], **named)
    return value


def stateful(nest: Tree) -> bool:
    """True if `nest` holds an nnx module, a variable or a random stream."""
    return any(map(_is_stateful, jax.tree.leaves(nest, is_leaf=_is_stateful)))


def threaded(run: Callable[..., Tree], nest: Tree, replay: Callable[..., Tree]) -> Tree:
    """``run(nest)`` by way of `replay`, with the state of the modules in `nest` as one more input and result.

    Args:
        run: of a nest like `nest`.
        nest: holds nnx modules.
        replay: ``replay(function, arguments)``.

    Raises:
        UsageError: the run gave a module another structure. The modules are as they were.
    """
    nnx: Any = sys.modules["flax.nnx"]
    nodes, structure = jax.tree.flatten(nest, is_leaf=_is_stateful)
    places = [place for place, node in enumerate(nodes) if _is_stateful(node)]
    modules = [nodes[place] for place in places]
    definition, state = nnx.split(modules)

    def pure(state: Tree, others: list[Any]) -> Tree:
        copies, filled = nnx.merge(definition, state), list(others)
        for place, copy in zip(places, copies, strict=True):
            filled[place] = copy
        result = run(jax.tree.unflatten(structure, filled))
        after, state = nnx.split(copies)
        if after != definition:
            raise _structure_error()
        return result, state

    result, state = replay(pure, (state, [None if place in places else node for place, node in enumerate(nodes)]))
    nnx.update(modules, state)
    return result


def _is_stateful(node: object) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, (nnx.Module, nnx.Variable, nnx.Rngs, nnx.RngStream))


def require_functional(layer: Layer) -> None:
    """Refuse a flax linen module, or a method bound to one.

    Raises:
        UsageError: it is one. Its variables belong to the transformation that runs it, which `jax.checkpoint` would be invisible to.
    """
    linen: Any = sys.modules.get("flax.linen")
    if linen is None:
        return
    held = [layer, getattr(layer, "__self__", None), *_enclosed(layer)]
    bound = [one for one in held if isinstance(one, linen.Module) and (one is layer or one.scope is not None)]
    if bound:
        name = type(bound[0]).__name__
        fix = f"Write recompute({name}(...).apply), or flax.linen.remat({name}) inside a module."
        raise explain(UsageError, "recompute", expected="a pure function", found=f"{name}, a flax linen module", fix=fix)


def _with_owner(layer: Layer, owner: object) -> Layer:
    if owner is None:
        return layer
    function = getattr(layer, "__func__", None)
    return functools.partial(function, owner) if function is not None else owner  # type: ignore[return-value]


def _enclosed(layer: Layer) -> list[object]:
    """What a function closes over; a cell that is not filled yet holds nothing."""
    cells = getattr(layer, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != type(cell)()]


def _structure_error() -> UsageError:
    fix = "Make its variables before: run the module once without recompute, or keep such a layer outside."
    return explain(
        UsageError, "recompute", expected="modules that keep their structure", found="one that made or dropped variables", fix=fix
    )
