"""The sum over the workers of a window, and the large batch in one call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum_torch.large_batch import backward, coupled_backward

from .common import (
    FLAT,
    alone,
    build,
    check,
    each_way,
    require_equal,
    require_equal_results,
    sgd,
    sharded,
    train,
    windows_of,
)


@check
def windows_without_the_module(rank: int) -> None:
    """FSDP2's units are found by the parameters; the loss is that of all workers,
    too.
    """
    for options in (
        {"clip_norm": 0.01, "loss_scale": 64.0},
        {"reduction": "sum", "on_overflow": "drop_micro_batch"},
    ):
        model = sharded(FLAT)
        opt = gradaccum.wrap(sgd(model), steps=3, **options)
        train(model, opt, rank)
        reference, other = alone(windows_of(3, 3), **options)
        require_equal(model, reference)
        require_equal_results(opt, other)


def batch_of(rank: int) -> Tensor:
    """Of five or of eight items: the last micro-batch is smaller, and workers count by
    their items.
    """
    return torch.arange(20.0 + 12 * rank).double().sin().reshape(-1, 4)


@check
def large_batch_in_one_call(rank: int) -> None:
    """Also after a call in which all workers failed, in the second micro-batch."""
    for options in ({"clip_norm": 0.05}, {"reduction": "sum"}):

        def loss_of(net: Any, x: Tensor, summed: bool = "reduction" in options) -> Any:
            each = net(x).square().mean(1)
            return each.sum() if summed else each.mean()

        whole = build()
        other = gradaccum.wrap(sgd(whole), steps=1, **options)
        other.backward(loss_of(whole, torch.cat([batch_of(0), batch_of(1)])))
        other.step()
        for _, model, opt in each_way(**{"steps": None, **options}):
            loss_fn, calls = partial(loss_of, model), iter(range(3))

            def failing(x: Tensor, loss_fn: Any = loss_fn, calls: Any = calls) -> Any:
                return loss_fn(x) if next(calls) != 1 else 1 / 0

            with refused(ZeroDivisionError):
                backward(failing, batch_of(rank), steps=3, optimizer=opt)
            backward(loss_fn, batch_of(rank), steps=3, optimizer=opt)
            require_equal(model, whole)
    model = sharded(FLAT)
    with refused(gradaccum.UsageError, "optimizer", "several workers"):
        backward(lambda x: model(x).mean(), batch_of(rank), steps=2)
    with refused(gradaccum.UsageError, "optimizer", "several workers"):
        coupled_backward(model, Tensor.std, batch_of(rank), steps=2)
    assert all(p.grad is None for p in model.parameters())
