"""What a run of the model may change, and how it is put back: parameters, statistics, attributes of Cells, modes, random states.

Values are compared and kept as NumPy's: one operator in PyNative takes a thousand times as long. A parameter is written only if it changed.
Operators run one by one: MindSpore's own threads, which run ahead of Python, wait for each value that is read here, and take five times
the processor time with small models.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import mindspore as ms
import mindspore.common.seed  # the module; `mindspore.common` has functions of its name
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum.kit import HostRandom

SEEDS: Any = sys.modules["mindspore.common.seed"]
"""Private to MindSpore: ``_GLOBAL_SEED`` and ``_KERNEL_SEED``, a counter per random operator. MindSpore has no public way to read both."""
NOBODYS = 1_618_033_988
"""A seed that no loss sets, so that one which sets the user's own seed again is noticed."""
PLAIN = (int, float, complex, str, bool, type(None), Tensor, np.ndarray, tuple)


class Kept:
    """The user's state. As a context: it is put back at the end of the block, however the block ends.

    Args:
        model: the Cell.
        host: the generators of Python and NumPy.
    """

    def __init__(self, model: nn.Cell, host: HostRandom) -> None:
        self._model, self._host = model, host
        self._cells = dict(model.cells_and_names())
        self._parameters = {parameter.name: parameter for parameter in model.get_parameters()}
        self._values = {name: parameter.asnumpy().copy() for name, parameter in self._parameters.items()}
        self._attributes = {name: _attributes(cell) for name, cell in self._cells.items()}
        self._modes = {name: cell.training for name, cell in self._cells.items()}
        self._seeds = (SEEDS._GLOBAL_SEED, dict(SEEDS._KERNEL_SEED))
        self._context = {name: ms.get_context(name) for name in ("mode", "pynative_synchronize")}

    def __enter__(self) -> Kept:
        ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ms.set_context(**self._context)
        self.put_back_state()
        for name, mode in self._modes.items():
            self._cells[name].training = mode
        self.put_back_seeds(0)
        SEEDS._GLOBAL_SEED = self._seeds[0]

    def put_back_state(self) -> None:
        """Give parameters and attributes the values that they had."""
        for name, value in self._values.items():
            if not _same(self._parameters[name].asnumpy(), value):
                ops.assign(self._parameters[name], Tensor(value, self._parameters[name].dtype))
        for name, before in self._attributes.items():
            cell = self._cells[name]
            for gone in set(_attributes(cell)) - set(before):
                delattr(cell, gone)
            for attribute, value in before.items():
                if not _same(getattr(cell, attribute, None), value):
                    setattr(cell, attribute, value)

    def put_back_seeds(self, seed: int) -> None:
        """Begin the user's random numbers again; others with another `seed`."""
        SEEDS._KERNEL_SEED.clear()
        SEEDS._KERNEL_SEED.update(self._seeds[1])
        SEEDS._GLOBAL_SEED = 1 + seed if self._seeds[0] is None or seed else self._seeds[0]
        self._host.begin(seed)

    def drew(self) -> bool:
        """Whether random operators have drawn since the seeds were put back."""
        return dict(SEEDS._KERNEL_SEED) != self._seeds[1]

    def watch_seed(self) -> None:
        """From now on `reseeded` tells."""
        SEEDS._GLOBAL_SEED = NOBODYS

    def reseeded(self) -> bool:
        """Whether MindSpore's seed was set since `watch_seed`, be it to the value that it had."""
        return bool(SEEDS._GLOBAL_SEED != NOBODYS)

    def state(self) -> dict[str, Any]:
        """All that a forward pass may change, by name, as it is now."""
        found: dict[str, Any] = {name: parameter.asnumpy().copy() for name, parameter in self._parameters.items()}
        for name, cell in self._cells.items():
            found |= {f"{name}.{attribute}".lstrip("."): value for attribute, value in _attributes(cell).items()}
        return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """Names of what differs between two states."""
    return tuple(name for name in after if name not in before or not _same(before[name], after[name]))


def _attributes(cell: nn.Cell) -> dict[str, Any]:
    """Public attributes with plain values; an array is copied, since it can be written into."""
    found = {name: value for name, value in vars(cell).items() if not name.startswith("_") and name != "training"}
    plain = {name: value for name, value in found.items() if isinstance(value, PLAIN) and not isinstance(value, Parameter)}
    return {name: value.copy() if isinstance(value, Tensor | np.ndarray) else value for name, value in plain.items()}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(a.dtype == b.dtype and _same(a.asnumpy(), b.asnumpy()))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a is b or (type(a) is type(b) and bool(a == b))
