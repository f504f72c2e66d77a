"""The large batch and its micro-batches: the options of the call, the leaves that have
items, what each micro-batch weighs.

The core says where to cut, and walks nests as Python, which MindSpore's compiler cannot
follow. So `leaves_in`, `nest_in` and what uses them walk tuples, lists and dicts in
compiled code: every ``if`` there asks about a type or a structure, and is decided while
compiling.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import COOTensor, CSRTensor, Parameter, Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, kit
from gradaccum.kit import Cut, Division, Nest, Options, explain
from gradaccum_mindspore.checks import item_weights, weight_as_number
from gradaccum_mindspore.gradient_sum import sum_dtype
from gradaccum_mindspore.large_batch.replay import DEPTH, named_by


def weight_of(
    weight: Any,
    arguments: tuple[Nest, ...],
    items: int | None,
    cut: Cut | None,
    total: int | None,
) -> float:
    if callable(weight):
        given = weight(*arguments)
        if given is None:
            fix = "Return the number of tokens, say: weight=lambda x, mask: mask.sum()."
            raise explain(
                ArgumentValueError,
                "weight",
                expected="a function that returns a number",
                found="None",
                fix=fix,
            )
        return weight_as_number(given)
    if weight is not None:
        if cut is None or total is None:
            raise _unknown_error(
                "per-item weights beside a split of your own, which may order items"
                " anew"
            )
        return math.fsum(item_weights(weight, total)[cut.start : cut.stop])
    if items is None:
        raise _unknown_error(
            "a micro-batch of your own split whose leaves have different lengths"
        )
    return float(items)


def constant(
    weight: Any, positions: tuple[int, ...], parameters: Sequence[Parameter]
) -> Any:
    """Return `weight`, which raises if it depends on what is differentiated: its
    derivative is no part of the gradients.
    """
    if not callable(weight) or not (positions or parameters):
        return weight

    def checked(*arguments: Nest) -> Any:
        given = weight(*arguments)
        mode = ms.get_context("mode")
        if isinstance(given, Tensor) and given.is_floating_point():
            # Graph mode cannot read a lambda inside a call.
            ms.set_context(mode=ms.PYNATIVE_MODE)
            try:
                slopes = ms.grad(weight, positions or None, parameters or None)(
                    *arguments
                )
            finally:
                ms.set_context(mode=mode)
            leaves: list[Tensor] = [leaf.value for leaf in kit.leaves_of(slopes)]
            if any(leaf.asnumpy().any() for leaf in leaves):
                fix = (
                    "Leave it out of grad_position= and weights=; or weigh by what"
                    " ops.stop_gradient gives, if fn divides by that too."
                )
                raise kit.moving_weight_error(fix)
        return given

    return checked


def moving(weight: Any, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Return those of `parameters` that a callable `weight` names, itself or through a
    Cell.
    """
    named: set[int] = set()
    for each in named_by(weight, DEPTH):
        named.update(
            map(id, each.get_parameters() if isinstance(each, nn.Cell) else [each])
        )
    return tuple(each for each in parameters if id(each) in named)


def _unknown_error(found: str) -> ArgumentValueError:
    fix = (
        "Write weight= a callable of the micro-batch that returns its number of items"
        " or tokens."
    )
    return explain(
        ArgumentValueError,
        "weight",
        expected="a way to weigh each micro-batch",
        found=found,
        fix=fix,
    )


class SplitOptions(NamedTuple):
    """The checked options of a call."""

    division: Division
    reduction: Options
    """The options of a window that the caller closes: for `gradaccum.kit.contribution`
    and `divisor`.
    """
    weight: Any
    """A callable, one number per item, or None for the number of items."""
    axes: Nest
    split: Callable[..., Any] | None
    aux: Nest
    """None where there are no other outputs."""
    accumulate_dtype: object


def split_options(
    has_aux: bool,
    reduction: Options,
    *,
    steps: object = None,
    micro_batch_size: object = None,
    micro_batch_weight: object = None,
    weight: Any = None,
    axes: Nest = 0,
    split: Any = None,
    aux: Nest = None,
    accumulate_dtype: object = None,
) -> SplitOptions:
    division = kit.make_division(
        steps, micro_batch_size, micro_batch_weight, own_split=split is not None
    )
    if not isinstance(division.micro_batch_size, int | None):
        expected = (
            "a number of items, because MindSpore's errors do not tell that memory"
            " ran out"
        )
        fix = "Write micro_batch_size=8."
        raise explain(
            ArgumentValueError,
            "micro_batch_size",
            expected=expected,
            got=micro_batch_size,
            fix=fix,
        )
    if split is not None:
        require_split(split, division)
    if weight is not None and not callable(weight):
        require_array(weight)
    require_aux(has_aux, aux)
    sum_dtype(ms.float32, accumulate_dtype)
    return SplitOptions(division, reduction, weight, axes, split, aux, accumulate_dtype)


