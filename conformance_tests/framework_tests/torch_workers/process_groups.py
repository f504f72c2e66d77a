"""Copies of a model without a parallel module, and an optimizer that averages gradients
in its own ``step``, as nanochat's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import gradaccum

from ..refusing import refused
from .common import (
    WORLD,
    all_windows,
    alone,
    build,
    learn_all,
    micro_batches,
    numbers,
    require_equal,
    require_same_everywhere,
    sgd,
)
from .jobs import check


class Averaging(SGD):
    """Averages gradients over workers before its update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= WORLD
        return super().step(closure)


@check
def reducing_optimizer_has_the_window_of_all(rank: int) -> None:
    """Numbers of items, micro-batches and branches differ; the norm that clips is that
    of all.
    """
    for options in ({"clip_norm": 0.05}, {"reduction": "sum"}):
        reference, other = alone(all_windows(), **options)
        for kind in (Averaging, SGD):
            model = build()
            inner = kind(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            opt = gradaccum.wrap(
                inner, steps=4, process_group=dist.group.WORLD, **options
            )
            learn_all(model, opt, micro_batches(rank))
            require_equal(model, reference)
            norms = opt.result.grad_norm, other.result.grad_norm
            assert math.isclose(*norms, rel_tol=1e-12), norms
            require_same_everywhere((numbers(model), opt.result))


def critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()


def wrap(model: nn.Module, **options: Any) -> Any:
    return gradaccum.wrap(sgd(model), steps=1, **options)


def warnings_of(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [
        str(each.message)
        for each in caught
        if each.category is gradaccum.GradAccumWarning
    ]


@check
def nobody_says_who_shares_a_window(rank: int) -> None:
    """It is asked once for each optimizer, unless the user says anything."""
    model = critic()
    (said,) = warnings_of(lambda: wrap(model))
    assert "2 processes" in said
    assert 'process_group="alone"' in said
    for options in (
        {"process_group": "alone"},
        {"process_group": dist.group.WORLD},
        {"module": DistributedDataParallel(model)},
        {"norm_group": dist.group.WORLD},
    ):
        assert warnings_of(lambda options=options: wrap(model, **options)) == []


@check
def order_of_parameters_is_the_same_on_every_worker(rank: int) -> None:
    """Groups made of a set have another order in each process. Sums travel by position,
    so that two layers of one shape would get each other's gradient.
    """
    model = critic()
    layers = [model[0], model[1]] if rank == 0 else [model[1], model[0]]
    named = [
        (f"{model[0] is not layer}.{name}", parameter)
        for layer in layers
        for name, parameter in layer.named_parameters()
    ]
    for options in (
        {"module": DistributedDataParallel(model)},
        {"process_group": dist.group.WORLD},
    ):
        with refused(gradaccum.ArgumentValueError, "same order", "weight", "on rank 1"):
            gradaccum.wrap(SGD(named, lr=0.1), steps=1, **options)


@check
def windows_of_two_optimizers_are_not_mixed(rank: int) -> None:
    """Twin critics in one group, of which one worker runs out of data: its flush of the
    first would meet the other worker's window of the second.
    """
    models = critic(), critic()
    one, two = (wrap(model, process_group=dist.group.WORLD) for model in models)

    def learn(opt: Any, model: nn.Module) -> None:
        opt.backward(model(torch.ones(2, 4).double()).sum())
        opt.step()

    learn(one, models[0])
    learn(two, models[1])
    before = numbers(models[1])
    with refused(gradaccum.UsageError, "optimizer on every worker", "its own group"):
        if rank == 0:
            one.flush()
        else:
            learn(two, models[1])
    one.discard()
    two.discard()
    assert numbers(models[1]) == before
    learn(two, models[1])
    assert two.result.applied


@check
def unequal_copies_are_said_once(rank: int) -> None:
    """Without a module nothing sends the parameters of one worker to the others."""
    model = critic()
    model[1].bias.data += 1e-2 * rank
    (said,) = warnings_of(lambda: wrap(model, process_group=dist.group.WORLD))
    assert "different parameters" in said
