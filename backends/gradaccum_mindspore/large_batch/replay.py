"""Restore random states and layer statistics after an error, and draw the same random
numbers in a second pass as in the first pass.

In PyNative mode, MindSpore creates each random operator with seeds from counters in
`mindspore.common.seed`, so restoring the counters gives the same operators again.
`mindspore.nn.Dropout` creates its operator only once, so it temporarily gets a new
operator for each micro-batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from mindspore import nn, ops

from gradaccum_mindspore.mindspore_private import SEEDS, forget_recorded, set_counters

LARGEST = 2**16
"""`SavedState` copies only non-trainable Parameters with at most this number of
elements. A larger Parameter is assumed to be a frozen weight that never changes.
"""


def modules_of(fn: object, modules: Sequence[nn.Cell]) -> tuple[nn.Cell, ...]:
    """Return the Cells that `fn` is known to call: `fn` itself if it is a Cell, the
    Cell that `fn` is a method of, and the Cells in `modules`.
    """
    candidates = (fn, getattr(fn, "__self__", None), *modules)
    return tuple(cell for cell in candidates if isinstance(cell, nn.Cell))


class SavedState:
    """A copy of the statistics of Cells and of the counters of random operators. As a
    context manager, it restores the statistics and counters after an error.
    """

    def __init__(self, modules: Sequence[nn.Cell]) -> None:
        self.values = [
            (parameter, parameter.value().copy())
            for cell in modules
            for parameter in cell.untrainable_params()
            if parameter.size <= LARGEST
        ]
        self.counters = dict(SEEDS._KERNEL_SEED)

    def restore(self) -> None:
        set_counters(self.counters)
        for parameter, value in self.values:
            ops.assign(parameter, value)

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            forget_recorded()
            self.restore()


class RandomReplay:
    """A context manager that gives each micro-batch its own random numbers. If a
    micro-batch runs a second time, it gets the same numbers again.
    """

    def __init__(self, modules: Sequence[nn.Cell]) -> None:
        self.global_seed = SEEDS._GLOBAL_SEED
        self.counters: dict[int, dict[Any, int]] = {}
        self.dropouts = [
            (cell, cell.dropout)
            for module in modules
            for _, cell in module.cells_and_names()
            if type(cell) is nn.Dropout
        ]

    def __enter__(self) -> RandomReplay:
        if self.global_seed is None:
            SEEDS._GLOBAL_SEED = secrets.randbelow(2**31 - 2) + 1
        return self

    def __exit__(self, *error: object) -> None:
        SEEDS._GLOBAL_SEED = self.global_seed
        for cell, operator in self.dropouts:
            cell.dropout = operator

    def begin(self, micro_batch: int) -> None:
        set_counters(self.counters.setdefault(micro_batch, dict(SEEDS._KERNEL_SEED)))
        for cell, _ in self.dropouts:
            keep = cell.keep_prob if cell.p is None else 1.0 - cell.p
            cell.dropout = ops.Dropout(keep, *SEEDS._get_graph_seed(0, "dropout"))
