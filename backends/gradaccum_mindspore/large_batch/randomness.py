"""No two micro-batches draw the same random numbers.

In PyNative `replay.Replay` sees to that. In compiled code each operator has numbers of its own, and after `mindspore.set_seed` they all
start at that seed. So the micro-batches of one size have to run through one compiled program, and those of two sizes, which are two
programs, would begin with the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn

from gradaccum import UsageError
from gradaccum.kit import explain

DEPTH = 3
"""How many functions deep Cells are looked for."""


def require_one_stream(fn: object, sizes: set[int | None], items: int | None) -> None:
    """Note a micro-batch of `items`, and refuse a second size where each size is a compiled program of its own.

    Raises:
        UsageError: graph mode, a seed is set, and a Cell of `fn` draws random numbers.
    """
    sizes.add(items)
    if len(sizes) == 2 and ms.get_context("mode") == ms.GRAPH_MODE:
        require_one_program(fn, "micro-batches of two sizes in graph mode")


def require_one_program(fn: object, found: str) -> None:
    """Refuse randomness in two programs that start at one seed.

    Raises:
        UsageError: a seed is set, and a Cell of `fn` draws random numbers.
    """
    drawing = random_cell(fn) if ms.get_seed() is not None else None
    if drawing is not None:
        fix = "Leave mindspore.set_seed out, run in PyNative mode, or choose a number of items that divides the batch and no has_aux."
        expected = f"one compiled program, because {drawing} starts in each at the seed of mindspore.set_seed"
        raise explain(UsageError, "steps", expected=expected, found=found, fix=fix)


def random_cell(fn: object) -> str | None:
    """The class of a Cell that `fn` may call and that draws random numbers in training now; None if none is found."""
    for cell in cells_of(fn, DEPTH):
        for _, each in cell.cells_and_names():
            if "Dropout" in type(each).__name__ and each.training:
                return type(each).__name__
    return None


def cells_of(fn: Any, depth: int) -> Iterator[nn.Cell]:
    """The Cells that a function names."""
    yield from (each for each in named_by(fn, depth) if isinstance(each, nn.Cell))


def named_by(fn: Any, depth: int) -> Iterator[nn.Cell | Parameter]:
    """The Cells and Parameters that a function names: itself, its object, its closure, the globals that it reads, further functions."""
    if isinstance(fn, nn.Cell | Parameter):
        yield fn
        return
    if isinstance(getattr(fn, "__self__", None), nn.Cell):
        yield fn.__self__
    fn = inspect.unwrap(getattr(fn, "__func__", fn)) if callable(fn) else fn
    if depth and inspect.isfunction(fn):
        known = inspect.getclosurevars(fn)
        for each in (*known.nonlocals.values(), *known.globals.values()):
            yield from named_by(each, depth - 1)
