"""The window of two workers is the large batch of both, in every mode, with schedules
and in `Model.train`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim
from mindspore.experimental.optim.lr_scheduler import StepLR
from mindspore.train import Model

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    BIAS,
    MODES,
    WEIGHT,
    X,
    Y,
    make_net,
    set_mode,
)
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import (
    STEPS,
    WORLD,
    Truth,
    Worker,
    all_windows,
    micro_batches,
    numbers,
    require_same_everywhere,
    require_truth,
)
from conformance_tests.framework_tests.mindspore_workers.counting import (
    Graph,
    called,
    compiled_graphs,
    require_one_branch,
)
from conformance_tests.framework_tests.mindspore_workers.law import require_the_law
from conformance_tests.framework_tests.mindspore_workers.refusals import fail_once
from conformance_tests.framework_tests.refusing import refused
from gradaccum_mindspore import (
    FlushAtEpochEnd,
    TrainOneStepCell,
    load_checkpoint_into,
)


@check
def discarded_window_is_one_worker_s_own(rank: int) -> None:
    worker = Worker(steps=None)
    for batch in micro_batches(rank)[:3]:
        worker.learn(batch)
    if rank == 1:
        worker.opt.discard()
    worker.opt.flush()
    truth = Truth()
    truth.window(micro_batches(0)[:3])
    require_truth(worker, truth)


@check
def two_workers_send_what_the_law_says(rank: int) -> None:
    require_the_law()


CLIP = 0.05


@cache
def compiled(mode: str) -> tuple[Worker, dict[str, Tensor], list[Graph]]:
    """A worker, compiled once for each mode; the state it starts from; and its
    graphs.
    """
    worker = Worker(
        mode,
        clip_norm=CLIP,
        loss_scale=gradaccum.DynamicLossScale(1024.0, growth_interval=2),
    )
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
    """The first window ends in compiled code on one worker, while the other flushes
    from Python.
    """
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
        np.testing.assert_allclose(
            [*found, worker.opt.result.grad_norm],
            norms if rank == 0 else norms[1:],
            rtol=1e-5,
        )
        require_truth(worker, truth)
        result = worker.opt.result
        assert (result.optimizer_step, result.loss_scale) == (2, 2048.0)
        require_same_everywhere((numbers(worker), result))


@check
def hosted_windows_make_the_large_batch(rank: int) -> None:
    """Python ends the windows of compiled micro-batches, on both workers, or beside one
    whose window is one graph.
    """
    truth = Truth()
    for window in all_windows():
        truth.window(window, clip_norm=CLIP)
    for hosted in (True, rank == 0, rank == 1):
        options = {
            "clip_norm": CLIP,
            "loss_scale": gradaccum.DynamicLossScale(1024.0, growth_interval=2),
        }
        with called() as calls:
            worker = Worker("graph", hosted=hosted, **options)
            for index, batch in enumerate(micro_batches(rank)):
                calls.clear()
                worker.learn(batch)
                if hosted:
                    assert bool(calls) == ((index + 1) % STEPS == 0), (
                        "nothing within a window"
                    )
        worker.opt.flush()
        require_truth(worker, truth)
        assert (worker.opt.result.optimizer_step, worker.opt.result.loss_scale) == (
            2,
            2048.0,
        )
        require_same_everywhere((numbers(worker), worker.opt.result))


@check
def hosted_window_whose_update_raised_takes_no_micro_batch(rank: int) -> None:
    worker = Worker("graph", hosted=True)
    fail_once(worker, [micro_batches(rank)[index % 3] for index in range(STEPS)])
    worker.opt.flush()
    assert worker.opt.result.optimizer_step == 1


@check
def compiled_micro_batch_reduces_nothing(rank: int) -> None:
    for mode in ("jit", "graph"):
        require_one_branch(compiled(mode)[2])


@check
def untold_loss_reaches_all(rank: int) -> None:
    """One worker's last micro-batch tells no loss: the window has none on either. Its
    end is compiled.
    """
    worker = restarted("jit")

    def untold(*gradients: Tensor) -> bool:
        return worker.opt(gradients)

    for batch in micro_batches(0)[: STEPS - 1]:
        worker.learn(batch)
    if rank == 0:
        ms.jit(untold)(Tensor(WEIGHT), Tensor(BIAS))
    else:
        worker.learn(micro_batches(0)[0])
    assert (worker.opt.result.closed, math.isnan(worker.opt.result.loss)) == (
        True,
        True,
    )
    for batch in micro_batches(0)[:STEPS]:
        worker.learn(batch)
    assert not math.isnan(worker.opt.result.loss)


PAIR = 2
"""Of 6 and 3 micro-batches: one worker closes its three windows by itself, the other
one so, and two in one `flush`.
"""
Follow = Callable[[Any], Callable[[], object]]


class Average:
    """Of the parameters, over the updates."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.value = (
            worker,
            np.concatenate([np.ravel(each) for each in numbers(worker)]),
        )

    def __call__(self, window: object = None) -> None:
        self.value = 0.5 * self.value + 0.5 * np.concatenate(
            [np.ravel(each) for each in numbers(self.worker)]
        )


