"""The window of two workers is the large batch of both, in every mode, with schedules
and in `Model.train`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim
from mindspore.experimental.optim.lr_scheduler import StepLR
from mindspore.train import Model

import gradaccum
from gradaccum_mindspore import FlushAtEpochEnd

from ..mindspore_common import set_mode
from ..mindspore_graphs import saved_graphs
from ..refusing import refused
from .checks import check
from .common import (
    ROWS,
    WORLD,
    Worker,
    all_windows,
    micro_batches,
    numbers,
    reference,
    require_equal,
    require_same_everywhere,
)
from .law import require_the_law
from .refusals import sgd


@check
def compiled_micro_batch_reduces_nothing(rank: int) -> None:
    """The collectives stand together in one graph, which neither differentiates nor
    updates: the branch that ends a window.
    """
    worker = Worker("jit")
    with saved_graphs("graph_build") as texts:
        worker.learn(micro_batches(0)[0])
    (end,) = [text for text in texts if "AllReduce(" in text]
    assert "MatMul" in "".join(texts)
    assert "MatMul" not in end
    assert "ApplyMomentum(" not in end
    worker.opt.discard()


@check
def two_workers_send_what_the_law_says(rank: int) -> None:
    require_the_law()


CLIP = 0.05


@check
def windows_of_both_engines_make_the_large_batch(rank: int) -> None:
    """Python ends the windows on both workers, or on one; on the other one the step is
    compiled.
    """
    scale = gradaccum.DynamicLossScale(1024.0, growth_interval=2)
    expected = reference(all_windows(), clip_norm=CLIP)
    for is_pynative in (True, rank == 0, rank == 1):
        mode = "pynative" if is_pynative else "graph"
        worker = Worker(mode, clip_norm=CLIP, loss_scale=scale)
        for batch in micro_batches(rank):
            worker.learn(batch)
        worker.opt.flush()
        require_equal(worker, expected)
        assert worker.opt.result.loss_scale == 2048.0


PAIR = 2
"""Of 6 and 3 micro-batches: one worker closes its three windows by itself, the other
one so, and two in one `flush`.
"""


@check
def schedules_move_once_per_update(rank: int) -> None:
    """By a gate, or after each update."""
    shares = [micro_batches(worker) for worker in range(WORLD)]
    expected = Worker(steps=None, data_parallel=False, inner=optim.SGD)
    schedule = StepLR(expected.opt, 1, 0.5)
    for first in range(0, 6, PAIR):
        expected.train([batch for own in shares for batch in own[first : first + PAIR]])
        schedule.step()
    for mode, gated in (
        ("pynative", True),
        ("pynative", False),
        ("jit", True),
        ("graph", False),
    ):
        worker = Worker(mode, steps=PAIR, inner=optim.SGD)
        schedule = StepLR(worker.opt, 1, 0.5)
        step = gradaccum.wrap(schedule).step if gated else lambda: None
        if not gated:
            worker.opt.on_update(schedule.step)
        for call in calls_of(worker, rank):
            call()
            assert worker.opt.result.micro_step < PAIR
            step()
        require_equal(worker, expected)
        rate = float(worker.opt.param_groups[0]["lr"])
        np.testing.assert_allclose(rate, 0.1 * 0.5**3, rtol=1e-6)


def calls_of(worker: Worker, rank: int) -> list[Callable[[], object]]:
    """Each micro-batch, and a flush."""
    learning = [partial(worker.learn, batch) for batch in micro_batches(rank)]
    return [*learning, worker.opt.flush]


@check
def schedules_that_drift_apart_are_refused(rank: int) -> None:
    """A schedule that looks at ``result`` after `flush` sees the last window alone. All
    workers raise, before the update.
    """
    worker = Worker(steps=PAIR, inner=optim.SGD)
    schedule = StepLR(worker.opt, 1, 0.5)
    rate = "0.025" if rank == 0 else "0.05"
    with refused(
        gradaccum.UsageError, f"learning rates on rank {rank}", "listener", rate
    ):
        for call in calls_of(worker, rank):
            call()
            if worker.opt.result.applied:
                schedule.step()
    assert worker.opt.result.optimizer_step == 2
    ops.assign(worker.opt.param_groups[0]["lr"], Tensor(0.025, ms.float32))
    worker.opt.flush()
    assert worker.opt.result.optimizer_step == 3, "the sums are as they were"
    require_same_everywhere(numbers(worker))


@check
def python_number_is_a_learning_rate(rank: int) -> None:
    """The window's end is compiled, and reads Parameters."""
    parameter = Parameter(Tensor(np.zeros(3), ms.float32), name="p")
    opt = gradaccum.wrap(optim.SGD([parameter], 1.0), steps=1, data_parallel=True)
    for rate, value in ((0.25, -0.25), (0.5, -0.75)):
        opt.param_groups[0]["lr"] = rate
        opt((Tensor(np.ones(3), ms.float32),))
        assert parameter.asnumpy().tolist() == [value] * 3


