"""The replay of a micro-batch: a second pass draws the first one's random numbers and
moves statistics once.

In PyNative MindSpore makes each operator with seeds from counters in
`mindspore.common.seed`, so the same counters make the same operators again.
`mindspore.nn.Dropout` makes its operator once, so it is lent one for each micro-batch.
The outputs of both passes are compared. Parameters that nobody trains, such as
statistics, are set back between the passes.

In compiled code, after `mindspore.set_seed`, each operator starts at that seed:
micro-batches of two sizes, which are two programs, would begin with the same numbers.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum import UsageError, kit
from gradaccum_mindspore.mindspore_private import SEEDS, forget_recorded, set_counters

DEPTH = 3
"""How many functions deep Cells are looked for."""


def require_one_stream(fn: object, sizes: set[int | None], items: int | None) -> None:
    """Raise unless micro-batches have one size where each size is a compiled program of
    its own.
    """
    sizes.add(items)
    if len(sizes) == 2 and ms.get_context("mode") == ms.GRAPH_MODE:
        require_one_program(fn, "micro-batches of two sizes in graph mode")


def require_one_program(fn: object, found: str) -> None:
    drawing = random_cell(fn) if ms.get_seed() is not None else None
    if drawing is not None:
        fix = (
            "Leave mindspore.set_seed out, run in PyNative mode, or choose a number of"
            " items that divides the batch and no has_aux."
        )
        expected = (
            f"one compiled program, because {drawing} starts in each at the seed of"
            " mindspore.set_seed"
        )
        raise kit.explain(UsageError, "steps", expected=expected, found=found, fix=fix)


def random_cell(fn: object) -> str | None:
    """Return the class of a Cell that `fn` may call and that draws random numbers in
    training now; None if none is found.
    """
    for cell in cells_of(fn, DEPTH):
        for _, each in cell.cells_and_names():
            if "Dropout" in type(each).__name__ and each.training:
                return type(each).__name__
    return None


def cells_of(fn: Any, depth: int) -> Iterator[nn.Cell]:
    yield from (each for each in named_by(fn, depth) if isinstance(each, nn.Cell))


def named_by(fn: Any, depth: int) -> Iterator[nn.Cell | Parameter]:
    """Return the Cells and Parameters that a function names: itself, its object,
    closure, globals and defaults, and further functions.
    """
    if isinstance(fn, nn.Cell | Parameter):
        yield fn
        return
    if isinstance(getattr(fn, "__self__", None), nn.Cell):
        yield fn.__self__
    held: Sequence[Any] = ()
    if isinstance(fn, partial):
        held = (fn.func, *fn.args, *fn.keywords.values())
    elif inspect.isfunction(
        fn := inspect.unwrap(getattr(fn, "__func__", fn)) if callable(fn) else fn
    ):
        known = inspect.getclosurevars(fn)
        named = (known.nonlocals, known.globals, fn.__kwdefaults__ or {})
        held = (
            *(fn.__defaults__ or ()),
            *(each for names in named for each in names.values()),
        )
    for each in held if depth else ():
        yield from named_by(each, depth - 1)


ROUNDINGS = {
    ms.float16: 2.0**-5,
    ms.bfloat16: 2.0**-4,
    ms.float32: 2.0**-11,
    ms.float64: 2.0**-26,
}
"""How far the outputs of two passes may differ, relative to the largest. Integers are
equal.
"""
LARGEST = 2**16
"""Elements of a Parameter that may be a statistic; a larger one that nobody trains is a
frozen weight.
"""


class Noted:
    """The statistics and the counters of random operators before a function runs."""

    def __init__(self, fn: object) -> None:
        self.cells = {
            id(each): each
            for cell in cells_of(fn, DEPTH)
            for _, each in cell.cells_and_names()
        }.values()
        held = {
            id(parameter): parameter
            for cell in self.cells
            for parameter in statistics_of(cell)
        }
        self.values = [
            (parameter, parameter.value().copy()) for parameter in held.values()
        ]
        self.counters = dict(SEEDS._KERNEL_SEED)

    def after_error(self) -> None:
        forget_recorded()
        self.set_back()

    def set_back(self) -> None:
        set_counters(self.counters)
        for parameter, value in self.values:
            ops.assign(parameter, value)


class Replay:
    """Gives each micro-batch its own random numbers, the same in a second pass, and
    sets back what a call that raised has changed.
    """

    keeps = False
    """True if what was changed stays although an error is raised."""

    def __init__(self, fn: object, *, lends: bool = True) -> None:
        self.fn = fn
        self.lends = lends or (
            SEEDS._GLOBAL_SEED is not None and ms.get_context("mode") != ms.GRAPH_MODE
        )
        self.places: list[dict[Any, int]] = []

    def __enter__(self) -> Replay:
        self.noted = Noted(self.fn)
        self.seed = SEEDS._GLOBAL_SEED
        self.dropouts = [
            (cell, cell.dropout)
            for cell in self.noted.cells
            if self.lends and type(cell) is nn.Dropout
        ]
        if self.seed is None and self.lends:
            SEEDS._GLOBAL_SEED = secrets.randbelow(2**31 - 2) + 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        SEEDS._GLOBAL_SEED = self.seed
        for cell, operator in self.dropouts:
            cell.dropout = operator
        if kind is not None and not self.keeps:
            self.noted.after_error()

    def begin(self, place: int) -> None:
        if not self.lends:
            return
        if place == len(self.places):
            self.places.append(dict(SEEDS._KERNEL_SEED))
        set_counters(self.places[place])
        for cell, _ in self.dropouts:
            keep = cell.keep_prob if cell.p is None else 1.0 - cell.p
            cell.dropout = ops.Dropout(keep, *SEEDS._get_graph_seed(0, "dropout"))

    def set_back(self) -> None:
        self.noted.set_back()


def statistics_of(cell: nn.Cell) -> list[Parameter]:
    normalizes = "Norm" in type(cell).__name__
    held = cell.get_parameters(expand=False)
    return [
        parameter
        for parameter in held
        if not parameter.requires_grad and (normalizes or parameter.size <= LARGEST)
    ]


def require_replayable(fn: object) -> None:
    """Raise unless the function can be replayed: in graph mode it must not draw."""
    drawing = random_cell(fn)
    if drawing is not None and ms.get_context("mode") == ms.GRAPH_MODE:
        raise replay_error(
            f"a {drawing} in training in graph mode",
            "Run in PyNative mode, or write set_train(False).",
        )


def require_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Raise unless both passes gave the same outputs, but for what two compilations of
    one function differ by.
    """
    for before, after in zip(first, second, strict=True):
        a, b = (each.astype(ms.float64).asnumpy() for each in (before, after))
        scale = np.abs(a[np.isfinite(a)]).max(initial=0.0)
        if not np.allclose(
            a, b, rtol=0, atol=ROUNDINGS.get(before.dtype, 0.0) * scale, equal_nan=True
        ):
            fix = (
                "Draw with mindspore.nn.Dropout or mindspore.ops.dropout, in PyNative"
                " mode, or give random numbers in the batch."
            )
            raise replay_error(
                "outputs of the second pass that differ from the first", fix
            )


def replay_error(found: str, fix: str) -> UsageError:
    return kit.explain(
        UsageError,
        "outputs_fn",
        expected="a function that gives the same outputs again",
        found=found,
        fix=fix,
    )
