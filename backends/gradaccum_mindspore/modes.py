"""Which mode MindSpore runs in, asked before every call; `mindspore.get_context` takes as long as ten operators."""

from __future__ import annotations

from functools import cache, partial

import mindspore as ms

_mode = getattr(ms.context, "_get_mode", partial(ms.get_context, "mode"))
"""What `mindspore.nn.Cell` itself asks at each call."""


def is_graph_mode() -> bool:
    """Whether MindSpore compiles a Cell that Python calls."""
    return bool(_mode() == ms.GRAPH_MODE)


def decides_on_host() -> bool:
    """Whether Python chooses the program of a micro-batch: it reads a counter, which means no wait for the device on a CPU only."""
    return is_graph_mode() and _on_cpu() and ms.get_auto_parallel_context("parallel_mode") == "stand_alone"


@cache
def _on_cpu() -> bool:
    # A program follows at once, and from then on MindSpore lets nobody change the device.
    return bool(ms.get_context("device_target") == "CPU")
