"""MindSpore's two other ways to capture Python: bytecode capture leaves this package to Python, tracing is refused.

``jit(capture_mode="bytecode")`` fails on some of the functions here ("should not reach here"). MindSpore skips its own files, and
`skip_in_bytecode` makes it skip these too: it captures the user's function, and the wrapped optimizer runs as in PyNative.

``jit(capture_mode="trace")`` records the operators of the first call and repeats them: no later call would decide whether a window ends.
"""

from __future__ import annotations

from pathlib import Path

from mindspore import Tensor
from mindspore._c_expression import pi_jit_set_context

import gradaccum
from gradaccum import UsageError
from gradaccum.kit import explain

try:
    from mindspore.graph import jit_trace
except ImportError:  # its place before MindSpore 2.9
    from mindspore.common import jit_trace


def skip_in_bytecode() -> None:
    """Keep bytecode capture out of this package and the core."""
    pi_jit_set_context(skip_files=tuple(str(Path(file).parent) for file in (__file__, gradaccum.__file__)))


def refuse_trace() -> None:
    """Raise if MindSpore is recording operators now.

    Raises:
        UsageError: it is.
    """
    if jit_trace._using_trace:
        _stop_tracing()
        raise explain(
            UsageError,
            "capture_mode",
            expected="'ast' or 'bytecode' around a wrapped optimizer, because a trace repeats the operators of the first micro-batch",
            found="trace",
            fix="Write @mindspore.jit.",
        )


def _stop_tracing() -> None:
    """Stop recording. MindSpore goes on if a recorded function raises, and then the next operator crashes."""
    phase = jit_trace._trace_jit_context.phase
    jit_trace._jit_trace_end(Tensor(0.0))
    jit_trace._trace_compile_cache.discard(phase)


skip_in_bytecode()
