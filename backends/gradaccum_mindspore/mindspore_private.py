"""Private names of MindSpore: its mode, traces, recorded operators, saving, random
counters.

MindSpore keeps recording operators after a function raised inside
`mindspore.value_and_grad`, unless a Cell raised; `forget_recorded` ends that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor

from gradaccum import UsageError

try:
    from mindspore.graph import api, jit_trace
except ImportError:  # their places before MindSpore 2.9
    from mindspore.common import api, jit_trace

pynative_executor = api._pynative_executor


def forget_recorded() -> None:
    pynative_executor.clear_res()


@contextmanager
def context(**settings: Any) -> Iterator[None]:
    """Change `mindspore.set_context`'s settings inside the block."""
    before = {name: ms.get_context(name) for name in settings}
    ms.set_context(**settings)
    try:
        yield
    finally:
        ms.set_context(**before)


_mode = getattr(ms.context, "_get_mode", partial(ms.get_context, "mode"))
"""What `mindspore.nn.Cell` itself asks; `mindspore.get_context` takes as long as ten
operators.
"""


def is_graph_mode() -> bool:
    return bool(_mode() == ms.GRAPH_MODE)


def refuse_trace() -> None:
    """Raise inside ``mindspore.jit(capture_mode="trace")``, which repeats the operators
    of its first call: no later micro-batch would end a window.
    """
    if not jit_trace._using_trace:
        return
    # MindSpore 2.10 goes on recording if the recorded function raises, and then the
    # next operator crashes.
    phase = jit_trace._trace_jit_context.phase
    jit_trace._jit_trace_end(Tensor(0.0))
    jit_trace._trace_compile_cache.discard(phase)
    raise UsageError(
        "capture_mode: expected 'ast'; got 'trace', which repeats the operators of the"
        " first call and makes no update. Write @mindspore.jit."
    )


def call_when_saved(parameter: Parameter, function: Callable[[], None]) -> None:
    """Call `function` whenever `parameter` is saved, and before it runs for the first
    time.

    MindSpore has no hook for saving, but calls this method of every Parameter.
    """
    init_data = parameter.init_data

    def init_data_with_note(*args: Any, **keywords: Any) -> Parameter:
        function()
        return init_data(*args, **keywords)

    parameter.init_data = init_data_with_note


SEEDS: Any = import_module("mindspore.common.seed")
"""``_GLOBAL_SEED``, ``_KERNEL_SEED`` (a counter for each random operator),
``_get_graph_seed``.
"""


def set_counters(counters: Mapping[Any, int]) -> None:
    SEEDS._KERNEL_SEED.clear()
    SEEDS._KERNEL_SEED.update(counters)
