"""Every way to train on several workers, at 2, 8, 64 and 1024 of them, in one process:
a group whose ranks bring what this one brings.

The large batch is that of all workers: their items are equal, and so are their shards,
as the parameters repeat. What a window sends is counted too: collectives and bytes as a
function of the parameters, the workers and the micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version

if not torch.distributed.is_available():
    pytest.skip(
        "this torch was built without torch.distributed", allow_module_level=True
    )

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from benchmarks.cost_law import WAYS, Sent, Window
from conformance_tests.framework_tests.torch_fsdp import REASON, RUNS_ON_CPU
from conformance_tests.framework_tests.torch_mirror import Call, mirror

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
"""Of an older torch, about random numbers on a CPU, which no program here asks for."""
WORKERS = (2, 8, 64, 1024)
STEPS = 3
"""Micro-batches of a window."""
WINDOWS = ((0, 3), (3, 6), (6, 7))
CLIP = 0.5


class Scale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, 0]


def repeating(model: nn.Module, workers: int) -> nn.Module:
    """Give every worker's part of each parameter the same values."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        block = [size // math.gcd(size, workers) for size in parameter.shape]
        values = torch.randn(block, generator=generator, dtype=torch.float64) * (
            block[1] / parameter.shape[1] if parameter.ndim == 2 else 1
        )
        parameter.data = values.repeat(
            [size // part for size, part in zip(parameter.shape, block, strict=True)]
        )
    return model


class Job(NamedTuple):
    """One worker's part in a training."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    """The summed loss of this worker's items."""
    times: int
    """How often the items are there, as many workers have them."""
    options: dict[str, Any]
    groups: list[dict[str, Any]] | None = None


def two_layers(workers: int) -> nn.Module:
    return repeating(
        nn.Sequential(nn.Linear(3, 2 * workers), nn.Tanh(), Scale(2 * workers)), workers
    )


def squares(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean(1).sum()


def parallel(workers: int) -> Job:
    model = two_layers(workers)
    module = DistributedDataParallel(model)
    return Job(model, squares(module), workers, {"module": module})


def copies(workers: int) -> Job:
    model = two_layers(workers)
    return Job(model, squares(model), workers, {"process_group": dist.group.WORLD})


def fsdp(workers: int, sync: str, mesh: tuple[int, ...] = ()) -> Job:
    model = two_layers(workers)
    shape = mesh or (workers,)
    device_mesh = init_device_mesh(
        "cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :]
    )
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=device_mesh)
    return Job(model, squares(model), workers, {"module": model, "gradient_sync": sync})


def hsdp(workers: int, sync: str) -> Job:
    job = fsdp(workers, sync, (2, workers // 2))
    # Torch divides twice by a factor beside shards of one worker, which is refused.
    if workers > 2:
        job.model[0].set_gradient_divide_factor(3.0)
    return job


def two_linear(workers: int) -> nn.Module:
    return repeating(
        nn.Sequential(
            nn.Linear(3, 2 * workers), nn.Tanh(), nn.Linear(2 * workers, 2), nn.Tanh()
        ),
        workers,
    )


TENSOR = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def tensor_parallel(workers: int) -> Job:
    model = parallelize_module(
        two_linear(workers), init_device_mesh("cpu", (workers,)), TENSOR
    )
    return Job(model, squares(model), 1, {})


def tensor_parallel_in_fsdp(workers: int) -> Job:
    mesh = init_device_mesh("cpu", (2, workers // 2), mesh_dim_names=("data", "tensor"))
    model = fully_shard(
        parallelize_module(two_linear(workers), mesh["tensor"], TENSOR),
        mesh=mesh["data"],
    )
    return Job(model, squares(model), 2, {"module": model})


class Attention(nn.Module):
    """Over a sequence of which each worker has a part, if there is a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.mesh = nn.Linear(1, 9), None

    def forward(self, x: Tensor) -> Tensor:
        query, *others = self.inputs(x.unsqueeze(-1)).chunk(3, -1)
        return scaled_dot_product_attention(query, *map(self.whole, others)).mean(-1)

    def whole(self, part: Tensor) -> Tensor:
        if self.mesh is None:
            return part
        return DTensor.from_local(part, self.mesh, [Shard(1)]).full_tensor(
            grad_placements=[Partial()]
        )


def attention(workers: int) -> nn.Module:
    return repeating(Attention(), 1)


def context_parallel(workers: int) -> Job:
    model = attention(workers)
    model.mesh = init_device_mesh("cpu", (workers,))
    module = DistributedDataParallel(model)
    return Job(model, squares(module), workers, {"module": module})


class Classes(nn.Module):
    """A backbone, and a head whose loss asks for all classes alike: a label's own class
    would be on one worker alone.
    """

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.backbone, self.head = (
            nn.Linear(3, 4),
            nn.Parameter(torch.empty(3 * workers, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.full([len(x)], len(self.head) - 1)
        return cross_entropy(
            self.backbone(x) @ self.head.T, labels, reduction="sum", label_smoothing=1.0
        )


def classes(workers: int) -> nn.Module:
    return repeating(Classes(workers), workers)


class AddUp(torch.autograd.Function):
    """The sum over all workers, from which all of them compute one loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0]


def class_sharded_head(workers: int) -> Job:
    model, mesh = classes(workers), init_device_mesh("cpu", (workers,))
    module = DistributedDataParallel(model.backbone)
    model.head = nn.Parameter(distribute_tensor(model.head.data, mesh, [Shard(0)]))

    def loss(x: Tensor) -> Tensor:
        features = DTensor.from_local(module(x), mesh, [Shard(0)]).full_tensor(
            grad_placements=[Partial()]
        )
        logits = features @ model.head.to_local().T
        total = AddUp.apply(logits.exp().sum(-1))  # type: ignore[no-untyped-call]
        uniform = AddUp.apply(logits.sum(-1))  # type: ignore[no-untyped-call]
        loss: Tensor = (total.log() - uniform / len(model.head)).sum()
        return loss

    groups = [{"params": list(model.backbone.parameters())}, {"params": [model.head]}]
    return Job(model, loss, workers, {"module": module}, groups)


PROGRAMS: dict[str, tuple[Callable[[int], Job], Callable[[int], nn.Module]]] = {
    "DistributedDataParallel": (parallel, two_layers),
    "process_group": (copies, two_layers),
    "FSDP2, micro_batch": (lambda workers: fsdp(workers, "micro_batch"), two_layers),
    "FSDP2, window": (lambda workers: fsdp(workers, "window"), two_layers),
    "HSDP, micro_batch": (lambda workers: hsdp(workers, "micro_batch"), two_layers),
    "HSDP, window": (lambda workers: hsdp(workers, "window"), two_layers),
    "HSDP, all_reduce_per_window": (
        lambda workers: hsdp(workers, "all_reduce_per_window"),
        two_layers,
    ),
    "tensor parallel": (tensor_parallel, two_linear),
    "tensor parallel in FSDP2": (tensor_parallel_in_fsdp, two_linear),
    "context parallel": (context_parallel, attention),
    "class-sharded head": (class_sharded_head, classes),
}
REDUCTIONS = {"class-sharded head": ("sum_per_item",)}


def require_runs(program: str) -> None:
    if "SDP" in program and not RUNS_ON_CPU:
        pytest.skip(REASON)
    if "all_reduce_per_window" in program and not hasattr(
        FSDPModule, "set_reduce_scatter_unused_params"
    ):
        pytest.skip("torch before 2.13 cannot wait with the copies' reduction alone")


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_way_is_exact(program: str, workers: int) -> None:
    """Two full windows and a short one, of unequal micro-batches; the norm, which a
    scale would change, is compared too.
    """
    require_runs(program)
    prepare, build = PROGRAMS[program]
    for reduction in REDUCTIONS.get(program, ("mean", "sum", "sum_per_item")):
        with mirror(workers):
            job = prepare(workers)
            opt = gradaccum.wrap(
                sgd(job.groups or job.model.parameters()),
                steps=STEPS,
                clip_norm=CLIP,
                reduction=reduction,
                **job.options,
            )
            norms = []
            for first, last in WINDOWS:
                train(job, opt, ITEMS[first:last], reduction)
                norms.append(opt.result.grad_norm)
            found = [whole(parameter) for parameter in job.model.parameters()]
        assert opt.result.optimizer_step == len(WINDOWS)
        expected, large_norms = large_batches(build(workers), job.times, reduction)
        torch.testing.assert_close(norms, large_norms, rtol=1e-12, atol=0)
        for p, q in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


ITEMS = torch.randn(
    20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
).split((4, 2, 3, 4, 1, 3, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(job: Job, opt: Any, micro_batches: Any, reduction: str = "mean") -> None:
    for x in micro_batches:
        opt.backward(
            job.loss(x) / (1 if reduction == "sum_per_item" else len(x)), weight=len(x)
        )
        opt.step()
        opt.zero_grad()
    opt.flush()


def whole(parameter: Tensor) -> Tensor:
    return (
        parameter.full_tensor()
        if isinstance(parameter, DTensor)
        else parameter.detach()
    )


def large_batches(
    model: nn.Module, times: int, reduction: str
) -> tuple[nn.Module, list[float]]:
    """The bare optimizer with the items of all workers."""
    optimizer, loss, norms = (
        sgd(model.parameters()),
        model if isinstance(model, Classes) else squares(model),
        [],
    )
    for first, last in WINDOWS:
        window = ITEMS[first:last]
        summed = sum(
            times * loss(x) / (len(x) if reduction == "sum" else 1) for x in window
        )
        (
            summed if reduction == "sum" else summed / (times * sum(map(len, window)))
        ).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        for gradient in gradients:
            gradient *= min(1, CLIP / norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


LAWS = {
    "DistributedDataParallel": ("DistributedDataParallel", 1),
    "process_group": ("DistributedDataParallel", 1),
    "FSDP2, micro_batch": ("FSDP2, micro_batch", 1),
    "FSDP2, window": ("FSDP2, window", 1),
    "HSDP, micro_batch": ("FSDP2, micro_batch", 2),
    "HSDP, window": ("FSDP2, window", 2),
    "HSDP, all_reduce_per_window": ("HSDP, all_reduce_per_window", 2),
}
"""The programs by the law that holds for them, and their copies of the model."""


@pytest.mark.parametrize("workers", WORKERS[1:])
@pytest.mark.parametrize("program", LAWS)
def test_a_window_sends_what_the_law_says(program: str, workers: int) -> None:
    """In whatever number of micro-batches: gradients, and a few numbers. What gathers
    parameters and items is the engine's own.
    """
    require_runs(program)
    if "SDP" in program and Version(torch.__version__) < Version("2.10"):
        pytest.skip("torch before 2.10 sends fewer numbers for the norm of shards")
    way, copies = LAWS[program]
    for steps in (1, 4):
        with mirror(workers) as calls:
            job = PROGRAMS[program][0](workers)
            opt = gradaccum.wrap(
                sgd(job.model.parameters()), steps=steps, **job.options
            )
            for _ in range(2):  # The first window has to find out which sums there are.
                calls.clear()
                for _ in range(steps):
                    opt.backward(job.loss(ITEMS[0]))
                    opt.step()
                    opt.zero_grad()
            found = {
                kind: counted(calls, *kind)
                for kind in {(call.name, call.workers) for call in calls}
                if kind[0] in REDUCES
            }
        parameters = [
            whole(parameter) for parameter in PROGRAMS[program][1](workers).parameters()
        ]
        size = sum(parameter.nbytes for parameter in parameters)
        window = Window(
            size, workers, steps, len(parameters), element=8, copies=copies, units=2
        )
        assert found == WAYS[way].law(window)


REDUCES = ("allreduce", "reduce_scatter")


def counted(calls: list[Call], name: str, workers: int) -> Sent:
    sizes = [
        call.bytes for call in calls if (call.name, call.workers) == (name, workers)
    ]
    return Sent(len(sizes), sum(sizes))
