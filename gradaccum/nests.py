"""Nests of arrays: the containers that a batch comes in.

A nest is a tuple, list, mapping or dataclass of nests, or a leaf. A list or tuple of
plain values (texts, numbers) is one leaf with one value per item. JAX has trees of its
own.

Any other list or tuple is a container whose elements each hold a part of all items. A
list of items (one dict per image) looks the same, so `require_one_size` refuses an
ambiguous list until the user's ``axes`` say what it is. Only a tuple of arrays of one
length other than the tuple's own, ``(x, y)``, needs no ``axes``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from gradaccum.errors import ArgumentValueError, GradAccumError, explain

Nest: TypeAlias = object
"""Containers around leaves of any kind."""
N = TypeVar("N")

PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""The types of values that hold no array."""


ITEMS = "items"
"""In place of an axis: the elements of this list or tuple are the items."""


class Items(list[object]):
    """A list whose elements are the items: one leaf. A slice of it is a plain list."""


class Leaf(NamedTuple):
    """One leaf of a nest."""

    path: str
    """Where it stands, as Python that reads it: ``batch[0]['ids']``."""
    value: object
    """What stands there."""


def leaves_of(nest: Nest, path: str = "") -> list[Leaf]:
    """Return the leaves of `nest` in order, each with its path, which begins with
    `path`.
    """
    inside = children_of(nest)
    if inside is None:
        return [Leaf(path, nest)]
    return [leaf for step, child in inside for leaf in leaves_of(child, path + step)]


