"""The same in every mode, with one program for each: a schedule of events over one wrapped optimizer."""

from __future__ import annotations

import math
from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Tensor

import gradaccum
from conformance_tests.framework_tests.mindspore_common import BIAS, MODES, WEIGHT, set_mode
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import (
    STEPS,
    Truth,
    Worker,
    all_windows,
    micro_batches,
    numbers,
    require_same_everywhere,
    require_truth,
)
from conformance_tests.framework_tests.mindspore_workers.counting import Graph, compiled_graphs, require_one_branch
from gradaccum_mindspore import load_checkpoint_into

CLIP = 0.05


@cache
def compiled(mode: str) -> tuple[Worker, dict[str, Tensor], list[Graph]]:
    """A worker, compiled once for each mode; the state it starts from; and its graphs."""
    worker = Worker(mode, clip_norm=CLIP, loss_scale=gradaccum.DynamicLossScale(1024.0, growth_interval=2))
    start = {p.name: Tensor(p.asnumpy(), p.dtype) for p in worker.cell.get_parameters()}
    with compiled_graphs() as graphs:
        worker.learn(micro_batches(0)[0])
    return worker, start, graphs


def restarted(mode: str) -> Worker:
    worker, start, _ = compiled(mode)
    set_mode(mode)
    load_checkpoint_into(worker.cell, start)
    return worker


@check
def every_mode_makes_the_large_batch(rank: int) -> None:
    """The first window ends in compiled code on one worker, while the other flushes from Python."""
    truth, norms = Truth(), []
    for window in all_windows():
        truth.window(window, clip_norm=CLIP)
        norms.append(truth.norm)
    for mode in MODES:
        worker, found = restarted(mode), []
        for batch in micro_batches(rank):
            worker.learn(batch)
            found += [worker.opt.result.grad_norm] if worker.opt.result.closed else []
        worker.opt.flush()
        np.testing.assert_allclose([*found, worker.opt.result.grad_norm], norms if rank == 0 else norms[1:], rtol=1e-5)
        require_truth(worker, truth)
        result = worker.opt.result
        assert (result.optimizer_step, result.loss_scale) == (2, 2048.0)
        require_same_everywhere((numbers(worker), result))


@check
def compiled_micro_batch_reduces_nothing(rank: int) -> None:
    for mode in ("jit", "graph"):
        require_one_branch(compiled(mode)[2])


@check
def untold_loss_reaches_all(rank: int) -> None:
    """One worker's last micro-batch tells no loss: the window has none on either. Its end is compiled."""
    worker = restarted("jit")

    def untold(*gradients: Tensor) -> bool:
        return worker.opt(gradients)

    for batch in micro_batches(0)[: STEPS - 1]:
        worker.learn(batch)
    if rank == 0:
        ms.jit(untold)(Tensor(WEIGHT), Tensor(BIAS))
    else:
        worker.learn(micro_batches(0)[0])
    assert (worker.opt.result.closed, math.isnan(worker.opt.result.loss)) == (True, True)
    for batch in micro_batches(0)[:STEPS]:
        worker.learn(batch)
    assert not math.isnan(worker.opt.result.loss)
