"""The processes of the suite's workers: as msrun starts them, but one by one, each by
the call that the suite makes in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.communication import init

from gradaccum_conformance import Array, Setup, ShardedLossCall, ShardedLossHarness
from gradaccum_harnesses.mindspore.session import (
    MindSporeHarness,
    MindSporeSession,
    context_mode,
)
from gradaccum_harnesses.mindspore.trainer import ms_dtype, plain
from gradaccum_mindspore import sharded_cross_entropy

HOST = "127.0.0.1"
SECONDS = "120"
"""For one reduction. A worker waits while another one compiles, on a busy machine for
longer than MindSpore's 30.
"""
SCHEDULER = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
from mindspore.communication import init
init()
"""
"""The process at which the workers meet. It ends as soon as its standard input does."""
_held: list[subprocess.Popen[bytes]] = []
"""The open end of the scheduler's standard input, which closes with this process."""

_kept: list[nn.Cell] = []
"""MindSpore takes a new cell for an old one whose address it has."""


class MindSporeWorkers(MindSporeHarness, ShardedLossHarness):
    """The harness, with processes that `join`."""

    worker_modes = MindSporeHarness.modes

    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        meeting = {
            "MS_WORKER_NUM": str(workers),
            "MS_SCHED_HOST": HOST,
            "MS_SCHED_PORT": str(port),
            "MS_CPU_COMM_OP_TIMEOUT": SECONDS,
        }
        if rank == 0:
            environment = {**os.environ, **meeting, "MS_ROLE": "MS_SCHED"}
            _held.append(
                subprocess.Popen(
                    [sys.executable, "-c", SCHEDULER],
                    stdin=subprocess.PIPE,
                    env=environment,
                )
            )
        os.environ.update(meeting, MS_ROLE="MS_WORKER", MS_NODE_ID=str(rank))
        ms.set_context(device_target="CPU")
        init()

    def start_shared(self, setup: Setup) -> MindSporeSession:
        return self.start(
            setup._replace(options={**(setup.options or {}), "data_parallel": True})
        )

    def sharded_cross_entropy(self, call: ShardedLossCall) -> tuple[Array, Array]:
        _kept.append(losses := ShardedLosses(call))
        logits, labels = Tensor(call.logits, ms_dtype(call.dtype)), Tensor(call.labels)
        wide = ms.float64 if call.dtype == "float64" else ms.float32
        with context_mode(call.mode):
            compiled = ms.jit(losses.construct) if call.mode == "jit" else losses
            function = (
                (lambda *inputs: compiled(*inputs)) if call.mode == "jit" else losses
            )
            take = ms.value_and_grad(function, 0, None, has_aux=True)
            (_, loss), gradient = take(logits, labels, Tensor(call.upstream, wide))
            return plain(loss), plain(gradient)


class ShardedLosses(nn.Cell):  # type: ignore[misc]
    """The loss of a call times its upstream gradient, and the loss."""

    def __init__(self, call: ShardedLossCall) -> None:
        super().__init__(auto_prefix=False)
        self.sizes, self.reduction = call.sizes, call.options.get("reduction", "mean")
        self.ignored, self.smoothing = (
            call.options.get("ignore_index", -100),
            call.options.get("label_smoothing", 0.0),
        )

    def construct(self, logits: Any, labels: Any, upstream: Any) -> Any:
        loss = sharded_cross_entropy(
            logits,
            labels,
            shard_sizes=self.sizes,
            reduction=self.reduction,
            label_smoothing=self.smoothing,
            ignore_index=self.ignored,
        )
        return (loss * upstream).sum(), loss
