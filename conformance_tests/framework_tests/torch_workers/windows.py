"""The window of two workers is the large batch of both: its reductions and schedule,
the large batch in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum_torch.large_batch import auto, backward, coupled_backward
from gradaccum_torch.workers.group import all_reduce_together, buckets

from .common import (
    WORLD,
    Branches,
    all_windows,
    alone,
    build,
    learn,
    learn_all,
    make_shared,
    micro_batches,
    require_equal,
    require_same_everywhere,
    sgd,
)
from .jobs import check


@check
def every_kind_of_module(rank: int) -> None:
    reference, _ = alone(all_windows())
    compiled = build()
    compiled.compile(backend="eager")
    usual = {"find_unused_parameters": True}
    for model, options in (
        (build(), {"static_graph": True}),
        (build(), {"gradient_as_bucket_view": True}),
        (build(), {"bucket_cap_mb": 1e-6}),
        (build(recomputed=True), usual),
        (compiled, usual),
    ):
        parallel = DistributedDataParallel(model, **options)
        opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
        learn_all(parallel, opt, micro_batches(rank))
        require_equal(model, reference)


@check
def discarded_window_is_one_worker_s_own(rank: int) -> None:
    model, parallel, opt = make_shared(steps=None)
    for batch in micro_batches(rank)[:3]:
        learn(parallel, opt, batch)
    if rank == 1:
        opt.discard()
    opt.flush()
    require_equal(model, alone([micro_batches(0)[:3]])[0])


@check
def listeners_hear_the_window_of_all(rank: int) -> None:
    """One raises on the worker that closes two of three windows in its flush: each
    window ends on both, and is heard.
    """
    model, parallel, opt = make_shared(steps=2)
    heard: list[Any] = []
    opt.add_listener(heard.append)
    if rank == 1:
        opt.add_listener(lambda window: window.no_such_field)
    raised = 0
    for call in (
        *(partial(learn, parallel, opt, batch) for batch in micro_batches(rank)),
        opt.flush,
    ):
        try:
            call()
        except AttributeError:
            raised += 1
    assert raised == (0 if rank == 0 else 2)
    assert [window.weight for window in heard] == [
        sum(len(x) for x, _, _ in window) for window in all_windows(steps=2)
    ]
    assert [window.micro_batches for window in heard] == [[2, 2, 2], [2, 1, 0]][rank]
    require_equal(model, alone(all_windows(steps=2))[0])


# The reductions at the end of a window: how often, in which layouts, and never twice.


@contextmanager
def counted() -> Iterator[list[int]]:
    """The elements of each reduction that is made inside."""
    called: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):
        yield called


@check
def two_reductions_per_window(rank: int) -> None:
    """One for the numbers and one for all sums that a worker has, whatever the number
    of micro-batches.
    """
    _, parallel, opt = make_shared()
    with counted() as called:
        learn_all(parallel, opt, micro_batches(rank))
    size = sum(p.numel() for p in Branches().parameters())
    rare = sum(p.numel() for p in Branches().rare.parameters())
    assert len(called) == 4
    assert called[1::2] == [size, size - rare]


@check
def model_is_cast_between_windows(rank: int) -> None:
    """All of it; then a part alone, and that part is large at last."""
    model, reference = build(torch.float32), build(torch.float32)
    _, parallel, opt = make_shared(model, steps=1, reduction="sum_per_item")
    other = gradaccum.wrap(sgd(reference), steps=2, reduction="sum_per_item")
    for dtype in (torch.float32, torch.float64):
        model.to(dtype), reference.to(dtype)
        for each in range(WORLD):
            x = torch.full((1, 4), 1.0 + each, dtype=dtype)
            other.backward(reference(x).sum(), weight=70001.0 + each)
            other.step()
        x = torch.full((1, 4), 1.0 + rank, dtype=dtype)
        with counted() as called:
            opt.backward(parallel(x).sum(), weight=70001.0 + rank)
            opt.step()
    assert len(called) == 2
    require_equal(model, reference)
    pair = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    opt = gradaccum.wrap(
        torch.optim.SGD(pair, lr=1.0), steps=1, process_group=dist.group.WORLD
    )
    for _ in range(3):
        sum(each.double().sum() for each in pair).backward()
        opt.step()
        pair[1].data = pair[1].double()
    assert [each.tolist() for each in pair] == [[-2.0, -2.0]] * 2
    pair[0] = opt.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2**20))
    with counted() as called:
        sum(each.double().sum() for each in pair).backward()
        opt.step()
    assert 2**20 in called
    assert not pair[0].any()


@check
def large_and_strided_sums_are_reduced(rank: int) -> None:
    """Above four mebibytes a tensor travels alone; a layout that is not contiguous, as
    of a convolution in channels_last, is packed.
    """
    strided = torch.full((1200, 1000), 2.0 + rank).t()
    tensors = [
        torch.full((1100, 1000), 1.0 + rank),
        strided if rank else strided.contiguous(),
        torch.full((3, 2), 3.0 + rank).t(),
    ]
    strides = [each.stride() for each in tensors]
    with counted() as called:
        for bucket in buckets(tensors):
            all_reduce_together(bucket, dist.group.WORLD)
    assert called == [1_100_000, 1_200_000, 6]
    assert [each.unique().tolist() for each in tensors] == [[3.0], [5.0], [7.0]]
    assert [each.stride() for each in tensors] == strides


@check
def failed_update_is_not_reduced_twice(rank: int) -> None:
    """Not "mean": twice the sum over twice the weight would be the same."""
    model, parallel, opt = make_shared(reduction="sum")
    batches = micro_batches(rank)[:4]
    hook = opt.register_step_pre_hook(lambda *_: 1 / 0)
    with refused(ZeroDivisionError):
        learn_all(parallel, opt, batches)
    hook.remove()
    with refused(gradaccum.UsageError, "flush()"):
        opt.state_dict()
    opt.flush()
    require_equal(model, alone(all_windows()[:1], reduction="sum")[0])
    _, parallel, unhurt = make_shared(reduction="sum")
    learn_all(parallel, unhurt, batches)
    # There the last micro-batch made the update, and the flush had nothing to do.
    assert opt.result == unhurt.result._replace(applied=True)


# Events once per update, on a worker whose last windows all close in one `flush`.


AVERAGE = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
HALVE: dict[str, Any] = {"step_size": 1, "gamma": 0.5}


def averaged(model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=AVERAGE)


def trained(rank: int, follow: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The share of one worker; ``follow(opt)`` is called first and returns what the
    loop calls after each micro-batch and after `flush`.
    """
    model, parallel, opt = make_shared(steps=2)
    average = averaged(model)
    met = torch.ones(())
    # The listeners of a window meet, in whatever call it closes.
    opt.add_listener(lambda window: dist.all_reduce(met))
    opt.on_update(lambda: average.update_parameters(model))
    after = follow(opt)
    for batch in micro_batches(rank):
        learn(parallel, opt, batch)
        after()
    opt.flush()
    after()
    assert met == WORLD**3
    return model, average, opt


