"""The public call, and Cells that are recomputed in place: Parameters, their names,
`cells_and_names` and indexing stay as they are.

For the compiler `Cell.recompute()` marks the Cell. PyNative mode looks for
``_recompute_cell``, which is set to a `Segment`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain, segment_cuts
from gradaccum_mindspore.recomputation.function import Segment, keep_statistics

FUNCTIONAL = ("batch_norm",)
"""Functions that write into an argument by an operator of their own, which nobody can
tell the compiler to keep.
"""


def recompute(cell: nn.Cell, *, segments: int | None = None) -> nn.Cell:
    """Return the same Cell, with the same gradient to the bit, keeping its inputs in
    place of its activations.

    In PyNative mode, under `mindspore.jit` and in GRAPH mode. Dropout repeats its mask
    and batch normalization moves its statistics once; `Cell.recompute()` alone promises
    neither. The Cell is changed in place: its Parameters, their names and its layers
    stay. Call it once per Cell, when the Cell has all its layers, and not on layers of
    it as well; to recompute some layers alone, call it on each.

    Args:
        cell: a `SequentialCell`, cut into segments; or another Cell, recomputed as a
            whole.
        segments: into how many segments of consecutive layers, 1 to the number of
            layers; about its square root unless given, where the memory of a chain of
            equal layers is least (Chen et al. 2016, "Training deep nets with sublinear
            memory cost").

    Raises:
        ArgumentTypeError: `cell` is no Cell, or a list of Cells; `segments` is no int,
            or the Cell no `SequentialCell`.
        ArgumentValueError: more segments than layers, or fewer than one.
        UsageError: MindSpore is older than 2.9. It is recomputed already; it calls
            `mindspore.ops.batch_norm`, whose statistics would move twice in compiled
            code. In the backward pass of PyNative mode: the second run returned other
            values, as with an operator whose draws cannot be repeated.
    """
    if tuple(map(int, ms.__version__.split(".")[:2])) < (2, 9):
        expected, fix = (
            "MindSpore 2.9 or newer",
            (
                "Call cell.recompute() of MindSpore, which may draw other dropout masks"
                " the second time."
            ),
        )
        raise explain(
            UsageError, "recompute", expected=expected, found=ms.__version__, fix=fix
        )
    if not isinstance(cell, nn.Cell) or isinstance(cell, nn.CellList | nn.CellDict):
        fix = "Write recompute(net.block), for each block of a list."
        raise explain(
            ArgumentTypeError,
            "cell",
            expected="a Cell that is called",
            found=f"a {type(cell).__name__}",
            fix=fix,
        )
    if segments is not None and not isinstance(cell, nn.SequentialCell):
        fix = (
            "Write recompute(net.blocks, segments=3) of its SequentialCell, or"
            " recompute each block."
        )
        raise explain(
            ArgumentTypeError,
            "cell",
            expected="a SequentialCell to cut",
            found=f"a {type(cell).__name__}",
            fix=fix,
        )
    _require_fresh(cell)
    parts = _segments(cell, segments) if isinstance(cell, nn.SequentialCell) else [cell]
    for part in parts:
        keep_statistics(part)
        part.recompute(use_reentrant=False, early_stop=False)  # for the compiler
        part._recompute_cell = Segment(part)
    if isinstance(cell, nn.SequentialCell):
        cell.cell_list = parts
    return cell


class Layers(nn.Cell):  # type: ignore[misc]
    """Consecutive layers of a SequentialCell, which still owns them: they keep the
    names of their Parameters.
    """

    def __init__(self, layers: Sequence[nn.Cell]) -> None:
        super().__init__(auto_prefix=False)
        self.layers = nn.CellList(layers, auto_prefix=False)

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def _segments(cell: nn.SequentialCell, segments: int | None) -> list[nn.Cell]:
    layers = list(cell)
    return [
        Layers(layers[cut.start : cut.stop])
        for cut in segment_cuts(len(layers), segments)
    ]


def _require_fresh(cell: nn.Cell) -> None:
    for inner in (
        cell,
        *getattr(cell, "cell_list", ()),
        *dict(cell.cells_and_names()).values(),
    ):
        if inner._recompute_cell is not None or getattr(
            inner, "_has_config_recompute", False
        ):
            fix = (
                "Recompute the whole or its parts, once; hooks, jit and copies of it"
                " need no second call."
            )
            found = f"a {type(inner).__name__} that is"
            raise explain(
                UsageError,
                "cell",
                expected="a Cell that is not recomputed yet",
                found=found,
                fix=fix,
            )
        require_repeatable(type(inner).construct, type(inner).__name__)


def require_repeatable(function: Callable[..., Any], name: str) -> None:
    used = [
        word
        for word in _names_in(getattr(function, "__code__", None))
        if word in FUNCTIONAL
    ]
    if used and not name.startswith("BatchNorm"):
        fix = "Use nn.BatchNorm2d, or leave it outside of what is recomputed."
        expected = "statistics that move once"
        raise explain(
            UsageError,
            f"recompute of {name}",
            expected=expected,
            found=f"a call of {used[0]}, which compiled code repeats",
            fix=fix,
        )


def _names_in(code: Any) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if hasattr(constant, "co_names"):
                yield from _names_in(constant)
