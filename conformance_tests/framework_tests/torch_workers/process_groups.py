"""Copies of a model without a parallel module, and an optimizer that averages gradients
in its own ``step``, as nanochat's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum_torch import redistributed

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
def reducing_optimizer_without_its_workers_is_refused(rank: int) -> None:
    model = built()
    with refused(gradaccum.UsageError, "process_group", "Averaging", "module="):
        gradaccum.wrap(Averaging(model.parameters(), lr=0.1), steps=4)
    gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
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
    with refused(gradaccum.ArgumentValueError, "options", "on rank 1", "elements"):
        gradaccum.wrap(
            Averaging(other.parameters(), lr=0.1),
            steps=4,
            process_group=dist.group.WORLD,
        )


@check
def a_worker_leaves_and_one_joins(rank: int) -> None:
    """The second trains alone, then shares its window; the first comes with another
    model, and with a window that is refused.
    """
    model, reference = built(), built()
    opt, other = (
        gradaccum.wrap(torch.optim.AdamW(each.parameters(), lr=0.1), steps=None)
        for each in (model, reference)
    )
    batches = [batch for worker in range(WORLD) for batch in micro_batches(worker)]
    if rank == 1:
        learn(model, opt, batches[0])
        opt.flush()
    else:
        torch.nn.init.ones_(model.usual.weight)
    learn(model, opt, batches[1 + rank])
    with refused(gradaccum.UsageError, "windows closed, by rank: [0, 1]", "discard()"):
        opt.regroup(dist.group.WORLD)
    if rank == 0:
        opt.discard()
    opt.regroup(dist.group.WORLD)
    if rank == 0:
        learn(model, opt, batches[1])
    opt.flush()
    opt.regroup(None)
    learn(model, opt, batches[3])
    state = opt.state_dict()
    assert redistributed([state], 1)[0]["gradaccum"]["worker"] == [0, 1], (
        "what it holds is a whole window now"
    )
    opt.load_state_dict(state)
    opt.flush()
    with refused(gradaccum.ArgumentTypeError, "process_group"):
        opt.regroup("WORLD")
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    opt.regroup(parallel)
    learn(parallel, opt, batches[4 + rank])
    opt.flush()
    for window in ([batches[0]], batches[1:3], [batches[3]], batches[4:6]):
        for batch in window:
            learn(reference, other, batch)
        other.flush()
    assert opt.result._replace(grad_norm=0, loss=0) == other.result._replace(
        grad_norm=0, loss=0
    )
    require_equal(model, reference)