@check
def schedules_and_averages_move_once_per_update(rank: int) -> None:
    """One worker closes its three windows by ``step``; the other closes one so, and two
    in one ``flush``.
    """

    def gated(opt: Any) -> Any:
        return gradaccum.wrap(StepLR(opt, **HALVE)).step

    def listening(opt: Any) -> Any:
        opt.on_update(StepLR(opt, **HALVE).step)
        return lambda: None

    expected = build()
    one = gradaccum.wrap(sgd(expected), steps=None, process_group="alone")
    expected_average = averaged(expected)
    schedule = StepLR(one, **HALVE)
    for window in all_windows(steps=2):
        learn_all(expected, one, window)
        schedule.step()
        expected_average.update_parameters(expected)
    for follow in (gated, listening):
        model, average, opt = trained(rank, follow)
        require_equal(model, expected)
        require_equal(average, expected_average)
        assert opt.param_groups[0]["lr"] == 0.1 * 0.5**3
        # The flush of the first worker had nothing to close.
        assert opt.result.applied == (rank == 1)
        require_same_everywhere(opt.result._replace(applied=True))


@check
def schedules_that_drift_apart_are_refused(rank: int) -> None:
    """A schedule that looks at ``result`` after `flush` sees the last window alone. All
    workers raise, before the update.
    """

    def by_hand(opt: Any) -> Any:
        schedule = StepLR(opt, **HALVE)
        opts.append(opt)
        return lambda: schedule.step() if opt.result.applied else None

    opts: list[Any] = []
    with refused(
        gradaccum.UsageError,
        f"learning rates on rank {rank}",
        "listener",
        "0.025" if rank == 0 else "0.05",
    ):
        trained(rank, by_hand)
    assert opts[0].result.optimizer_step == 2
    for group in opts[0].param_groups:
        group["lr"] = 0.025
    opts[0].flush()
    assert opts[0].result.optimizer_step == 3, "the sums are as they were"
    require_same_everywhere(
        [group["params"][0].tolist() for group in opts[0].param_groups]
    )