def reference() -> tuple[Worker, Average]:
    """One process with all micro-batches."""
    worker = Worker(steps=None, data_parallel=False, inner=optim.SGD)
    average, schedule, workers = (
        Average(worker),
        StepLR(worker.opt, 1, 0.5),
        [micro_batches(rank) for rank in range(WORLD)],
    )
    for first in range(0, 6, PAIR):
        worker.train([batch for own in workers for batch in own[first : first + PAIR]])
        schedule.step()
        average()
    assert worker.opt.result.optimizer_step == 3
    return worker, average


def trained(mode: str, rank: int, follow: Follow) -> tuple[Worker, Average]:
    """The share of one worker; ``follow(opt)`` is called first and returns what the
    loop calls after each micro-batch and after `flush`.
    """
    worker = Worker(mode, steps=PAIR, inner=optim.SGD)
    average = Average(worker)
    worker.opt.add_listener(average)
    after = follow(worker.opt)
    for call in (
        *(partial(worker.learn, batch) for batch in micro_batches(rank)),
        worker.opt.flush,
    ):
        call()
        assert worker.opt.result.micro_step < PAIR
        after()
    return worker, average


@check
def schedules_and_averages_move_once_per_update(rank: int) -> None:
    """By a gate, and by a listener."""

    def gated(opt: Any) -> Callable[[], object]:
        step: Callable[[], object] = gradaccum.wrap(StepLR(opt, 1, 0.5)).step
        return step

    def listening(opt: Any) -> Callable[[], object]:
        schedule = StepLR(opt, 1, 0.5)
        opt.add_listener(lambda window: schedule.step() if window.applied else None)
        return lambda: None

    expected, expected_average = reference()
    for mode, follow in (
        ("pynative", gated),
        ("pynative", listening),
        ("jit", gated),
        ("graph", listening),
    ):
        worker, average = trained(mode, rank, follow)
        for found, truth in zip(numbers(worker), numbers(expected), strict=True):
            np.testing.assert_allclose(found, truth, rtol=0, atol=3e-6)
        np.testing.assert_allclose(
            average.value, expected_average.value, rtol=0, atol=3e-6
        )
        np.testing.assert_allclose(
            float(worker.opt.param_groups[0]["lr"]), 0.1 * 0.5**3, rtol=1e-6
        )
        # One worker's flush made the last update, the other's found no window.
        result = worker.opt.result._replace(applied=False)
        require_same_everywhere((numbers(worker), result, average.value.tolist()))


@check
def schedules_that_drift_apart_are_refused(rank: int) -> None:
    """A schedule that looks at ``result`` after `flush` sees the last window alone. All
    workers raise, before the update.
    """
    worker = Worker(steps=PAIR, inner=optim.SGD)
    schedule = StepLR(worker.opt, 1, 0.5)
    with refused(
        gradaccum.UsageError,
        f"learning rates on rank {rank}",
        "listener",
        "0.025" if rank == 0 else "0.05",
    ):
        for call in (
            *(partial(worker.learn, batch) for batch in micro_batches(rank)),
            worker.opt.flush,
        ):
            call()
            if worker.opt.result.applied:
                schedule.step()
    assert worker.opt.result.optimizer_step == 2
    ops.assign(worker.opt.param_groups[0]["lr"], Tensor(0.025, ms.float32))
    worker.opt.flush()
    assert worker.opt.result.optimizer_step == 3, "the sums are as they were"
    require_same_everywhere(numbers(worker))


@check
def other_rates_in_compiled_code_skip_the_window(rank: int) -> None:
    """It cannot raise. Python raises as soon as it is asked, on every worker: the one
    in compiled code and the one that flushes.
    """
    for mode, inner in (("graph", optim.SGD), ("jit", nn.Momentum)):
        worker = Worker(mode, steps=PAIR, inner=inner)
        rate = worker.opt.lrs[0] if inner is optim.SGD else worker.opt.learning_rate
        batches, start = micro_batches(rank), numbers(worker)
        ops.assign(rate, rate.value() * (1 + rank))
        with refused(
            gradaccum.UsageError, f"learning rates on rank {rank}", "listener"
        ):
            if rank == 0:
                for batch in batches[:PAIR]:
                    worker.learn(batch)
            else:
                worker.learn(batches[0])
                worker.opt.flush()
            print(worker.opt.result)
        set_mode(mode if mode == "graph" else "pynative")
        if rank == 0:
            worker.opt.flush()
        # Rank 0's last call found no window any more, and did nothing.
        assert (
            worker.opt.result.optimizer_step,
            worker.opt.result.overflow,
            numbers(worker),
        ) == (0, rank == 1, start)
        ops.assign(rate, rate.value() / (1 + rank))
        for batch in batches[:PAIR]:
            worker.learn(batch)
        assert worker.opt.result.applied
        require_same_everywhere(numbers(worker))


