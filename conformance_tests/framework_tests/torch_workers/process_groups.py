"""Copies of a model without a parallel module, and an optimizer that averages gradients
in its own ``step``, as nanochat's.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.refusing import refused

from .common import (
    WORLD,
    all_windows,
    learn,
    micro_batches,
    numbers,
    require_equal,
    require_same_everywhere,
)
from .jobs import check


class Averaging(torch.optim.SGD):
    """Averages gradients over workers before its update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        averages = dist.get_backend() == "nccl"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.all_reduce(
                        parameter.grad,
                        dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM,
                    )
                    parameter.grad /= 1 if averages else WORLD
        return super().step(closure)


class Rotating(nn.Module):
    """A layer with a buffer, as of rotary embeddings, and a branch that few
    micro-batches take.
    """

    inverse: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
        self.register_buffer(
            "inverse",
            torch.arange(1.0, 5.0, dtype=torch.float64).reciprocal(),
            persistent=False,
        )

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        return (self.rare if rare else self.usual)(x * self.inverse)


def built() -> nn.Module:
    torch.manual_seed(0)
    return Rotating()


def shared(
    kind: type[torch.optim.Optimizer] = Averaging, **options: Any
) -> tuple[nn.Module, Any]:
    model = built()
    return model, gradaccum.wrap(
        kind(model.parameters(), lr=0.1),
        steps=4,
        process_group=dist.group.WORLD,
        **options,
    )  # type: ignore[call-arg]


@check
def reducing_optimizer_has_the_window_of_all(rank: int) -> None:
    """Numbers of items, micro-batches and branches differ; the norm that clips is that
    of all.
    """
    for kind in (Averaging, torch.optim.SGD):
        for options in (
            {},
            {"clip_norm": 0.05},
            {"reduction": "sum"},
            {"accumulate_dtype": "float32"},
        ):
            model, opt = shared(kind, **options)
            reference = built()
            other = gradaccum.wrap(
                torch.optim.SGD(reference.parameters(), lr=0.1), steps=None, **options
            )
            for batch in micro_batches(rank):
                learn(model, opt, batch)
            opt.flush()
            for window in all_windows():
                for batch in window:
                    learn(reference, other, batch)
                other.flush()
            require_equal(
                model, reference, off=1e-5 if "accumulate_dtype" in options else 1e-13
            )
            assert math.isclose(
                opt.result.grad_norm,
                other.result.grad_norm,
                rel_tol=1e-5 if "accumulate_dtype" in options else 1e-12,
            )
            require_same_everywhere((numbers(model), opt.result))


@check
def wrong_process_groups_are_refused(rank: int) -> None:
    model = built()
    for wrong, error in (
        ("WORLD", gradaccum.ArgumentTypeError),
        (dist.GroupMember.NON_GROUP_MEMBER, gradaccum.UsageError),
    ):
        with refused(error, "process_group"):
            gradaccum.wrap(
                Averaging(model.parameters(), lr=0.1), steps=4, process_group=wrong
            )
    parallel = nn.parallel.DistributedDataParallel(model)
    with refused(gradaccum.ArgumentValueError, "process_group", "module="):
        gradaccum.wrap(
            Averaging(model.parameters(), lr=0.1),
            steps=4,
            module=parallel,
            process_group=dist.group.WORLD,
        )
    other = nn.Linear(4, 2 + rank)
    with refused(gradaccum.ArgumentValueError, "optimizer", "(3, 4)", "on rank 1"):
        gradaccum.wrap(
            Averaging(other.parameters(), lr=0.1),
            steps=4,
            process_group=dist.group.WORLD,
        )