# Each worker has a large batch of its own, of another size, in one call: the update is
# by the gradient of both, reduced once.


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    """Seven items on one worker and four on the other."""
    generator = torch.Generator().manual_seed(rank)
    items = 7 if rank == 0 else 4
    x, y = (torch.randn(items, width, generator=generator) for width in (4, 2))
    return x.double(), y.double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def update(optimizer: torch.optim.Optimizer, loss: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@check
def large_batch_of_all_workers(rank: int) -> None:
    """The last way has more steps than one worker has items."""
    model, parallel, opt = make_shared(steps=None)
    reference = build()
    inner = sgd(reference)
    whole = map(torch.cat, zip(*map(batch_of, range(WORLD)), strict=True))
    x, y = whole
    for way in ({"micro_batch_size": 2}, {"micro_batch_size": 2}, {"steps": 6}):
        with counted() as called:
            loss = partial(loss_of, parallel)
            backward(loss, *batch_of(rank), **way, optimizer=opt)
        update(inner, loss_of(reference, x, y))
    assert len(called) == 2, called
    assert opt.result.optimizer_step == 3
    require_equal(model, reference)


@check
def coupled_loss_on_each_worker(rank: int) -> None:
    """Coupled within a worker; the update is by the mean over workers, reduced once."""
    model, parallel, opt = make_shared(steps=None)
    reference = build()
    inner = sgd(reference)
    for _ in range(3):
        with counted() as called:
            coupled_backward(
                parallel, Tensor.std, batch_of(rank)[0], steps=3, optimizer=opt
            )
        losses = [reference(batch_of(each)[0]).std() for each in range(WORLD)]
        update(inner, sum(losses) / WORLD)
    assert len(called) == 2, called
    require_equal(model, reference)


@check
def empty_batch_leaves_no_other_waiting(rank: int) -> None:
    """It adds nothing to the window of the others; in the third call nobody has an
    item.
    """
    limited = gradaccum.AutoMicroBatchSize()
    # A CPU: the model says when memory runs out.
    with mock.patch.object(auto, "require_device"):
        for size in (2, limited):
            _update_by_holders(rank, size)
    assert 0 < limited.size < 4, limited


def _update_by_holders(rank: int, size: Any) -> None:
    model, parallel, opt = make_shared(steps=None)
    parallel.register_forward_pre_hook(_need_memory)
    reference = build()
    inner = sgd(reference)
    for holders in ((0,), (1,), ()):
        x, y = batch_of(rank)
        if rank not in holders:
            x, y = x[:0], y[:0]
        options = {"micro_batch_size": size, "optimizer": opt}
        loss = backward(partial(loss_of, parallel), x, y, **options)
        coupled = coupled_backward(parallel, Tensor.std, x, **options)
        assert rank in holders or (loss, coupled) == (0, 0)
        for each in holders:
            x, y = batch_of(each)
            update(inner, loss_of(reference, x, y))
            update(inner, reference(x).std())
    assert opt.result.optimizer_step == 4
    require_equal(model, reference)


def _need_memory(module: nn.Module, given: tuple[Tensor, ...]) -> None:
    if len(given[0]) > 3:
        raise torch.OutOfMemoryError
