"""Up to 1024 workers in one process: a group whose ranks bring what this one brings.

The large batch is that of all workers: their items are equal, and so are their shards,
as the parameters repeat. What a window sends is counted too: collectives and bytes as a
function of the parameters, the workers and the micro-batches.
"""

from __future__ import annotations

import math
from typing import Any

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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import SGD

import gradaccum
from benchmarks.cost_law import ONCE, WAYS, Sent, Window

from .torch_fsdp import NEEDS_FSDP2_ON_CPU
from .torch_mirror import Call, mirror
from .torch_workers.common import whole

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
"""Of an older torch, about random numbers on a CPU, which no program here asks for."""
CLIP = 0.5
ITEMS = torch.randn(
    20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
).split((4, 2, 3, 4, 0, 4, 3))


@pytest.mark.parametrize("workers", [2, 1024])
@pytest.mark.parametrize(
    ("tensors", "elements", "buckets"), [(30, 2**19, 3), (2, 2**20, 2)]
)
def test_window_sends_what_the_law_says(
    workers: int, tensors: int, elements: int, buckets: int
) -> None:
    """The buckets, under the pass where the one before was the only one of its
    micro-batch; then the numbers.
    """
    sent = []
    with mirror(workers) as calls:
        parameters = [nn.Parameter(torch.ones(elements)) for _ in range(tensors)]
        opt = gradaccum.wrap(
            SGD(parameters, lr=0.5), steps=2, process_group=dist.group.WORLD
        )
        for index in range(4):
            calls.clear()
            opt.backward(sum((each.sum() for each in parameters), torch.zeros(())))
            if index % 2:
                assert len(calls) == buckets, "while the pass ran"
            opt.step()
            if index % 2:
                sent.append(Sent(len(calls), sum(call.bytes for call in calls)))
    window = Window(4 * tensors * elements, workers, 2, tensors)
    assert sent == [WAYS[ONCE].law(window)["allreduce", workers]] * 2
    assert all(bool((each == 0).all()) for each in parameters)


def test_partial_gradients_are_reduced() -> None:
    """As a parameter that each worker has whole gets them from the worker's items."""
    with mirror(2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh))
        x = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
        opt = gradaccum.wrap(SGD([weight], lr=1.0), steps=1)
        opt.backward((x * weight).sum())
        assert weight.grad.placements[0].is_partial()
        opt.step()
        assert opt.result.grad_norm == 12
        assert whole(weight).tolist() == [-6] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_that_somebody_holds_is_reduced_in_a_copy(dtype: torch.dtype) -> None:
    """While the pass runs, unless a micro-batch has several passes."""
    held = torch.ones(2**21, dtype=dtype)
    small, unused, large = (
        nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (1, 1, 2**21)
    )
    large.register_hook(lambda _: held.detach())  # type: ignore[no-untyped-call]
    inner = SGD([small, unused, large], lr=1.0)
    inner.register_step_pre_hook(lambda *_: gradients.append(unused.grad))
    gradients = []
    with mirror(2) as calls:
        opt = gradaccum.wrap(inner, steps=2, process_group=dist.group.WORLD)
        for index, passes in enumerate((2, 2, 1, 1)):
            calls.clear()
            for _ in range(passes):
                loss = small.float().sum()
                if index % 2:
                    loss = loss + large.float().sum()
                opt.backward(loss)
            assert len(calls) == (index == 3)
            opt.step()
        opt.backward(small.float().sum())
        opt.step()
        opt.backward(small.float().sum())
        opt.discard()
        for _ in range(2):
            opt.backward(small.float().sum() + large.float().sum())
            opt.step()
    assert opt.result.loss == -3 - 3 * 2**20
    assert bool((held == 1).all())
    assert bool((large == -2.5).all())
    assert gradients == [None, None, None]


class Scale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, 0]


def build(workers: int, last_layer: nn.Module) -> Any:
    """A model in which every worker's part of each parameter has the same values."""
    model = nn.Sequential(nn.Linear(3, 2 * workers), nn.Tanh(), last_layer, nn.Tanh())
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        repeats = [math.gcd(size, workers) for size in parameter.shape]
        block = [n // m for n, m in zip(parameter.shape, repeats, strict=True)]
        values = torch.randn(block, generator=generator, dtype=torch.float64)
        if parameter.ndim == 2:
            values /= repeats[1]
        parameter.data = values.repeat(repeats)
    return model


def copies_of_shards(workers: int, copies: int) -> Any:
    model = build(workers, Scale(2 * workers))
    shape = (copies, workers // copies)[copies == 1 :]
    names = ("copies", "shards")[copies == 1 :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def tensor_parallel_in_fsdp(workers: int) -> Any:
    model = build(workers, nn.Linear(2 * workers, 2))
    mesh = init_device_mesh("cpu", (2, workers // 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    return fully_shard(model, mesh=mesh["data"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def reductions(calls: list[Call]) -> dict[tuple[str, int], Sent]:
    sizes: dict[tuple[str, int], list[int]] = {}
    for call in calls:
        if call.name in ("allreduce", "reduce_scatter"):
            sizes.setdefault((call.name, call.workers), []).append(call.bytes)
    return {kind: Sent(len(each), sum(each)) for kind, each in sizes.items()}


@NEEDS_FSDP2_ON_CPU
@pytest.mark.parametrize("workers", [8, 1024])
@pytest.mark.parametrize("sync", ["micro_batch", "window"])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_shards_are_exact(copies: int, sync: str, workers: int) -> None:
    """In FSDP2, HSDP, and (0) tensor parallel in FSDP2: two full windows and a short
    one, of unequal micro-batches. The second one, in which one is empty, sends gradients and a few numbers, as
    the law says; what gathers parameters and items is the engine's own.
    """
    if copies:
        large = build(workers, Scale(2 * workers))
    else:
        large = build(workers, nn.Linear(2 * workers, 2))
    bare = sgd(large)
    with mirror(workers) as calls:
        if copies:
            model = copies_of_shards(workers, copies)
        else:
            model = tensor_parallel_in_fsdp(workers)
        opt = gradaccum.wrap(
            sgd(model), steps=3, clip_norm=CLIP, module=model, gradient_sync=sync
        )
        for number, window in enumerate((ITEMS[:3], ITEMS[3:6], ITEMS[6:])):
            calls.clear()
            for x in window:
                opt.backward(loss_of(model, x), weight=len(x))
                opt.step()
            if number == 1:
                sent = reductions(calls)
            opt.flush()
            loss_of(large, torch.cat(window)).backward()
            gradients = [parameter.grad for parameter in large.parameters()]
            norm = nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient *= min(1, CLIP / norm)
            bare.step()
            bare.zero_grad()
            assert math.isclose(opt.result.grad_norm, norm, rel_tol=1e-12)
        found = [whole(parameter) for parameter in model.parameters()]
    expected = [parameter.detach() for parameter in large.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # Torch before 2.10 sends fewer numbers for the norm of shards.
    if copies and Version(torch.__version__) >= Version("2.10"):
        size = sum(parameter.nbytes for parameter in found)
        law = WAYS[f"FSDP2, {sync}"].law
        assert sent == law(Window(size, workers, 3, len(found), 8, copies, units=2))
