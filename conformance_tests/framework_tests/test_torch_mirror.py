"""Every way to train on several workers, at 2, 8, 64 and 1024 of them, in one process:
a group whose ranks bring what this one brings.

The large batch is that of all workers: their items are equal, and so are their shards,
as the parameters repeat. What a window sends is counted too: collectives and bytes as a
function of the parameters, the workers and the micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version

if not torch.distributed.is_available():
    pytest.skip(
        "this torch was built without torch.distributed", allow_module_level=True
    )

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from benchmarks.cost_law import WAYS, Sent, Window
from conformance_tests.framework_tests.torch_fsdp import REASON, RUNS_ON_CPU
from conformance_tests.framework_tests.torch_mirror import Call, mirror
from conformance_tests.framework_tests.torch_workers.common import whole

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


def two_layers(workers: int) -> nn.Module:
    size = 2 * workers
    layers = nn.Linear(3, size), nn.Tanh(), Scale(size)
    return repeating(nn.Sequential(*layers), workers)


def squares(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean(1).sum()


def copies(workers: int) -> Job:
    model = two_layers(workers)
    module = DistributedDataParallel(model)
    return Job(model, squares(module), workers, {"module": module})


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
    return fsdp(workers, sync, (2, workers // 2))


def two_linear(workers: int) -> nn.Module:
    size = 2 * workers
    layers = nn.Linear(3, size), nn.Tanh(), nn.Linear(size, 2), nn.Tanh()
    return repeating(nn.Sequential(*layers), workers)


def tensor_parallel_in_fsdp(workers: int) -> Job:
    mesh = init_device_mesh("cpu", (2, workers // 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(two_linear(workers), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    return Job(model, squares(model), 2, {"module": model})


PROGRAMS = {
    "DistributedDataParallel": (copies, two_layers),
    "FSDP2, micro_batch": (partial(fsdp, sync="micro_batch"), two_layers),
    "FSDP2, window": (partial(fsdp, sync="window"), two_layers),
    "HSDP, micro_batch": (partial(hsdp, sync="micro_batch"), two_layers),
    "HSDP, window": (partial(hsdp, sync="window"), two_layers),
    "tensor parallel in FSDP2": (tensor_parallel_in_fsdp, two_linear),
}


def require_runs(program: str) -> None:
    if "SDP" in program and not RUNS_ON_CPU:
        pytest.skip(REASON)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_way_is_exact(program: str, workers: int) -> None:
    """Two full windows and a short one, of unequal micro-batches; the norm, which a
    scale would change, is compared too. The second window sends gradients and a few
    numbers, as the law says; what gathers parameters and items is the engine's own.
    """
    require_runs(program)
    prepare, build = PROGRAMS[program]
    for reduction in ("mean", "sum", "sum_per_item"):
        norms, sent = [], []
        with mirror(workers) as calls:
            job = prepare(workers)
            opt = gradaccum.wrap(
                sgd(job.model.parameters()),
                steps=STEPS,
                clip_norm=CLIP,
                reduction=reduction,
                **job.options,
            )
            for first, last in WINDOWS:
                calls.clear()
                for x in ITEMS[first:last]:
                    divisor = 1 if reduction == "sum_per_item" else len(x)
                    opt.backward(job.loss(x) / divisor, weight=len(x))
                    opt.step()
                    opt.zero_grad()
                sent.append(reductions(calls))
                opt.flush()
                norms.append(opt.result.grad_norm)
            found = [whole(parameter) for parameter in job.model.parameters()]
        assert opt.result.optimizer_step == len(WINDOWS)
        expected, large_norms = large_batches(build(workers), job.times, reduction)
        torch.testing.assert_close(norms, large_norms, rtol=1e-12, atol=0)
        pair = found, [p.detach() for p in expected.parameters()]
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)
        if has_law(program) and workers > 2:
            way, copies = LAWS[program]
            size = sum(parameter.nbytes for parameter in found)
            window = Window(
                size, workers, STEPS, len(found), element=8, copies=copies, units=2
            )
            assert sent[1] == WAYS[way].law(window)


def has_law(program: str) -> bool:
    """Torch before 2.10 sends fewer numbers for the norm of shards."""
    is_older = "SDP" in program and Version(torch.__version__) < Version("2.10")
    return program in LAWS and not is_older


def reductions(calls: list[Call]) -> dict[tuple[str, int], Sent]:
    sizes = {}
    for call in calls:
        if call.name in ("allreduce", "reduce_scatter"):
            sizes.setdefault((call.name, call.workers), []).append(call.bytes)
    return {kind: Sent(len(each), sum(each)) for kind, each in sizes.items()}


ITEMS = torch.randn(
    20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
).split((4, 2, 3, 4, 1, 3, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def large_batches(
    model: nn.Module, times: int, reduction: str
) -> tuple[nn.Module, list[float]]:
    """The bare optimizer with the items of all workers."""
    optimizer, loss, norms = sgd(model.parameters()), squares(model), []
    for first, last in WINDOWS:
        window = ITEMS[first:last]
        summed = sum(times * loss(x) / len(x) for x in window)
        whole = torch.cat(window)
        (summed if reduction == "sum" else loss(whole) / len(whole)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        for gradient in gradients:
            gradient *= min(1, CLIP / norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


LAWS = {
    "DistributedDataParallel": ("DistributedDataParallel", 1),
    "FSDP2, micro_batch": ("FSDP2, micro_batch", 1),
    "FSDP2, window": ("FSDP2, window", 1),
    "HSDP, micro_batch": ("FSDP2, micro_batch", 2),
    "HSDP, window": ("FSDP2, window", 2),
}
"""The programs by the law that holds for them, and their copies of the model."""