def with_constant_weight(
    options: SplitOptions, positions: tuple[int, ...], parameters: Sequence[Parameter]
) -> SplitOptions:
    if options.reduction.reduction == "sum":
        return options
    return options._replace(
        weight=constant(options.weight, positions, moving(options.weight, parameters))
    )


def plain_reduction(reduction: str) -> Options:
    return kit.make_options(None, reduction=reduction)


def require_function(argument: str, function: object) -> None:
    if not callable(function):
        raise explain(
            ArgumentTypeError,
            argument,
            expected="a function or Cell",
            got=function,
            fix="Write def forward(x, y): ...",
        )


def require_split(split: Any, division: Division) -> None:
    if not callable(split):
        fix = "Write a function of the batch that yields micro-batches."
        raise explain(
            ArgumentTypeError, "split", expected="a function", got=split, fix=fix
        )
    if division.steps is not None and not _takes_steps(split):
        fix = "Write def split(x, y, steps): ..., or leave steps out."
        raise explain(
            ArgumentTypeError,
            "split",
            expected="a function that takes steps=",
            got=split,
            fix=fix,
        )


def require_array(weight: Any) -> None:
    if not hasattr(weight, "__len__") or isinstance(weight, str | dict):
        expected = "a callable of the micro-batch, or one number per item"
        raise explain(
            ArgumentTypeError,
            "weight",
            expected=expected,
            got=weight,
            fix="Write weight=lambda x, mask: mask.sum(), say.",
        )


def require_aux(has_aux: bool, aux: Nest) -> None:
    if not isinstance(has_aux, bool):
        raise explain(
            ArgumentTypeError,
            "has_aux",
            expected="a bool",
            got=has_aux,
            fix="Write has_aux=True.",
        )
    if has_aux and aux is None:
        fix = "Write aux='mean', or a nest of kinds like the other outputs."
        raise explain(
            ArgumentValueError,
            "aux",
            expected="how each other output merges, beside has_aux=True",
            found="none",
            fix=fix,
        )
    if aux is not None and not has_aux:
        fix = "Write has_aux=True and return (loss, aux), or leave aux out."
        raise explain(
            ArgumentValueError,
            "has_aux",
            expected="True beside aux",
            found="False",
            fix=fix,
        )
    if aux is not None:
        # Not leaves_of: it takes a tuple of texts for one leaf, a column.
        for kind in _kinds_in(aux):
            kit.require_kind(kind)


def _kinds_in(declared: Any) -> list[Any]:
    inside = (
        declared.values()
        if isinstance(declared, dict)
        else declared
        if isinstance(declared, list | tuple)
        else None
    )
    return (
        [declared]
        if inside is None
        else [kind for each in inside for kind in _kinds_in(each)]
    )


def _takes_steps(split: Any) -> bool:
    parameters = inspect.signature(split).parameters.values()
    return any(p.name == "steps" or p.kind is p.VAR_KEYWORD for p in parameters)


PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""A leaf of one plain value is given whole to each micro-batch."""
Batch = tuple[Nest, ...]


class MicroBatch(NamedTuple):
    """The arguments of one call of the function."""

    arguments: Batch
    items: int | None
    """How many; None where the user's own split made it and its leaves do not say."""
    cut: Cut | None
    """None where the user's own split made it."""


def micro_batches(batch: Batch, options: SplitOptions) -> Iterator[MicroBatch]:
    if options.split is not None:
        return _own_micro_batches(batch, options)
    items = items_of(batch, options.axes)
    batch, _ = kit.mark_lists(batch, options.axes)
    made = kit.divided(options.division, items, _packing_weights(batch, options, items))
    return (MicroBatch(part(batch, options.axes, cut), cut.items, cut) for cut in made)


def items_of(batch: Nest, axes: Nest, *, own_split: bool = False) -> int:
    marked, lists = kit.mark_lists(batch, axes)
    placed = zip(
        kit.leaves_of(marked, "batch"), kit.spread(axes, marked, "axes"), strict=True
    )
    sizes = [
        (leaf.path, size_along(leaf.value, axis, leaf.path, own_split))
        for leaf, axis in placed
    ]
    return kit.require_one_size(
        ((path, size) for path, size in sizes if size is not None),
        () if own_split else lists,
    )


