"""Nests of arrays: the containers, such as tuples and dicts, in which users pass a
batch. The JAX backend uses JAX's pytrees instead.

A nest is a leaf, or a tuple, list, mapping or dataclass of nests. A list or tuple of
plain values (strings, numbers) is one leaf with one value per item.

Any other list or tuple is a container, each of whose elements should hold data for all
items. A user may by mistake pass a list of items, such as one dict per image. So
`require_one_size` rejects any list that may be a list of items, unless the user's
``axes`` define how the list is split.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from gradaccum.errors import ArgumentValueError

Nest: TypeAlias = object
"""A leaf of any type, or a container of nests."""

PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""The types of plain Python values, which contain no array and are not split: every
micro-batch gets the whole value.
"""


class Leaf(NamedTuple):
    """One leaf of a nest."""

    path: str
    """The Python expression that reads the leaf, such as ``batch[0]['ids']``."""
    value: object


def leaves_of(nest: Nest, path: str = "") -> list[Leaf]:
    """Return the leaves of `nest` in order, each with its path. Every path begins with
    `path`.
    """
    inside = children_of(nest)
    if inside is None:
        return [Leaf(path, nest)]
    return [leaf for step, child in inside for leaf in leaves_of(child, path + step)]


def children_of(nest: Nest) -> list[tuple[str, Nest]] | None:
    """Return the children of `nest`, each with the last step of its path, such as
    ``[0]``. Return None if `nest` is a leaf.
    """
    if _is_dataclass(nest):
        return [
            (f".{field.name}", getattr(nest, field.name))
            for field in dataclasses.fields(nest)  # type: ignore[arg-type]
        ]
    if isinstance(nest, Mapping):
        return [(f"[{key!r}]", value) for key, value in nest.items()]
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return [
            (f".{name}", value) for name, value in zip(nest._fields, nest, strict=True)
        ]
    if isinstance(nest, list | tuple) and not is_column(nest):
        return _elements(nest)
    return None


def is_column(nest: Nest) -> bool:
    """True if `nest` is a list or tuple of plain values, which counts as one leaf with
    one value per item.
    """
    if not _is_list(nest):
        return False
    return bool(nest) and all(isinstance(value, PLAIN) for value in nest)  # type: ignore[attr-defined]


def with_leaves(nest: Nest, leaves: Iterator[object]) -> Nest:
    """Return a copy of `nest` whose leaves are replaced, in order, with the next
    elements of `leaves`. The containers keep their types.
    """
    inside = children_of(nest)
    if inside is None:
        return next(leaves)
    return _rebuilt(nest, [with_leaves(child, leaves) for _, child in inside])


def mapped(change: Callable[[object], object], nest: Nest) -> Nest:
    """Return a copy of `nest` in which ``change(leaf)`` replaces each leaf."""
    return with_leaves(nest, (change(leaf.value) for leaf in leaves_of(nest)))


def spread(prefix: Nest, nest: Nest, argument: str) -> list[object]:
    """Return one value of `prefix` for each leaf of `nest`.

    Args:
        prefix: one value for all leaves, or a nest in which each leaf applies to
            everything below the same position in `nest`, such as ``{"ids": 0, "flags":
            None}``.
        nest: the nest whose leaves need the values.
        argument: the name of `prefix` in error messages.

    Raises:
        ArgumentValueError: `prefix` has containers that `nest` does not have.
    """
    given = _inside(prefix)
    if given is None:
        return [prefix for _ in leaves_of(nest)]
    below = children_of(nest)
    if below is None or [step for step, _ in given] != [step for step, _ in below]:
        steps = ", ".join(step for step, _ in below or ())
        raise ArgumentValueError(
            f"{argument}: expected one value, or a structure with the same outer levels"
            f" as {type(nest).__name__}({steps}); got {prefix!r}"
            f" ({type(prefix).__name__}). Pass one value for all arrays, or a structure"
            " with the same keys and lengths as the batch."
        )
    return [
        value
        for (step, part), (_, child) in zip(given, below, strict=True)
        for value in spread(part, child, argument + step)
    ]


def lists_of_one_kind(
    batch: Nest, axes: Nest, path: str = "batch"
) -> list[tuple[str, int]]:
    """Find the lists and tuples inside `batch` whose elements may be the items of the
    batch. Return the path and the length of each such list or tuple.

    The elements may be the items if they all have the same type, dtype and rank.
    Elements that are None are ignored in this comparison. A list or tuple is left out
    if `axes` contains None for the whole list, or a separate entry for each element,
    because it is then known how the list is split.

    Args:
        batch: a tuple of arguments, or another nest.
        axes: a prefix of `batch` that `spread` accepts.
        path: the text with which each path begins.
    """
    if axes is None:
        return []
    axes_by_step = dict(_inside(axes) or ())
    lists = list[tuple[str, int]]()
    for step, child in children_of(batch) or ():
        child_axes = axes_by_step.get(step, axes)
        elements = children_of(child)
        is_named = child_axes is None or _inside(child_axes) is not None
        if elements and _is_list(child) and not is_named and _are_alike(elements):
            lists.append((path + step, len(elements)))
        lists += lists_of_one_kind(child, child_axes, path + step)
    return lists


def _are_alike(elements: list[tuple[str, Nest]]) -> bool:
    """True if all elements that are not None have the same type, dtype and rank."""
    kinds = {
        (type(v), str(getattr(v, "dtype", None)), getattr(v, "ndim", None))
        for _, v in elements
        if v is not None
    }
    return len(kinds) == 1


def _is_list(nest: Nest) -> bool:
    return isinstance(nest, list | tuple) and not hasattr(nest, "_fields")


def _elements(nest: list[Nest] | tuple[Nest, ...]) -> list[tuple[str, Nest]]:
    return [(f"[{place}]", value) for place, value in enumerate(nest)]


def _inside(prefix: Nest) -> list[tuple[str, Nest]] | None:
    """Return the children of one node of a prefix, or None if the node is a leaf. A
    prefix is a nest that has only the outer levels of another nest. A list of plain
    values, such as ``[0, None]``, is a container in a prefix, but a leaf in other
    nests.
    """
    return _elements(prefix) if _is_list(prefix) else children_of(prefix)  # type: ignore[arg-type]


def _is_dataclass(nest: Nest) -> bool:
    return hasattr(type(nest), "__dataclass_fields__")


def _rebuilt(nest: Nest, children: list[Nest]) -> Nest:
    """Return a copy of a container with new children. A dataclass or mapping is copied
    and then changed, because its constructor could check lengths or compute fields.
    """
    if _is_dataclass(nest):
        made = copy.copy(nest)
        for field, child in zip(dataclasses.fields(nest), children, strict=True):  # type: ignore[arg-type]
            object.__setattr__(made, field.name, child)
        return made
    if isinstance(nest, Mapping):
        made = copy.copy(nest)
        made.update(zip(nest, children, strict=True))  # type: ignore[attr-defined]
        return made
    if hasattr(nest, "_fields"):
        return type(nest)(*children)
    return type(nest)(children)  # type: ignore[call-arg]
