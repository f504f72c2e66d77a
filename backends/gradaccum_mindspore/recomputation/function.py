"""`recompute`, and what it makes of a plain function: a Cell that PyNative mode calls and MindSpore's compiler compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import getclosurevars, isfunction, ismethod
from typing import Any

import mindspore as ms
from mindspore import nn

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain
from gradaccum_mindspore.checks import require_mindspore
from gradaccum_mindspore.recomputation.buffers import keep_statistics
from gradaccum_mindspore.recomputation.module import recompute_module
from gradaccum_mindspore.recomputation.segment import Segment

DEPTH = 3
"""How many functions deep Cells are looked for."""


def recompute(
    function: nn.Cell | Callable[..., Any], *, segments: int | None = None, submodules: Sequence[str | nn.Cell] | None = None
) -> Callable[..., Any]:
    """The same function or Cell, with the same gradient to the bit, keeping its inputs in place of its activations.

    In PyNative mode, under `mindspore.jit` and in GRAPH mode. Dropout repeats its mask and batch normalization moves its statistics once;
    `Cell.recompute()` alone promises neither. A Cell is changed in place and returned: its Parameters, their names and its layers stay.
    Nothing is recomputed where no gradient is asked for. Call it once per Cell, when the Cell has all its layers, and not on layers of it
    as well. A frozen weight is compared after each forward pass in PyNative mode, because it could be a buffer.

    Args:
        function: a `SequentialCell`, cut into segments; another Cell, recomputed as a whole; or a function, a method of a Cell among them.
            In what a function closes over, Cells are found; in what they are attributes of, they are not.
        segments: into how many segments of consecutive layers, 1 to the number of layers; about its square root unless given,
            where the memory of a chain of equal layers is least (Chen et al. 2016, "Training deep nets with sublinear memory cost").
        submodules: recompute these alone: names as `cells_and_names` gives them, or the Cells themselves.

    Raises:
        ArgumentTypeError: it cannot be called; `segments` is no int, or the Cell no `SequentialCell`; `submodules` is no list.
        ArgumentValueError: more segments than layers, or fewer than one; a name or Cell that is not there.
        UsageError: MindSpore is older than 2.9.
            It is recomputed already; it calls `mindspore.ops.batch_norm`, whose statistics would move twice in compiled code.
            In the backward pass of PyNative mode: the second run returned other values, as with an operator whose draws cannot be repeated.
    """
    require_mindspore("2.9", "recompute", "call cell.recompute() of MindSpore, which may draw other dropout masks the second time")
    if isinstance(function, nn.Cell):
        return recompute_module(function, segments, submodules)  # type: ignore[no-any-return]
    if not callable(function) or isinstance(function, type):
        raise explain(ArgumentTypeError, "function", expected="a function or a Cell", got=function, fix="Write recompute(net.blocks).")
    if segments is not None or submodules is not None:
        given = "segments" if segments is not None else "submodules"
        fix = f"Leave {given} out, or hand over a Cell."
        raise explain(UsageError, given, expected="a Cell to cut", found="a function, which is one segment", fix=fix)
    return RecomputedFunction(function)


class RecomputedFunction(nn.Cell):  # type: ignore[misc]
    """A function that is recomputed. It has no Parameter of its own: what the function closes over stays where it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        cells = list(cells_of(function))
        keep_statistics(cells)
        self.function = function
        self._segment = Segment(function, cells, getattr(function, "__name__", type(function).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In PyNative mode; the compiler reads `construct` and never sees this."""
        if ms.get_context("mode") == ms.GRAPH_MODE:
            return super().__call__(*args, **kwargs)
        return self._segment(*args, **kwargs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """In compiled code."""
        return ms.recompute(self.function, *args, **kwargs)


def cells_of(function: Callable[..., Any], depth: int = DEPTH) -> Iterator[nn.Cell]:
    """The Cells that a function is bound to or closes over, in lists, tuples, dicts and further functions too."""
    if ismethod(function):
        yield from _cells_in(function.__self__, depth)
    plain = getattr(function, "__func__", function)
    if isfunction(plain) and depth:
        variables = getclosurevars(plain)
        yield from _cells_in([*variables.nonlocals.values(), *variables.globals.values()], depth - 1)


def _cells_in(value: object, depth: int) -> Iterator[nn.Cell]:
    if isinstance(value, nn.Cell):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _cells_in(inner, depth)
    elif callable(value):
        yield from cells_of(value, depth)
