"""Meets custom backwards while a function runs.

MindSpore keeps no list of the functions that ran. So `watched` replaces, for the time of a check, the methods by which a custom backward
comes in: `mindspore.nn.Cell._call_custom_bprop` and each autograd function's ``forward``. Meanwhile everything runs as Python, because a
compiled function calls neither. At the end `watched` restores everything that a forward pass may change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.common import _Function
from numpy.typing import NDArray

from gradaccum_mindspore.linearity.custom_rules import Custom
from gradaccum_mindspore.sums import write
from gradaccum_mindspore.types import DType

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Nobody can repeat their random numbers: the kernel keeps its own state."""


class Met:
    """The custom backwards and dtypes that came by while a function ran, and the values that it may have changed."""

    def __init__(self) -> None:
        self.dtypes: set[DType] = set()
        self._customs: dict[tuple[str, int], Custom] = {}
        self._buffers: dict[int, tuple[Parameter, NDArray[Any]]] = {}
        self._random_state = ms.get_rng_state()
        self._dropouts: list[nn.Cell] = []

    def customs(self) -> Iterator[tuple[str, Custom]]:
        """Each custom backward once, by the name of its class."""
        for (name, _), custom in list(self._customs.items()):
            yield name, custom

    def note(self, name: str, owner: object, custom: Custom) -> None:
        """Note a custom backward."""
        self._customs.setdefault((name, id(owner)), custom)

    def keep(self, cell: nn.Cell) -> None:
        """Before a cell runs: keep the values that it may change, such as the statistics of a normalization; switch a dropout off."""
        if isinstance(cell, DROPOUTS) and cell.training:
            self._dropouts.append(cell.set_train(False))
        if cell.mixed_precision_type is not None:
            self.dtypes.add(ms.bfloat16 if "BF16" in str(cell.mixed_precision_type) else ms.float16)
        for parameter in cell.get_parameters(expand=False):
            if not parameter.requires_grad and id(parameter) not in self._buffers:
                self._buffers[id(parameter)] = parameter, parameter.asnumpy().copy()

    def restore(self) -> None:
        """Put everything back as it was at the start."""
        self.rewind()
        for cell in self._dropouts:
            cell.set_train(True)

    def rewind(self) -> None:
        """Put Parameters and random state back as they were at the start."""
        for parameter, value in self._buffers.values():
            write(parameter, Tensor(value, parameter.dtype))
        ms.set_rng_state(self._random_state)


@contextmanager
def watched() -> Iterator[Met]:
    """Run as Python, meet custom backwards, and put everything back at the end."""
    met = Met()
    with ExitStack() as stack:
        stack.callback(ms.set_context, mode=ms.get_context("mode"))
        stack.callback(met.restore)
        stack.enter_context(_compiled_as_python())
        ms.set_context(mode=ms.PYNATIVE_MODE)
        stack.enter_context(_instead(nn.Cell, "__call__", _keeping(met, nn.Cell.__call__)))
        stack.enter_context(_instead(nn.Cell, "_call_custom_bprop", _noting(met, nn.Cell._call_custom_bprop)))
        for kind in _subclasses(_Function):
            stack.enter_context(_instead(kind, "forward", staticmethod(_forwarding(met, kind, kind.forward))))
        yield met


@contextmanager
def _compiled_as_python() -> Iterator[None]:
    before = os.environ.get("MS_JIT")
    os.environ["MS_JIT"] = "0"
    try:
        yield
    finally:
        del os.environ["MS_JIT"]
        if before is not None:
            os.environ["MS_JIT"] = before


@contextmanager
def _instead(owner: type, name: str, value: object) -> Iterator[None]:
    """Give `owner` another attribute for a while, in place of its own or one that it inherits."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)


def _subclasses(kind: type[_Function]) -> set[type[_Function]]:
    return {below for child in kind.__subclasses__() for below in (child, *_subclasses(child))}


def _keeping(met: Met, call: Callable[..., Any]) -> Callable[..., Any]:
    def kept(cell: nn.Cell, *args: object, **kwargs: object) -> Any:
        met.keep(cell)
        return call(cell, *args, **kwargs)

    return kept


def _noting(met: Met, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(cell: nn.Cell, *args: object, **kwargs: object) -> Any:
        output = call(cell, *args, **kwargs)
        met.note(type(cell).__name__, cell, Custom(lambda *values: cell(*values, **kwargs), args, output))
        return output

    return noted


def _forwarding(met: Met, kind: type[_Function], forward: Callable[..., Any]) -> Callable[..., Any]:
    with_context = getattr(_Function, "setup_context", None) in (None, getattr(kind, "setup_context", None))  # new in MindSpore 2.10

    def noted(*args: object, **kwargs: object) -> Any:
        output = forward(*args, **kwargs)
        given = args[1:] if with_context else args
        met.note(kind.__name__, kind, Custom(lambda *values: kind.apply(*values, **kwargs), given, output))
        return output

    return noted
