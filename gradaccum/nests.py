"""Nests of arrays: the shapes that a batch comes in.

A nest is a tuple, a list, a dict or another mapping, a dataclass, any of these in each other, or a leaf: whatever else stands there. A list
or tuple of plain values (texts, numbers) is one leaf with one value per item, since nobody splits a text. JAX has trees of its own, to
which users add classes; the other adapters walk nests by this module, and every adapter spells a path as `paths` does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import NamedTuple, TypeAlias

from gradaccum.errors import ArgumentValueError, GradAccumError, explain

Nest: TypeAlias = object
"""Containers around leaves of any kind."""

PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""The types of values that hold no array."""


class Leaf(NamedTuple):
    """One leaf of a nest."""

    path: str
    """Where it stands, as Python that reads it: ``batch[0]['ids']``."""
    value: object
    """What stands there."""


def leaves_of(nest: Nest, path: str = "") -> list[Leaf]:
    """The leaves of `nest` in order, each with its path, which begins with `path`."""
    inside = children_of(nest)
    if inside is None:
        return [Leaf(path, nest)]
    return [leaf for step, child in inside for leaf in leaves_of(child, path + step)]


def children_of(nest: Nest) -> list[tuple[str, Nest]] | None:
    """What a container holds, each with its step of a path; None of a leaf."""
    if _is_dataclass(nest):
        return [(f".{field.name}", getattr(nest, field.name)) for field in dataclasses.fields(nest)]  # type: ignore[arg-type]
    if isinstance(nest, Mapping):
        return [(f"[{key!r}]", value) for key, value in nest.items()]
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return [(f".{name}", value) for name, value in zip(nest._fields, nest, strict=True)]
    if isinstance(nest, list | tuple) and not is_column(nest):
        return [(f"[{place}]", value) for place, value in enumerate(nest)]
    return None


def is_column(nest: Nest) -> bool:
    """Whether `nest` is a list or tuple of plain values: one per item."""
    return isinstance(nest, list | tuple) and not hasattr(nest, "_fields") and bool(nest) and all(isinstance(v, PLAIN) for v in nest)


def with_leaves(nest: Nest, leaves: Iterator[object]) -> Nest:
    """A nest like `nest` with the next `leaves` in place of its own; containers keep their types, and `nest` stays as it is."""
    inside = children_of(nest)
    if inside is None:
        return next(leaves)
    return _rebuilt(nest, [with_leaves(child, leaves) for _, child in inside])


def mapped(change: Callable[[object], object], nest: Nest) -> Nest:
    """A nest like `nest` with ``change(leaf)`` for each leaf."""
    return with_leaves(nest, (change(leaf.value) for leaf in leaves_of(nest)))


def spread(prefix: Nest, nest: Nest, argument: str) -> list[object]:
    """One value of `prefix` for each leaf of `nest`: a leaf of `prefix` stands for everything below its place in `nest`.

    Args:
        prefix: a nest whose containers are a beginning of those of `nest`: ``{"ids": 0, "flags": None}``, or one value for all.
        nest: what the values are for.
        argument: the name of `prefix`, for the error.

    Raises:
        ArgumentValueError: `prefix` has containers that `nest` has not.
    """
    given = children_of(prefix)
    if isinstance(prefix, list | tuple) and not hasattr(prefix, "_fields"):
        given = [(f"[{place}]", value) for place, value in enumerate(prefix)]
    if given is None:
        return [prefix for _ in leaves_of(nest)]
    below = children_of(nest)
    if below is None or [step for step, _ in given] != [step for step, _ in below]:
        raise _prefix_error(argument, prefix, nest)
    return [v for (step, part), (_, child) in zip(given, below, strict=True) for v in spread(part, child, argument + step)]


def _prefix_error(argument: str, prefix: Nest, nest: Nest) -> GradAccumError:
    fix = "Give one value for all, or a nest whose keys and lengths are those of the nest that it is for."
    return explain(ArgumentValueError, argument, expected=f"a prefix of a nest like {_outline(nest)}", got=prefix, fix=fix)


def _outline(nest: Nest) -> str:
    inside = children_of(nest)
    if inside is None:
        return type(nest).__name__
    return f"{type(nest).__name__}({', '.join(step for step, _ in inside)})"


def _is_dataclass(nest: Nest) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def _rebuilt(nest: Nest, children: list[Nest]) -> Nest:
    """A copy of a container, with no constructor run where a copy can be changed: a constructor may check lengths or derive values."""
    if _is_dataclass(nest):
        made = copy.copy(nest)
        for field, child in zip(dataclasses.fields(nest), children, strict=True):  # type: ignore[arg-type]
            object.__setattr__(made, field.name, child)
        return made
    if isinstance(nest, Mapping):
        return _rebuilt_mapping(nest, dict(zip(nest, children, strict=True)))
    if hasattr(nest, "_fields"):
        return type(nest)(*children)
    return type(nest)(children)  # type: ignore[call-arg]


def _rebuilt_mapping(nest: Mapping[object, Nest], content: dict[object, Nest]) -> Nest:
    if not isinstance(nest, MutableMapping):
        return type(nest)(content)  # type: ignore[call-arg]
    made = copy.copy(nest)
    for key, value in content.items():
        made[key] = value
    return made