def critic(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()


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
    model = built()

    def wrap(**options: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return gradaccum.wrap(optimizer, steps=4, **options)

    (said,) = warnings_of(wrap)
    assert "2 processes" in said
    assert "module=" in said
    assert 'process_group="alone"' in said
    parallel = nn.parallel.DistributedDataParallel(model)
    for options in (
        {"process_group": "alone"},
        {"process_group": dist.group.WORLD},
        {"module": parallel},
        {"norm_group": dist.group.WORLD},
    ):
        assert warnings_of(lambda options=options: wrap(**options)) == []
    alone = wrap(process_group="alone")
    assert warnings_of(lambda: copy.deepcopy(alone)) == []
    with refused(gradaccum.ArgumentValueError, "process_group", "module="):
        wrap(module=parallel, process_group="alone")


@check
def order_of_parameters_is_the_same_on_every_worker(rank: int) -> None:
    """Groups made of a set have another order in each process. Sums travel by position,
    so that two layers of one shape would get each other's gradient.
    """
    for given in ("module", "process_group"):
        model = critic(rank)
        parallel = nn.parallel.DistributedDataParallel(model)
        layers = [model[0], model[1]] if rank == 0 else [model[1], model[0]]
        named = [
            (f"{model[0] is not layer}.{name}", parameter)
            for layer in layers
            for name, parameter in layer.named_parameters()
        ]
        optimizer = torch.optim.SGD(named, lr=0.1)
        options: dict[str, Any] = {"module": parallel}
        if given == "process_group":
            options = {"process_group": dist.group.WORLD}
        with refused(
            gradaccum.ArgumentValueError, "same order", "weight", "on rank 1", "lists"
        ):
            gradaccum.wrap(optimizer, steps=1, **options)


@check
def groups_are_added_in_the_same_order_on_every_worker(rank: int) -> None:
    model = critic(rank)
    parallel = nn.parallel.DistributedDataParallel(model)
    opt = gradaccum.wrap(
        torch.optim.SGD(model[2].parameters(), lr=0.1), steps=1, module=parallel
    )
    for layer in [model[0], model[1]] if rank == 0 else [model[1], model[0]]:
        opt.add_param_group({"params": list(layer.parameters())})
    opt.backward(parallel(torch.ones(2, 4).double()).sum())
    before = numbers(model)
    with refused(gradaccum.UsageError, "one order everywhere"):
        opt.step()
    opt.discard()
    assert numbers(model) == before


@check
def settings_are_the_same_on_every_worker(rank: int) -> None:
    model = critic(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1 * rank)
    with refused(gradaccum.ArgumentValueError, "weight_decay", "on rank 1"):
        gradaccum.wrap(optimizer, steps=1, process_group=dist.group.WORLD)


@check
def windows_of_two_optimizers_are_not_mixed(rank: int) -> None:
    """Twin critics in one group, of which one worker runs out of data: its flush of the
    first would meet the other worker's window of the second.
    """
    first, second = critic(rank), critic(rank)
    one, two = (
        gradaccum.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1),
            steps=1,
            process_group=dist.group.WORLD,
        )
        for model in (first, second)
    )

    def learn_from(opt: Any, model: nn.Module) -> None:
        opt.backward(model(torch.ones(2, 4).double()).sum())
        opt.step()

    learn_from(one, first)
    learn_from(two, second)
    before = numbers(second)
    with refused(gradaccum.UsageError, "optimizer on every worker", "a group each"):
        if rank == 0:
            one.flush()
        else:
            learn_from(two, second)
    one.discard()
    two.discard()
    assert numbers(second) == before
    learn_from(two, second)
    assert two.result.applied


@check
def unequal_copies_are_said_once(rank: int) -> None:
    """Without a module nothing sends the parameters of one worker to the others."""

    def wrap() -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return gradaccum.wrap(optimizer, steps=1, process_group=dist.group.WORLD)

    model = critic(rank)
    assert warnings_of(wrap) == []
    with torch.no_grad():
        model[1].bias += 1e-2 * rank
    (said,) = warnings_of(wrap)
    assert "different parameters" in said
    with torch.no_grad():
        model[1].bias.fill_(math.nan)
    assert warnings_of(wrap) == [], "a NaN is not this check's concern"