def children_of(nest: Nest) -> list[tuple[str, Nest]] | None:
    """Return the children of a container, each with its step of a path; None for a
    leaf.
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
    """True if `nest` is one leaf with an element per item: `Items`, or a list or tuple
    of plain values.
    """
    return isinstance(nest, Items) or (
        _is_list(nest) and bool(nest) and all(isinstance(v, PLAIN) for v in nest)  # type: ignore[attr-defined]
    )


def with_leaves(nest: Nest, leaves: Iterator[object]) -> Nest:
    """Return a nest like `nest` with the next `leaves` in place of its own; containers
    keep their types.
    """
    inside = children_of(nest)
    if inside is None:
        return next(leaves)
    return _rebuilt(nest, [with_leaves(child, leaves) for _, child in inside])


def mapped(change: Callable[[object], object], nest: Nest) -> Nest:
    """Return a nest like `nest` with ``change(leaf)`` for each leaf."""
    return with_leaves(nest, (change(leaf.value) for leaf in leaves_of(nest)))


def spread(prefix: Nest, nest: Nest, argument: str) -> list[object]:
    """Return one value of `prefix` for each leaf of `nest`.

    Args:
        prefix: one value for all, or a nest whose leaves stand for everything below
            their place: ``{"ids": 0, "flags": None}``.
        nest: what the values are for.
        argument: the name of `prefix`, for the error.

    Raises:
        ArgumentValueError: `prefix` has containers that `nest` has not.
    """
    given = _inside(prefix)
    if given is None:
        return [prefix for _ in leaves_of(nest)]
    below = children_of(nest)
    if below is None or [step for step, _ in given] != [step for step, _ in below]:
        raise _prefix_error(argument, prefix, nest)
    return [
        v
        for (step, part), (_, child) in zip(given, below, strict=True)
        for v in spread(part, child, argument + step)
    ]


def mark_lists(batch: N, axes: Nest) -> tuple[N, list[tuple[str, int, str]]]:
    """Mark the lists that hold items, and find the lists that may.

    Args:
        batch: a tuple of arguments.
        axes: a prefix of it that `spread` accepts.

    Returns:
        `batch` with `Items` for each list that `axes` call `ITEMS`; and path, length
        and brackets of each ambiguous list, for `require_one_size`.
    """
    given = dict(_inside(axes) or ())
    inside = children_of(batch) or []
    found = list[tuple[str, int, str]]()
    parts = [
        _marked(child, given.get(step, axes), f"batch{step}", found)
        for step, child in inside
    ]
    return _unless_same(batch, inside, parts), found


def _marked(
    nest: Nest, axes: Nest, path: str, found: list[tuple[str, int, str]]
) -> Nest:
    inside = children_of(nest)
    if inside is None or axes is None:
        return nest
    if _is_list(nest) and isinstance(axes, str) and axes == ITEMS:
        return Items(child for _, child in inside)
    within = _inside(axes)
    if (
        within is None
        and _is_list(nest)
        and not isinstance(axes, str)
        and _are_of_one_kind(inside)
    ):
        found.append((path, len(inside), "()" if isinstance(nest, tuple) else "[]"))
    given = dict(within or ())
    return _unless_same(
        nest,
        inside,
        [
            _marked(child, given.get(step, axes), path + step, found)
            for step, child in inside
        ],
    )


def _unless_same(nest: N, inside: list[tuple[str, Nest]], parts: list[Nest]) -> N:
    same = all(part is child for part, (_, child) in zip(parts, inside, strict=True))
    return nest if same else _rebuilt(nest, parts)  # type: ignore[return-value]


def _are_of_one_kind(elements: list[tuple[str, Nest]]) -> bool:
    """True if all elements except None have one type, dtype and rank."""
    values = [value for _, value in elements if value is not None]
    return (
        len(
            {
                (
                    type(value),
                    str(getattr(value, "dtype", None)),
                    getattr(value, "ndim", None),
                )
                for value in values
            }
        )
        == 1
    )


def _is_list(nest: Nest) -> bool:
    return isinstance(nest, list | tuple) and not hasattr(nest, "_fields")


def _elements(nest: list[Nest] | tuple[Nest, ...]) -> list[tuple[str, Nest]]:
    return [(f"[{place}]", value) for place, value in enumerate(nest)]


def _inside(prefix: Nest) -> list[tuple[str, Nest]] | None:
    """Return the children of a prefix; unlike in a nest, its lists of plain values are
    containers.
    """
    return _elements(prefix) if _is_list(prefix) else children_of(prefix)  # type: ignore[arg-type]


def _prefix_error(argument: str, prefix: Nest, nest: Nest) -> GradAccumError:
    fix = (
        "Give one value for all, or a nest whose keys and lengths are those of the nest"
        " that it is for."
    )
    return explain(
        ArgumentValueError,
        argument,
        expected=f"a prefix of a nest like {_outline(nest)}",
        got=prefix,
        fix=fix,
    )


def _outline(nest: Nest) -> str:
    inside = children_of(nest)
    if inside is None:
        return type(nest).__name__
    return f"{type(nest).__name__}({', '.join(step for step, _ in inside)})"


def _is_dataclass(nest: Nest) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def _rebuilt(nest: Nest, children: list[Nest]) -> Nest:
    """Copy a container with other children, where possible without its constructor,
    which may check lengths or derive values.
    """
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


# How the other outputs of a loss function (aux) become those of the large batch: by a
# kind that the user declares per leaf.
#
# The arithmetic stands here once; a backend passes in its `maximum`, its `minimum` and
# `widened`, the dtype in which it sums.


KINDS = ("sum", "mean", "weighted_mean", "max", "min", "concatenate")
"""sum: over micro-batches. mean, weighted_mean: by the micro-batch's weight, as the loss;
that is its number of items unless a weight is given. max, min: element by element.
concatenate: along the leading axis, in the order of the items.
"""
MEANS = ("mean", "weighted_mean")
"""The two names of one kind."""

A = TypeVar("A", bound=Any)


class MergingOps(Protocol):
    """The three operations that a framework supplies."""

    def maximum(self, a: Any, b: Any) -> Any:
        """Return the larger value of each element; NaN where either is NaN."""

    def minimum(self, a: Any, b: Any) -> Any:
        """Return the smaller value of each element; NaN where either is NaN."""

    def widened(self, value: Any) -> Any:
        """Cast `value` to the dtype of its sum: float32 for half precision, the default
        integer for bools, else its own.
        """


def kinds_of(declared: Nest, aux: Nest) -> list[str]:
    """Return the kind of each leaf of `aux`, from one kind for all or a prefix nest of
    kinds.

    Raises:
        ArgumentValueError: a kind is unknown, or the declaration has another structure.
    """
    kinds = spread(declared, aux, "aux")
    for kind in kinds:
        require_kind(kind)
    return kinds  # type: ignore[return-value]


def require_kind(kind: object) -> None:
    """Raise unless `kind` is one of `KINDS` (`ArgumentValueError`)."""
    if kind not in KINDS:
        raise explain(
            ArgumentValueError,
            "aux",
            expected=f"one of {', '.join(KINDS)}",
            got=kind,
            fix="Write aux='mean', say.",
        )


def share(kind: str, value: A, weight: Any, ops: MergingOps) -> A:
    """Return one micro-batch's contribution: for a mean, `value` times its `weight`.

    Of "sum" and the means it has the dtype that ``ops.widened`` makes: wide enough for
    the sums.
    """
    if kind in ("max", "min", "concatenate"):
        return value
    if kind == "sum":
        return ops.widened(value)  # type: ignore[no-any-return]
    return ops.widened(value) * weight  # type: ignore[no-any-return]


def merged(kind: str, so_far: A, given: A, ops: MergingOps) -> A:
    """Return `so_far` with one more `share`, element by element. The backend itself
    concatenates what is of that kind.
    """
    if kind == "max":
        return ops.maximum(so_far, given)  # type: ignore[no-any-return]
    if kind == "min":
        return ops.minimum(so_far, given)  # type: ignore[no-any-return]
    return so_far + given  # type: ignore[no-any-return]


def finished(kind: str, so_far: A, weight: Any) -> A:
    """Return the value of the large batch from the merged shares; `weight` is the total,
    by which the means divide.
    """
    return so_far / weight if kind in MEANS else so_far  # type: ignore[no-any-return]


def concatenate_error(path: str, found: str) -> GradAccumError:
    """Return the error for a leaf without a leading axis that is to be concatenated."""
    fix = (
        "Return an array with one row per item, or declare sum, mean, max or min for"
        " this leaf."
    )
    return explain(
        ArgumentValueError,
        path or "aux",
        expected="an array with a leading axis to concatenate",
        found=found,
        fix=fix,
    )