def size_along(value: object, axis: object, path: str, own_split: bool) -> int | None:
    """Return the length of a leaf along its axis; None of a leaf that is given
    whole.
    """
    if axis is None or isinstance(value, (*PLAIN, np.generic)):
        return None
    if kit.is_column(value):
        return len(value)  # type: ignore[arg-type]
    if isinstance(value, Tensor | np.ndarray):
        require_axis(axis)
        return shape_along(tuple(value.shape), axis, path)
    if own_split:
        return None
    raise no_items_error(path, f"a {type(value).__name__}")


def no_items_error(path: str, found: str) -> ArgumentValueError:
    fix = (
        "Write axes=None for what every micro-batch is given whole, or split= a"
        " function."
    )
    return explain(
        ArgumentValueError,
        path,
        expected="a Tensor or array to split",
        found=found,
        fix=fix,
    )


def shape_along(shape: tuple[int, ...], axis: Any, path: str) -> int:
    if not -len(shape) <= axis < len(shape):
        fix = (
            "Write axes=None for a leaf that every micro-batch is given whole, or the"
            " axis of its items."
        )
        raise explain(
            ArgumentValueError,
            path,
            expected=f"an array with axis {axis}",
            found=f"shape {shape}",
            fix=fix,
        )
    if shape[axis] is None or shape[axis] < 0:
        fix = "Leave dynamic shapes out of mindspore.jit, or call it from Python."
        raise explain(
            ArgumentValueError,
            path,
            expected=f"a known number of items along axis {axis}",
            found=f"shape {shape}",
            fix=fix,
        )
    return int(shape[axis])


def require_axis(axis: object) -> None:
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise explain(
            ArgumentTypeError,
            "axes",
            expected="an int or None for each array",
            got=axis,
            fix="Write axes=(0, None), say.",
        )


def part(batch: Batch, axes: Nest, cut: Cut) -> Batch:
    placed = zip(kit.leaves_of(batch), kit.spread(axes, batch, "axes"), strict=True)
    leaves = [sliced(leaf.value, axis, cut) for leaf, axis in placed]
    return kit.with_leaves(batch, iter(leaves))  # type: ignore[return-value]


def sliced(value: Any, axis: Any, cut: Cut) -> Any:
    """Return a leaf's items of the cut; a leaf without items whole."""
    if axis is None or not (
        kit.is_column(value) or isinstance(value, Tensor | np.ndarray)
    ):
        return value
    if kit.is_column(value):
        return value[cut.start : cut.stop]
    before = (slice(None),) * (axis % value.ndim)
    return value[(*before, slice(cut.start, cut.stop))]


def _packing_weights(
    batch: Batch, options: SplitOptions, items: int
) -> list[float] | None:
    """Return each item's weight where the batch is packed by weight; a callable is
    asked about each item alone.
    """
    if options.division.micro_batch_weight is None or options.weight is None:
        return None
    if not callable(options.weight):
        return item_weights(options.weight, items)
    return [
        weight_as_number(
            options.weight(*part(batch, options.axes, Cut(place, place + 1)))
        )
        for place in range(items)
    ]


def _own_micro_batches(batch: Batch, options: SplitOptions) -> Iterator[MicroBatch]:
    split: Any = options.split
    steps = options.division.steps
    given = split(*batch) if steps is None else split(*batch, steps=steps)
    if isinstance(given, Tensor | np.ndarray | str | dict) or not hasattr(
        given, "__iter__"
    ):
        raise _split_error(f"an object of type {type(given).__name__}")
    return _checked(given, steps)


def _checked(given: Any, steps: int | None) -> Iterator[MicroBatch]:
    count = 0
    for count, arguments in enumerate(given, start=1):
        if not isinstance(arguments, tuple):
            raise _split_error(f"a micro-batch of type {type(arguments).__name__}")
        if steps is not None and count > steps:
            raise _split_error(f"more than the {steps} micro-batches of steps")
        yield MicroBatch(arguments, None, None)
    if count == 0:
        raise _split_error("no micro-batch")


def _split_error(found: str) -> ArgumentTypeError:
    fix = (
        "Write: yield x[:4], y[:4] for each micro-batch; with steps= the function gets"
        " steps too."
    )
    return explain(
        ArgumentTypeError,
        "split",
        expected="an iterable of micro-batches, each a tuple of arguments",
        found=found,
        fix=fix,
    )


EMPTY = object()
"""Stands for what a nest holds, where only its outline is asked for."""


