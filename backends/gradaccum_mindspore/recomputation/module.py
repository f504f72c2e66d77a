"""The public call, and Cells that are recomputed in place: Parameters, their names, `cells_and_names` and indexing stay as they are.

For the compiler `Cell.recompute()` marks the Cell. PyNative mode looks for ``_recompute_cell``, which is set to a `Segment`; if MindSpore
renamed it, PyNative mode would go MindSpore's own way, and the tests of dropout and of batch normalization would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspore import nn

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain, segment_cuts
from gradaccum_mindspore.checks import require_mindspore
from gradaccum_mindspore.recomputation.function import RecomputedFunction, Segment, keep_statistics

FUNCTIONAL = ("batch_norm",)
"""Functions that write into an argument by an operator of their own, which nobody can tell the compiler to keep."""


def recompute(
    function: nn.Cell | Callable[..., Any], *, segments: int | None = None, submodules: Sequence[str | nn.Cell] | None = None
) -> Callable[..., Any]:
    """Return the same function or Cell, with the same gradient to the bit, keeping its inputs in place of its activations.

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


def recompute_module(module: nn.Cell, segments: int | None, submodules: Sequence[str | nn.Cell] | None) -> nn.Cell:
    if submodules is not None:
        if segments is not None:
            fix = "Cut each: recompute(net.blocks, segments=3)."
            raise explain(UsageError, "segments", expected="one of segments and submodules", found="both", fix=fix)
        chosen = _submodules(module, submodules)
    elif isinstance(module, nn.SequentialCell):
        chosen = _segments(module, segments)
    elif segments is not None:
        fix = "Write recompute(net.blocks, segments=3) of its SequentialCell, or recompute(net, submodules=list(net.blocks))."
        raise explain(
            ArgumentTypeError, "module", expected="a SequentialCell, whose layers follow each other", found=f"a {_kind(module)}", fix=fix
        )
    else:
        chosen = [module]
    _require_fresh(chosen)
    for cell in chosen:
        _mark(cell)
    if isinstance(module, nn.SequentialCell) and submodules is None:
        module.cell_list = chosen
    return module


class Layers(nn.Cell):  # type: ignore[misc]
    """Consecutive layers of a SequentialCell, which still owns them: they keep the names of their Parameters."""

    def __init__(self, layers: Sequence[nn.Cell]) -> None:
        super().__init__(auto_prefix=False)
        self.layers = nn.CellList(layers, auto_prefix=False)

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def _mark(cell: nn.Cell) -> None:
    """Mark for the compiler by MindSpore's own mark, for PyNative mode by a `Segment`."""
    keep_statistics([cell])
    cell.recompute(use_reentrant=False, early_stop=False)
    cell._recompute_cell = Segment(cell.construct, [cell], type(cell).__name__)


def _segments(module: nn.SequentialCell, segments: int | None) -> list[nn.Cell]:
    layers = list(module)
    cuts = segment_cuts(len(layers), segments)
    if any(isinstance(run, Layers) for run in module.cell_list):
        raise _twice_error(module)
    return [Layers(layers[cut.start : cut.stop]) for cut in cuts]


def _submodules(module: nn.Cell, submodules: Sequence[str | nn.Cell]) -> list[nn.Cell]:
    if isinstance(submodules, str | nn.Cell) or not isinstance(submodules, Sequence) or not submodules:
        fix = "Write submodules=['blocks.0', net.head]."
        raise explain(ArgumentTypeError, "submodules", expected="a list of names and Cells", got=submodules, fix=fix)
    by_name = {name: cell for name, cell in module.cells_and_names() if name}
    return [_submodule(module, by_name, one) for one in submodules]


def _submodule(module: nn.Cell, by_name: dict[str, nn.Cell], one: object) -> nn.Cell:
    if isinstance(one, str) and one in by_name:
        return by_name[one]
    if isinstance(one, nn.Cell) and any(one is cell for cell in by_name.values()):
        return one
    if not isinstance(one, str | nn.Cell):
        raise explain(ArgumentTypeError, "submodules", expected="names and Cells", got=one, fix="Write submodules=['blocks.0'].")
    found = repr(one) if isinstance(one, str) else f"a {type(one).__name__} that it does not hold"
    fix = f"It has {', '.join(by_name) or 'none'}."
    raise explain(ArgumentValueError, "submodules", expected=f"submodules of the {type(module).__name__}", found=found, fix=fix)


def _require_fresh(chosen: Sequence[nn.Cell]) -> None:
    seen: set[int] = set()
    for cell in chosen:
        if isinstance(cell, nn.CellList | nn.CellDict):
            fix = "Write recompute(net, submodules=list(net.blocks))."
            raise explain(ArgumentTypeError, "module", expected="a Cell that is called", found=f"a {_kind(cell)}", fix=fix)
        for inner in dict(cell.cells_and_names()).values():
            if inner._recompute_cell is not None or getattr(inner, "_has_config_recompute", False) or id(inner) in seen:
                raise _twice_error(inner)
            require_repeatable(type(inner).construct, type(inner).__name__)
        seen |= {id(inner) for _, inner in cell.cells_and_names()}


def require_repeatable(function: Callable[..., Any], name: str) -> None:
    used = [word for word in _names_in(getattr(function, "__code__", None)) if word in FUNCTIONAL]
    if used and not name.startswith("BatchNorm"):
        fix = "Use nn.BatchNorm2d, or leave it outside of what is recomputed."
        expected = "statistics that move once"
        raise explain(
            UsageError, f"recompute of {name}", expected=expected, found=f"a call of {used[0]}, which compiled code repeats", fix=fix
        )


def _names_in(code: Any) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if hasattr(constant, "co_names"):
                yield from _names_in(constant)


def _twice_error(cell: nn.Cell) -> UsageError:
    fix = "Recompute the whole or its parts, once; hooks, jit and copies of it need no second call."
    return explain(UsageError, "module", expected="a Cell that is not recomputed yet", found=f"a {_kind(cell)} that is", fix=fix)


def _kind(module: nn.Cell) -> str:
    return type(module).__name__
