"""A sharded model against the same model whole, in windows of two micro-batches, without ``module=``; and DDP with ``steps=1``."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradaccum
from conformance_tests.framework_tests.torch_shards.common import check, whole
from gradaccum_torch.private import GLOO_SUMS

WORLD = 2
X = torch.arange(32 * 6, dtype=torch.float32).reshape(32, 6) / 100 - 1
OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.01},
    {"skip_norm": 1e-3},
    {"accumulate_dtype": "float64"},
    {"on_overflow": "drop_micro_batch"},
]


def build() -> nn.Module:
    """The last layer has five rows, which two processes share unevenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))


def shard(model: nn.Module, kind: str, mesh: DeviceMesh) -> nn.Module:
    if kind == "fsdp":
        return fully_shard(model, mesh=mesh)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def compare(kind: str, dtype: torch.dtype, options: dict[str, Any], bad: bool, rank: int, mesh: DeviceMesh) -> None:
    model, reference = shard(build().to(dtype), kind, mesh), build().to(dtype)
    opt, other = (gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), steps=2, **options) for m in (model, reference))
    for index in range(4):
        rows = X[8 * index : 8 * index + 8].to(dtype) * (math.inf if bad and index == 1 else 1)
        part = rows.chunk(WORLD)[rank] if kind == "fsdp" else rows
        for m, o, x in ((model, opt, part), (reference, other, rows)):
            m(x).float().square().mean().backward()
            o.step()
            o.zero_grad()
    mine, expected = opt.result, other.result
    off = 2.0**-20 if dtype == torch.float32 else 2.0**-6
    assert mine._replace(grad_norm=0) == expected._replace(grad_norm=0), (mine, expected)
    assert math.isclose(mine.grad_norm, expected.grad_norm, rel_tol=off), (mine, expected)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p).detach(), q.detach(), rtol=off, atol=off)


def compare_unequal(options: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    """FSDP2 averages the gradients of workers that hold five and three rows, each mean weighted by its rows."""
    model, reference = fully_shard(build().double(), mesh=mesh), build().double()
    opt, other = (gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), steps=2, **options) for m in (model, reference))
    for index in range(4):
        rows = X[8 * index : 8 * index + 8].double()
        cut = 5 if index % 2 else 4
        for m, o, x in ((model, opt, (rows[:cut], rows[cut:])[rank]), (reference, other, rows)):
            o.backward(m(x).square().mean(), weight=len(x))
            o.step()
            o.zero_grad()
    assert math.isclose(opt.result.grad_norm, other.result.grad_norm, rel_tol=1e-12), (opt.result, other.result)
    assert math.isclose(opt.result.loss, other.result.loss, rel_tol=1e-12), (opt.result, other.result)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p).detach(), q.detach(), rtol=1e-12, atol=1e-12)


def refuse(kind: str, rank: int, mesh: DeviceMesh) -> None:
    model = shard(build(), kind, mesh)
    opt: Any = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    model(X[:8]).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    try:
        opt.step()
    except gradaccum.UsageError:
        return
    raise AssertionError("a clip was not noticed")


def train_together(dtype: torch.dtype, options: dict[str, Any], rank: int) -> None:
    """DDP reduces ``.grad`` at the end of a backward pass. With ``steps=1`` it holds the whole window's gradient."""
    model = build().to(dtype)
    parallel = nn.parallel.DistributedDataParallel(model)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=1, **options)
    for index in range(4):
        parallel(X[8 * index : 8 * index + 8].to(dtype).chunk(WORLD)[rank]).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.zeros_like(mine) for _ in range(WORLD)]
    dist.all_gather(both, mine)
    assert torch.equal(*both), "the processes train apart"


def each_kind(rank: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for options in OPTIONS:
        compare(kind, torch.float32, options, False, rank, mesh)
    compare(kind, torch.bfloat16, {}, False, rank, mesh)
    compare(kind, torch.float32, {}, True, rank, mesh)
    refuse(kind, rank, mesh)


@check
def sharded_data_parallel_trains_as_one(rank: int) -> None:
    if not GLOO_SUMS:
        each_kind(rank, "fsdp")


@check
def tensor_parallel_trains_as_one(rank: int) -> None:
    """`reduction="sum"` too: its workers see the same items."""
    each_kind(rank, "tensor parallel")
    compare("tensor parallel", torch.float32, {"reduction": "sum"}, False, rank, init_device_mesh("cpu", (WORLD,)))


@check
def workers_hold_unequal_numbers_of_items(rank: int) -> None:
    for options in () if GLOO_SUMS else ({}, {"clip_norm": 0.01}, {"loss_scale": 64.0}):
        compare_unequal(options, rank, init_device_mesh("cpu", (WORLD,)))


@check
def replicas_train_together_in_windows_of_one(rank: int) -> None:
    train_together(torch.float32, {}, rank)
    train_together(torch.float32, {"accumulate_dtype": "float64"}, rank)
    train_together(torch.bfloat16, {}, rank)
    train_together(torch.bfloat16, {"master_weights": True}, rank)
