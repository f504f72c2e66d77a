"""Each worker has a large batch of its own, of another size, in one call: the update is by the gradient of both, reduced once."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import WORLD, build, require_equal, sgd
from conformance_tests.framework_tests.torch_workers.reductions import counted
from gradaccum_torch.large_batch import auto, backward, coupled_backward


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    """Seven items on one worker and four on the other."""
    generator = torch.Generator().manual_seed(rank)
    items = 7 if rank == 0 else 4
    return torch.randn(items, 4, generator=generator).double(), torch.randn(items, 2, generator=generator).double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


@check
def large_batch_of_all_workers(rank: int) -> None:
    model, reference = build(), build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt, inner = gradaccum.wrap(sgd(model), steps=None, module=parallel), sgd(reference)
    whole = [torch.cat(parts) for parts in zip(*map(batch_of, range(WORLD)), strict=True)]
    calls = []
    ways = ({"micro_batch_size": 2}, {"micro_batch_size": 2}, {"steps": 6})  # More steps than the items of one worker.
    for way in ways:
        with counted() as called:
            backward(lambda x, y: loss_of(parallel, x, y), *batch_of(rank), **way, optimizer=opt)
        calls.append(len(called))
        inner.zero_grad()
        loss_of(reference, whole[0], whole[1]).backward()
        inner.step()
    assert calls[-1] == 1, calls
    assert opt.result.optimizer_step == 3
    require_equal(model, reference)


@check
def coupled_loss_on_each_worker(rank: int) -> None:
    """Coupled within a worker; the update is by the mean over workers, reduced once."""
    model, reference = build(), build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt, inner = gradaccum.wrap(sgd(model), steps=None, module=parallel), sgd(reference)
    calls = []
    for _ in range(3):
        with counted() as called:
            coupled_backward(lambda x: parallel(x), lambda o: o.std(), batch_of(rank)[0], steps=3, optimizer=opt)
        calls.append(len(called))
        inner.zero_grad()
        (sum(reference(batch_of(each)[0]).std() for each in range(WORLD)) / WORLD).backward()
        inner.step()
    assert calls[-1] == 1, calls
    require_equal(model, reference)


@check
def empty_batch_leaves_no_other_waiting(rank: int) -> None:
    """It adds nothing to the window of the others; in the third call nobody has an item."""
    limited = gradaccum.AutoMicroBatchSize()
    with mock.patch.object(auto, "require_device"):  # A CPU: the model says when memory runs out.
        for size in (2, limited):
            _update_by_holders(rank, size)
    assert 0 < limited.size < 4, limited


def _update_by_holders(rank: int, size: Any) -> None:
    model, reference = build(), build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    parallel.register_forward_pre_hook(_need_memory)
    opt, inner = gradaccum.wrap(sgd(model), steps=None, module=parallel), sgd(reference)
    for holders in ((0,), (1,), ()):
        x, y = batch_of(rank)
        if rank not in holders:
            x, y = x[:0], y[:0]
        loss = backward(partial(loss_of, parallel), x, y, micro_batch_size=size, optimizer=opt)
        coupled = coupled_backward(parallel, Tensor.std, x, micro_batch_size=size, optimizer=opt)
        assert rank in holders or (loss, coupled) == (0, 0)
        for each in holders:
            x, y = batch_of(each)
            inner.zero_grad()
            loss_of(reference, x, y).backward()
            inner.step()
            inner.zero_grad()
            reference(x).std().backward()
            inner.step()
    assert opt.result.optimizer_step == 4
    require_equal(model, reference)


def _need_memory(module: nn.Module, given: tuple[Tensor, ...]) -> None:
    if len(given[0]) > 3:
        raise torch.OutOfMemoryError
