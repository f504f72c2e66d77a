"""The options of a call that divides its batch, checked once, when the function is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Parameter

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Division, Nest, Options, explain, make_division, make_options, require_kind
from gradaccum_mindspore.large_batch.weights import constant, moving
from gradaccum_mindspore.sums import sum_dtype


class SplitOptions(NamedTuple):
    """How a batch is divided, how its micro-batches weigh, and how their other outputs merge."""

    division: Division
    reduction: Options
    """The options of a window that the caller closes: for `gradaccum.kit.contribution` and `divisor`."""
    weight: Any
    """A callable of a micro-batch's arguments, one number per item, or None for the number of items."""
    axes: Nest
    """The axis of the items, for each leaf below it."""
    split: Callable[..., Any] | None
    """The user's own function that divides, or None."""
    aux: Nest
    """How the other outputs merge; None where there are none."""
    accumulate_dtype: object
    """The dtype of the sums of gradients, as for `gradaccum.wrap`."""


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
    """Check the keyword options of `value_and_grad` and of its like.

    Raises:
        ArgumentTypeError, ArgumentValueError: naming the option that is wrong.
    """
    division = make_division(steps, micro_batch_size, micro_batch_weight, own_split=split is not None)
    if split is not None:
        require_split(split, division)
    if weight is not None and not callable(weight):
        require_array(weight)
    require_aux(has_aux, aux)
    sum_dtype(ms.float32, accumulate_dtype)
    return SplitOptions(division, reduction, weight, axes, split, aux, accumulate_dtype)


def with_constant_weight(options: SplitOptions, positions: tuple[int, ...], parameters: Sequence[Parameter]) -> SplitOptions:
    """`options` whose weight raises if it depends on the arguments at `positions` or on `parameters`, which are differentiated."""
    if options.reduction.reduction == "sum":
        return options
    return options._replace(weight=constant(options.weight, positions, moving(options.weight, parameters)))


def plain_reduction(reduction: str) -> Options:
    """The options of the arithmetic that the core does for a bare `reduction`."""
    return make_options(None, reduction=reduction)


def require_function(argument: str, function: object) -> None:
    """Refuse what cannot be called.

    Raises:
        ArgumentTypeError: `function` is no function and no Cell.
    """
    if not callable(function):
        raise explain(ArgumentTypeError, argument, expected="a function or Cell", got=function, fix="Write def forward(x, y): ...")


def require_split(split: Any, division: Division) -> None:
    """Refuse a split that cannot be called as it will be.

    Raises:
        ArgumentTypeError: it is no function, or takes no ``steps`` where these are given.
    """
    if not callable(split):
        fix = "Write a function of the batch that yields micro-batches."
        raise explain(ArgumentTypeError, "split", expected="a function", got=split, fix=fix)
    if division.steps is not None and not _takes_steps(split):
        fix = "Write def split(x, y, steps): ..., or leave steps out."
        raise explain(ArgumentTypeError, "split", expected="a function that takes steps=", got=split, fix=fix)


def require_array(weight: Any) -> None:
    """Refuse a weight that has no length.

    Raises:
        ArgumentTypeError: it has none.
    """
    if not hasattr(weight, "__len__") or isinstance(weight, str | dict):
        expected = "a callable of the micro-batch, or one number per item"
        raise explain(ArgumentTypeError, "weight", expected=expected, got=weight, fix="Write weight=lambda x, mask: mask.sum(), say.")


def require_aux(has_aux: bool, aux: Nest) -> None:
    """Refuse an aux that nobody returns, one that nobody declared, and an unknown kind.

    Raises:
        ArgumentValueError, ArgumentTypeError: it is so.
    """
    if not isinstance(has_aux, bool):
        raise explain(ArgumentTypeError, "has_aux", expected="a bool", got=has_aux, fix="Write has_aux=True.")
    if has_aux and aux is None:
        fix = "Write aux='mean', or a nest of kinds like the other outputs."
        raise explain(ArgumentValueError, "aux", expected="how each other output merges, beside has_aux=True", found="none", fix=fix)
    if aux is not None and not has_aux:
        fix = "Write has_aux=True and return (loss, aux), or leave aux out."
        raise explain(ArgumentValueError, "has_aux", expected="True beside aux", found="False", fix=fix)
    if aux is not None:
        for kind in _kinds_in(aux):  # Not leaves_of: it takes a tuple of texts for one leaf, a column.
            require_kind(kind)


def _kinds_in(declared: Any) -> list[Any]:
    inside = declared.values() if isinstance(declared, dict) else declared if isinstance(declared, list | tuple) else None
    return [declared] if inside is None else [kind for each in inside for kind in _kinds_in(each)]


def _takes_steps(split: Any) -> bool:
    parameters = inspect.signature(split).parameters.values()
    return any(p.name == "steps" or p.kind is p.VAR_KEYWORD for p in parameters)