def sizes_of(nest: Any, axes: Any, path: str) -> tuple[tuple[Any, ...], ...]:
    """Return (path, length) of each leaf that is divided, and (path, length, brackets)
    of each list that may be one of items.
    """
    found: tuple[tuple[Any, ...], ...] = ()
    if isinstance(nest, (tuple, list)):
        check_prefix(axes, len(nest), "axes")
        kinds: tuple[Any, ...] = ()
        for place in range(len(nest)):
            kinds = (*kinds, kind_of(nest[place]))
        found = doubtful_list(
            kinds, axes, path, "()" if isinstance(nest, tuple) else "[]"
        )
        for place in range(len(nest)):
            found = found + sizes_of(
                nest[place], axis_at(axes, place), path + "[" + str(place) + "]"
            )
    elif isinstance(nest, dict):
        check_keys(axes, tuple(nest.keys()), "axes")
        for key in nest.keys():  # noqa: SIM118 - the compiler iterates over no dict
            found = found + sizes_of(
                nest[key], axis_of(axes, key), path + "['" + key + "']"
            )
    elif isinstance(nest, (COOTensor, CSRTensor)):
        check_dense(axes, path)
    elif isinstance(nest, Tensor):
        found = size_of(nest.shape, axes, path)
    return found


def kind_of(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return "Tensor", nest.dtype, len(nest.shape)
    if isinstance(nest, (tuple, list, dict)):
        return (
            "tuple"
            if isinstance(nest, tuple)
            else "list"
            if isinstance(nest, list)
            else "dict"
        )
    return "None" if nest is None else "plain"


@constexpr  # type: ignore[untyped-decorator]
def doubtful_list(
    kinds: tuple[Any, ...], axes: Any, path: str, brackets: str
) -> tuple[tuple[str, int, str], ...]:
    """Return path, length and brackets of a list that may be one of items, while
    compiling.
    """
    found = {kind for kind in kinds if kind != "None"}
    if axes is None or isinstance(axes, tuple | list) or path == "batch" or not kinds:
        return ()
    if axes == kit.ITEMS or found <= {"plain"}:
        fix = (
            "Call it from Python, or make a Tensor of it; write axes=None if every"
            " micro-batch is given it whole."
        )
        raise explain(
            ArgumentValueError,
            path,
            expected="Tensors to split in compiled code",
            found="a list of items",
            fix=fix,
        )
    return ((path, len(kinds), brackets),) if len(found) == 1 else ()


@constexpr  # type: ignore[untyped-decorator]
def refuse_names(names: tuple[str, ...]) -> None:
    """Raise unless no part of the batch was given by its name."""
    if names:
        raise explain(
            ArgumentTypeError,
            names[0],
            expected="the batch by position, in the order of the function's arguments",
            found="one by name",
            fix=f"Write backward(x, {names[0]}).",
        )


def slices_of(nest: Any, axes: Any, indices: Tensor) -> Any:
    """Return the nest with the items `indices`, an int Tensor of shape (items of a
    micro-batch,).
    """
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
    return axes[place] if isinstance(axes, (tuple, list)) else axes


def axis_of(axes: Any, key: str) -> Any:
    return axes[key] if isinstance(axes, dict) else axes


@constexpr  # type: ignore[untyped-decorator]
def check_prefix(prefix: Any, length: int, argument: str) -> None:
    if isinstance(prefix, tuple | list | dict) and (
        isinstance(prefix, dict) or len(prefix) != length
    ):
        kit.spread(prefix, tuple((EMPTY,) for _ in range(length)), argument)


@constexpr  # type: ignore[untyped-decorator]
def check_keys(prefix: Any, keys: tuple[str, ...], argument: str) -> None:
    if isinstance(prefix, tuple | list | dict) and (
        not isinstance(prefix, dict) or tuple(prefix) != keys
    ):
        kit.spread(prefix, dict.fromkeys(keys, (EMPTY,)), argument)


@constexpr  # type: ignore[untyped-decorator]
def check_dense(axis: Any, path: str) -> None:
    if axis is not None:
        raise no_items_error(path, "a sparse tensor")


@constexpr  # type: ignore[untyped-decorator]
def size_of(
    shape: tuple[int, ...], axis: Any, path: str
) -> tuple[tuple[str, int], ...]:
    require_axis(axis)
    return () if axis is None else ((path, shape_along(shape, axis, path)),)


def leaves_in(nest: Any) -> tuple[Any, ...]:
    if isinstance(nest, dict):
        nest = tuple(nest.values())
    if not isinstance(nest, (tuple, list)):
        return (nest,)
    found: tuple[Any, ...] = ()
    for place in range(len(nest)):
        found = found + leaves_in(nest[place])
    return found


def nest_in(places: Any, leaves: tuple[Any, ...]) -> Any:
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
