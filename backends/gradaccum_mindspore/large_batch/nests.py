"""Nests in compiled code: the core walks nests as Python, which MindSpore's compiler cannot follow.

Here are the two walks that a compiled batch needs, over what the compiler knows: tuples, lists, dicts and leaves. Every ``if`` asks about
a type or a structure, so that it is decided while compiling.
"""

from __future__ import annotations

from typing import Any

from mindspore import COOTensor, CSRTensor, Tensor, ops
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError
from gradaccum.kit import ITEMS, explain, spread
from gradaccum_mindspore.large_batch.batch import no_items_error, require_axis, shape_along

EMPTY = object()
"""Stands for what a nest holds, where only its outline is asked for."""


def sizes_of(nest: Any, axes: Any, path: str) -> tuple[tuple[Any, ...], ...]:
    """(path, length along its axis) of each leaf that is divided, and (path, length, brackets) of each list that may be one of items."""
    found: tuple[tuple[Any, ...], ...] = ()
    if isinstance(nest, (tuple, list)):
        check_prefix(axes, len(nest), "axes")
        kinds: tuple[Any, ...] = ()
        for place in range(len(nest)):
            kinds = (*kinds, kind_of(nest[place]))
        found = doubtful_list(kinds, axes, path, "()" if isinstance(nest, tuple) else "[]")
        for place in range(len(nest)):
            found = found + sizes_of(nest[place], axis_at(axes, place), path + "[" + str(place) + "]")
    elif isinstance(nest, dict):
        check_keys(axes, tuple(nest.keys()), "axes")
        for key in nest.keys():  # noqa: SIM118 - the compiler iterates over no dict
            found = found + sizes_of(nest[key], axis_of(axes, key), path + "['" + key + "']")
    elif isinstance(nest, (COOTensor, CSRTensor)):
        check_dense(axes, path)
    elif isinstance(nest, Tensor):
        found = size_of(nest.shape, axes, path)
    return found


def kind_of(nest: Any) -> Any:
    """What elements of one kind share, as `gradaccum.kit.mark_lists` has it."""
    if isinstance(nest, Tensor):
        return "Tensor", nest.dtype, len(nest.shape)
    if isinstance(nest, (tuple, list, dict)):
        return "tuple" if isinstance(nest, tuple) else "list" if isinstance(nest, list) else "dict"
    return "None" if nest is None else "plain"


@constexpr  # type: ignore[untyped-decorator]
def doubtful_list(kinds: tuple[Any, ...], axes: Any, path: str, brackets: str) -> tuple[tuple[str, int, str], ...]:
    """Path, length and brackets of a list that may be one of items, while compiling; nothing of another one."""
    found = {kind for kind in kinds if kind != "None"}
    if axes is None or isinstance(axes, tuple | list) or path == "batch" or not kinds:
        return ()
    if axes == ITEMS or found <= {"plain"}:
        fix = "Call it from Python, or make a Tensor of it; write axes=None if every micro-batch is given it whole."
        raise explain(ArgumentValueError, path, expected="Tensors to split in compiled code", found="a list of items", fix=fix)
    return ((path, len(kinds), brackets),) if len(found) == 1 else ()


def slices_of(nest: Any, axes: Any, indices: Tensor) -> Any:
    """The nest with the items `indices`, an int Tensor of shape (items of a micro-batch,), of each leaf that is divided."""
    if isinstance(nest, (tuple, list)):
        parts = []
        for place in range(len(nest)):
            parts.append(slices_of(nest[place], axis_at(axes, place), indices))
        return tuple(parts) if isinstance(nest, tuple) else parts
    if isinstance(nest, dict):
        named = {}
        for key in nest.keys():  # noqa: SIM118 - the compiler iterates over no dict
            named[key] = slices_of(nest[key], axis_of(axes, key), indices)
        return named
    if isinstance(nest, Tensor) and axes is not None:
        return ops.gather(nest, indices, axes)
    return nest


def axis_at(axes: Any, place: int) -> Any:
    """The part of a prefix nest that is for a place of a tuple or list."""
    return axes[place] if isinstance(axes, (tuple, list)) else axes


def axis_of(axes: Any, key: str) -> Any:
    """The part of a prefix nest that is for a key of a dict."""
    return axes[key] if isinstance(axes, dict) else axes


@constexpr  # type: ignore[untyped-decorator]
def check_prefix(prefix: Any, length: int, argument: str) -> None:
    """Refuse a `prefix` that is none of a tuple or list of this length, while compiling."""
    if isinstance(prefix, tuple | list | dict) and (isinstance(prefix, dict) or len(prefix) != length):
        spread(prefix, tuple((EMPTY,) for _ in range(length)), argument)


@constexpr  # type: ignore[untyped-decorator]
def check_keys(prefix: Any, keys: tuple[str, ...], argument: str) -> None:
    """Refuse a `prefix` that is none of a dict of these keys, while compiling."""
    if isinstance(prefix, tuple | list | dict) and (not isinstance(prefix, dict) or tuple(prefix) != keys):
        spread(prefix, dict.fromkeys(keys, (EMPTY,)), argument)


@constexpr  # type: ignore[untyped-decorator]
def check_dense(axis: Any, path: str) -> None:
    """Refuse to divide a sparse tensor, while compiling."""
    if axis is not None:
        raise no_items_error(path, "a sparse tensor")


@constexpr  # type: ignore[untyped-decorator]
def size_of(shape: tuple[int, ...], axis: Any, path: str) -> tuple[tuple[str, int], ...]:
    """The length of one leaf with its path, or nothing of a leaf that is given whole."""
    require_axis(axis)
    return () if axis is None else ((path, shape_along(shape, axis, path)),)


def leaves_in(nest: Any) -> tuple[Any, ...]:
    """The leaves of a nest of tuples, lists and dicts, in order."""
    if isinstance(nest, dict):
        nest = tuple(nest.values())
    if not isinstance(nest, (tuple, list)):
        return (nest,)
    found: tuple[Any, ...] = ()
    for place in range(len(nest)):
        found = found + leaves_in(nest[place])
    return found


def filled(nest: Any, leaves: Any) -> Any:
    """A nest like `nest` with `leaves` in place of its own."""
    made, _ = _filled(nest, leaves, 0)
    return made


def _filled(nest: Any, leaves: Any, start: int) -> tuple[Any, int]:
    """The part of a nest that begins with the leaf at `start`, and the place of the leaf after it."""
    if isinstance(nest, dict):
        named = {}
        for key in nest.keys():  # noqa: SIM118 - the compiler iterates over no dict
            each, start = _filled(nest[key], leaves, start)
            named[key] = each
        return named, start
    if isinstance(nest, (tuple, list)):
        parts = []
        for place in range(len(nest)):
            each, start = _filled(nest[place], leaves, start)
            parts.append(each)
        return (tuple(parts) if isinstance(nest, tuple) else parts), start
    return leaves[start], start + 1


def nest_in(places: Any, leaves: tuple[Any, ...]) -> Any:
    """A nest like `places`, which holds numbers, with the leaf of each number in its place."""
    if isinstance(places, dict):
        named = {}
        for key in places.keys():  # noqa: SIM118 - the compiler iterates over no dict
            named[key] = nest_in(places[key], leaves)
        return named
    if isinstance(places, (tuple, list)):
        parts = []
        for each in places:
            parts.append(nest_in(each, leaves))
        return tuple(parts) if isinstance(places, tuple) else parts
    return leaves[places]