@check
def loaded_weights_are_trained(rank: int) -> None:
    """MindSpore's own loading gives a Parameter other memory, which the program of a
    window's end does not see.
    """
    opt = gradaccum.wrap(sgd(0.0), steps=1, data_parallel=True)
    gradient = (Tensor(np.ones(3), ms.float32),)
    opt(gradient)
    loaded = Parameter(Tensor(np.full(3, 7.0), ms.float32), name="p")
    ms.load_param_into_net(opt, {"p": loaded})
    opt.learning_rate.set_data(Tensor(0.5, ms.float32))
    opt(gradient)
    assert opt.parameters[0].asnumpy().tolist() == [6.5] * 3


@check
def other_rates_in_compiled_code_skip_the_window(rank: int) -> None:
    """It cannot raise. Python raises as soon as it is asked, on every worker: the one
    in compiled code and the one that flushes.
    """
    for mode, inner in (("graph", optim.SGD), ("jit", nn.Momentum)):
        worker = Worker(mode, steps=PAIR, inner=inner)
        rate = worker.opt.lrs[0] if inner is optim.SGD else worker.opt.learning_rate
        batches = micro_batches(rank)[:PAIR]
        start = numbers(worker)
        ops.assign(rate, rate.value() * (1 + rank))
        with refused(
            gradaccum.UsageError, f"learning rates on rank {rank}", "listener"
        ):
            for batch in batches[: PAIR - rank]:
                worker.learn(batch)
            if rank == 1:
                worker.opt.flush()
            print(worker.opt.result)
        set_mode(mode if mode == "graph" else "pynative")
        if rank == 0:
            worker.opt.flush()  # it finds no window any more
        assert worker.opt.result.optimizer_step == 0
        assert numbers(worker) == start
        ops.assign(rate, rate.value() / (1 + rank))
        for batch in batches:
            worker.learn(batch)
        assert worker.opt.result.applied
        require_same_everywhere(numbers(worker))


@check
def model_train_makes_the_large_batch(rank: int) -> None:
    """Two epochs, which the workers end together. In MindSpore's cell its own reducer
    does not run, and each micro-batch weighs the same.
    """
    for mode, of_mindspore in product(("pynative", "graph"), (False, True)):

        def weighed(mask: Any, alike: bool = of_mindspore) -> Any:
            return np.ones_like(mask) if alike else mask

        expected = reference(
            [[(x, y, weighed(m)) for x, y, m in each] for each in 2 * all_windows()]
        )
        set_mode(mode)
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
        worker = Worker(mode)
        x, y, mask = map(np.concatenate, zip(*micro_batches(rank), strict=True))
        columns = (x, y, weighed(mask))
        data = NumpySlicesDataset(columns, ["x", "y", "mask"], shuffle=False)
        model = (
            Model(worker.net, optimizer=worker.opt)
            if of_mindspore
            else Model(worker.cell)
        )
        flush = FlushAtEpochEnd(worker.opt)
        model.train(2, data.batch(ROWS), callbacks=[flush], dataset_sink_mode=False)
        ms.reset_auto_parallel_context()
        require_equal(worker, expected)