EACH = 3


@contextmanager
def data_parallel_mode(mode: str, **options: Any) -> Iterator[None]:
    set_mode(mode)
    ms.set_auto_parallel_context(parallel_mode="data_parallel", **options)
    try:
        yield
    finally:
        ms.reset_auto_parallel_context()
        set_mode("pynative")


def large_batches() -> list[np.ndarray]:
    """The parameters after windows over both workers, of which each has every second
    row.
    """
    truth, ones = Truth(), np.ones((EACH * PAIR * WORLD, 1))
    for first in range(0, len(X), len(ones)):
        truth.window(
            [(X[first : first + len(ones)], Y[first : first + len(ones)], ones)]
        )
    return truth.arrays


class HalfSquare(nn.Cell):
    def construct(self, logits: Any, labels: Any) -> Any:
        return (logits - labels).square().mean()


def optimizer_of(net: nn.Cell, **options: Any) -> Any:
    return gradaccum.wrap(
        nn.Momentum(net.trainable_params(), 0.1, 0.9),
        steps=PAIR,
        data_parallel=True,
        **options,
    )


def require_large_batches(net: nn.Cell, opt: Any) -> None:
    for found, expected, start in zip(
        (net.weight, net.bias), large_batches(), (WEIGHT, BIAS), strict=True
    ):
        assert np.abs(expected - start).max() > 1e-3
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=0, atol=3e-6)
    assert opt.result.optimizer_step == len(X) // (EACH * PAIR * WORLD)
    require_same_everywhere([p.asnumpy().tolist() for p in (net.weight, net.bias)])


@check
def stock_cell_makes_the_large_batch(rank: int) -> None:
    """Its own reducer does not run."""
    x, y = X[rank::WORLD], Y[rank::WORLD]
    for mode, gradients_mean in (
        ("pynative", False),
        ("pynative", True),
        ("graph", False),
    ):
        with (
            data_parallel_mode(mode, gradients_mean=gradients_mean),
            compiled_graphs() as graphs,
        ):
            net = make_net()
            opt = optimizer_of(net)
            cell = nn.TrainOneStepCell(nn.WithLossCell(net, HalfSquare()), opt)
            for first in range(0, len(x), EACH):
                cell(Tensor(x[first : first + EACH]), Tensor(y[first : first + EACH]))
            require_large_batches(net, opt)
        if mode == "graph":
            require_one_branch(graphs)


@check
def model_train_makes_the_large_batch(rank: int) -> None:
    for mode, own_cell in (("pynative", True), ("graph", True), ("graph", False)):
        with data_parallel_mode(mode, gradients_mean=True):
            net = make_net()
            opt = optimizer_of(net, **({"loss_scale": 1024.0} if own_cell else {}))
            model = Model(net, HalfSquare(), opt)
            if own_cell:
                model = Model(TrainOneStepCell(nn.WithLossCell(net, HalfSquare()), opt))
            data = NumpySlicesDataset(
                (X, Y), ["x", "y"], shuffle=False, num_shards=WORLD, shard_id=rank
            ).batch(EACH)
            model.train(1, data, dataset_sink_mode=False)
            require_large_batches(net, opt)


@check
def epochs_end_together(rank: int) -> None:
    """With `FlushAtEpochEnd` a worker with fewer rows takes part in the windows of the
    other; its last micro-batch is short.
    """
    shares = [(X[:14], Y[:14]), (X[14:], Y[14:])]
    micro_batches = [
        [
            (x[first : first + EACH], y[first : first + EACH])
            for first in range(0, len(x), EACH)
        ]
        for x, y in shares
    ]
    truth = Truth()
    for first in (0, PAIR, 2 * PAIR) * 2:
        held = [
            batch for worker in micro_batches for batch in worker[first : first + PAIR]
        ]
        truth.window([(x, y, np.ones((len(x), 1))) for x, y in held])
    with data_parallel_mode("pynative"):
        net = make_net()
        opt = optimizer_of(net)
        data = NumpySlicesDataset(shares[rank], ["x", "y"], shuffle=False).batch(EACH)
        model = Model(TrainOneStepCell(nn.WithLossCell(net, HalfSquare()), opt))
        model.train(2, data, callbacks=[FlushAtEpochEnd(opt)], dataset_sink_mode=False)
    assert opt.result.optimizer_step == 6
    for found, expected in zip((net.weight, net.bias), truth.arrays, strict=True):
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=0, atol=1e-5)
    require_same_everywhere([p.asnumpy().tolist() for p in (net.weight, net.bias)])
