"""Functions that use MindSpore's private API to read the execution mode, end traces,
clear recorded operators, notice that a checkpoint is being saved, and set the counters
of random operators.

After a function has raised an error inside `mindspore.value_and_grad`, MindSpore keeps
recording operators, unless the error came from a Cell. `forget_recorded` stops the
recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from gradaccum import UsageError

try:
    from mindspore.graph import api, jit_trace
except ImportError:  # Before MindSpore 2.9, mindspore.common contained these modules.
    from mindspore.common import api, jit_trace

pynative_executor = api._pynative_executor


def forget_recorded() -> None:
    pynative_executor.clear_res()


@contextmanager
def context(**settings: Any) -> Iterator[None]:
    """Change settings of `mindspore.set_context` inside a ``with`` block."""
    before = {name: ms.get_context(name) for name in settings}
    ms.set_context(**settings)
    try:
        yield
    finally:
        ms.set_context(**before)


_mode = getattr(ms.context, "_get_mode", partial(ms.get_context, "mode"))
"""A function that returns MindSpore's execution mode. `mindspore.nn.Cell` itself calls
this function. It is used instead of `mindspore.get_context`, because one call of
`get_context` takes as much time as ten operators.
"""


def is_graph_mode() -> bool:
    return bool(_mode() == ms.GRAPH_MODE)


def refuse_trace() -> None:
    """Raise an error if ``mindspore.jit(capture_mode="trace")`` is recording this call,
    because each later call would only repeat the recorded operators and would never
    apply an update.
    """
    if not jit_trace._using_trace:
        return
    # End the trace before raising the error. Otherwise, MindSpore 2.10 would keep
    # recording, and the next operator would crash.
    phase = jit_trace._trace_jit_context.phase
    jit_trace._jit_trace_end(Tensor(0.0))
    jit_trace._trace_compile_cache.discard(phase)
    raise UsageError(
        "capture_mode: expected 'ast'; got 'trace', which would repeat the operators of"
        " the first call and never apply an update. Write @mindspore.jit."
    )


def call_after(
    parameter: Parameter, method_name: str, function: Callable[[], None]
) -> None:
    """Call `function` after each call of the method `method_name` of `parameter`.

    MindSpore has no hooks for saving and loading. But it calls ``init_data`` of every
    Parameter that it saves (and also before a Cell runs for the first time), and
    ``set_data`` of every Parameter into which it loads a value.
    """
    method = getattr(parameter, method_name)

    def method_with_call(*args: Any, **keywords: Any) -> Parameter:
        result = method(*args, **keywords)
        function()
        return result

    setattr(parameter, method_name, method_with_call)


class CellOfOnePhase(nn.Cell):  # type: ignore[misc]
    """A Cell that does not pass the name of a compiled program on to its child Cells.

    When a compiled program is called, MindSpore 2.10 writes the program's name into
    every descendant of the called Cell, once for every path that leads to the
    descendant. In a wrapped optimizer, writing these names would take as much time as a
    few operators.
    """

    @property
    def compile_phase(self) -> str | None:
        phase: str | None = self._compile_phase
        return phase

    @compile_phase.setter
    def compile_phase(self, phase: str) -> None:
        object.__setattr__(self, "_compile_phase", phase)


SEEDS: Any = import_module("mindspore.common.seed")
"""The MindSpore module that contains ``_GLOBAL_SEED``, ``_KERNEL_SEED`` (a counter for
each random operator) and ``_get_graph_seed``.
"""


def set_counters(counters: Mapping[Any, int]) -> None:
    SEEDS._KERNEL_SEED.clear()
    SEEDS._KERNEL_SEED.update(counters)
