"""The window of two workers is the large batch of both: its reductions and schedule,
the large batch in one call.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

import gradaccum
from gradaccum import UsageError
from gradaccum_torch import backward, coupled_backward
from gradaccum_torch.workers.overlap import BucketReduction

from ..refusing import refused
from .common import (
    WORLD,
    all_windows,
    alone,
    build,
    ddp,
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
    for model, options in (
        (build(), {"static_graph": True}),
        (build(), {"gradient_as_bucket_view": True}),
        (build(recomputed=True), {"find_unused_parameters": True}),
    ):
        parallel = DistributedDataParallel(model, **options)
        opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
        learn_all(parallel, opt, micro_batches(rank))
        require_equal(model, reference)


def add_up(numbers: list[float]) -> list[float]:
    added_numbers = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(added_numbers)
    return added_numbers.tolist()


@check
def windows_until_the_items_of_all_workers(rank: int) -> None:
    """Micro-batches of 3, 4, 5, 6, 7 and 8 items here, of 4, 5 and 6 there."""
    model, parallel, opt = make_shared(steps=None)
    windows = gradaccum.windows(
        micro_batches(rank),
        gradaccum.until_weight(15),
        {"items": lambda batch: len(batch[0])},
        weight="items",
        reduce=add_up,
    )
    closed = []
    for window in windows:
        learn_all(parallel, opt, window)
        closed.append((len(window), window.totals["items"]))
    assert closed == list(zip([(2, 2, 2), (2, 1, 0)][rank], (16, 17, 15), strict=True))
    first, second = (micro_batches(worker) for worker in range(WORLD))
    large = [first[:2] + second[:2], first[2:4] + second[2:], first[4:]]
    require_equal(model, alone(large)[0])


class Sums(dict[Tensor, Tensor]):
    """A sum in tensors of its own."""

    take = dict.get
    put = dict.__setitem__


@check
def large_and_strided_sums_are_reduced(rank: int) -> None:
    """Above four mebibytes a tensor is reduced alone; a layout that is not contiguous,
    as of a convolution in channels_last, is packed, and each dtype by itself. The
    small tensors do not wait for the large one that comes after them.
    """
    strided = torch.full((1200, 1000), 2.0 + rank).t()
    tensors = [
        torch.full((1100, 1000), 1.0 + rank),
        torch.full((5,), 5.0 + rank).double(),
        torch.full((3, 2), 3.0 + rank).t(),
        strided if rank else strided.contiguous(),
    ]
    strides = [each.stride() for each in tensors]
    sums = Sums({each: each for each in tensors})
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        reduction = BucketReduction(dist.group.WORLD, tensors, sums, None)
        for _ in reduction.buckets:
            reduction.launch()
        reduction.wait()
    sizes = [call.args[0].numel() for call in called.call_args_list]
    assert sizes == [1_200_000, 6, 5, 1_100_000]
    totals = [sums[each].unique().tolist() for each in tensors]
    assert totals == [[3.0], [11.0], [7.0], [5.0]]
    assert [sums[each].stride() for each in tensors] == strides


# Events once per update, on a worker whose last windows all close in one `flush`.


def averaged(model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)


@check
def schedules_and_averages_move_once_per_update(rank: int) -> None:
    """One worker closes its three windows by ``step``; the other closes one so, and two
    in one ``flush``. In whatever call a window closes, its listeners meet.
    """
    expected, one = alone([])
    average_of_one = averaged(expected)
    schedule = StepLR(one, step_size=1, gamma=0.5)
    for window in all_windows(steps=2):
        learn_all(expected, one, window)
        schedule.step()
        average_of_one.update_parameters(expected)
    model, parallel, opt = make_shared(steps=2)
    average = averaged(model)
    met = torch.ones(())
    opt.add_listener(lambda window: dist.all_reduce(met))
    opt.on_update(partial(average.update_parameters, model))
    schedule = gradaccum.wrap(StepLR(opt, step_size=1, gamma=0.5))
    of_epochs = gradaccum.wrap(StepLR(opt, step_size=1, gamma=0.5))
    of_updates = gradaccum.wrap(StepLR(opt, step_size=1, gamma=1.0))
    for batch in micro_batches(rank):
        learn(parallel, opt, batch)
        schedule.step()
        if opt.result.applied:
            of_updates.step()
    opt.flush()
    of_updates.step()
    assert of_epochs.last_epoch == 0
    assert of_updates.last_epoch == 3
    schedule.step()
    assert met == WORLD**3
    require_equal(model, expected)
    require_equal(average, average_of_one)
    assert opt.param_groups[0]["lr"] == 0.1 * 0.5**3
    # The flush of the first worker had nothing to close.
    assert opt.result.applied == (rank == 1)
    require_same_everywhere(opt.result._replace(applied=True))


@check
def schedules_that_drift_apart_are_refused(rank: int) -> None:
    """As one does that looks at ``result`` after `flush`. All workers raise, before the
    update.
    """
    model, parallel, opt = make_shared()
    learn(parallel, opt, micro_batches(rank)[0])
    opt.param_groups[0]["lr"] *= 1 + rank
    with refused(UsageError, f"learning rates on rank {rank}", "listener"):
        opt.flush()
    opt.param_groups[0]["lr"] /= 1 + rank
    opt.discard()
    learn(parallel, opt, micro_batches(rank)[0])
    opt.flush()
    require_equal(model, alone([[micro_batches(0)[0], micro_batches(1)[0]]])[0])


# Each worker has a large batch of its own, of another size, in one call: the update is
# by the gradient of both, reduced once.


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    """Seven items on one worker and four on the other."""
    generator = torch.Generator().manual_seed(rank)
    items = 7 if rank == 0 else 4
    x, y = (torch.randn(items, width, generator=generator) for width in (4, 5))
    return x.double(), y.double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def update(optimizer: torch.optim.Optimizer, loss: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@check
def large_batch_of_all_workers(rank: int) -> None:
    """The last way has more steps than one worker has items. A coupled loss is coupled
    within a worker, and the update is by the mean over the workers, which their items
    weigh.
    """
    model, parallel, opt = make_shared(steps=None)
    reference = build()
    inner = sgd(reference)
    loss = partial(loss_of, parallel)
    for way, holders in (
        ({"micro_batch_size": 2}, (0, 1)),
        ({"steps": 6}, (0, 1)),
        ({"steps": 2}, (0,)),
        ({"steps": 2}, ()),
    ):
        x, y = batch_of(rank)
        if rank not in holders:
            x, y = x[:0], y[:0]
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
            backward(loss, x, y, **way, optimizer=opt)
        assert called.call_count == 2
        coupled_backward(parallel, Tensor.std, x, **way, optimizer=opt)
        if holders:
            batches = [batch_of(each) for each in holders]
            x, y = map(torch.cat, zip(*batches, strict=True))
            update(inner, loss_of(reference, x, y))
            losses = [reference(part).std() * len(part) for part, _ in batches]
            update(inner, sum(losses) / len(x))
    assert opt.result.optimizer_step == 6
    require_equal(model, reference)


@check
def large_batch_needs_the_optimizer(rank: int) -> None:
    unwrapped = ddp(build())
    with refused(UsageError, "module=module"):
        backward(partial(loss_of, unwrapped), *batch_of(rank), steps=2)
