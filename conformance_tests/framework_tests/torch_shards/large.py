"""The large batch in one call, of a sharded model: each worker gives its own batch, and the window is that of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_shards.common import WAYS, build, check, numbers, require_equal, sgd, sharded, wrap
from gradaccum_torch.large_batch import backward, coupled_backward

STEPS = 3
OPTIONS: list[dict[str, Any]] = [{}, {"clip_norm": 0.05}, {"loss_scale": 1024.0}, {"reduction": "sum"}]


def batch_of(rank: int) -> Tensor:
    """Of five or of eight items: the last micro-batch is smaller, and workers count by their items."""
    return torch.randn(5 + 3 * rank, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@check
def large_batch_in_one_call(rank: int) -> None:
    for way in WAYS:
        for options in OPTIONS:
            summed = options.get("reduction") == "sum"
            model, whole = sharded(way), build()
            opt, other = wrap(model, way, **{**options, "steps": None}), gradaccum.wrap(sgd(whole), steps=None, **options)

            def loss(net: Any, x: Tensor, summed: bool = summed) -> Tensor:
                each = net(x).square().mean(1)
                return each.sum() if summed else each.mean()

            for _ in range(2):
                backward(lambda x, model=model, loss=loss: loss(model, x), batch_of(rank), steps=STEPS, optimizer=opt)
                x = torch.cat([batch_of(0), batch_of(1)])
                other.backward(loss(whole, x), len(x))
                other.step()
                other.flush()
            require_equal(model, whole)
            assert opt.result.optimizer_step == 2


@check
def sharded_model_needs_its_optimizer(rank: int) -> None:
    for way in WAYS[:2]:
        model = sharded(way)
        with refused(gradaccum.UsageError, "optimizer", "several workers"):
            backward(lambda x, model=model: model(x).mean(), batch_of(rank), steps=2)
        with refused(gradaccum.UsageError, "optimizer", "several workers"):
            coupled_backward(model, Tensor.std, batch_of(rank), steps=2)
        assert all(p.grad is None for p in model.parameters())


@check
def an_error_leaves_a_sharded_model_as_it_was(rank: int) -> None:
    """All workers fail in the second micro-batch; the next call is as if there had been none."""
    for way in WAYS:
        model, other = sharded(way), sharded(way)
        opts = [wrap(each, way, steps=None) for each in (model, other)]
        calls: list[int] = []

        def failing(x: Tensor, model: Any = model, calls: list[int] = calls) -> Tensor:
            calls.append(len(x))
            if len(calls) == 2:
                raise KeyError("mine")
            return model(x).square().mean()  # type: ignore[no-any-return]

        with refused(KeyError, "mine"):
            backward(failing, batch_of(rank), steps=STEPS, optimizer=opts[0])
        for each, opt in zip((model, other), opts, strict=True):
            backward(lambda x, each=each: each(x).square().mean(), batch_of(rank), steps=STEPS, optimizer=opt)
        assert all(map(torch.equal, numbers(model), numbers(other)))
