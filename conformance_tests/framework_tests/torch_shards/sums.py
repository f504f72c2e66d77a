"""The sum over the workers and the collectives of a window; a sharded model against the
whole one; the large batch in one call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.common import (
    require_same_everywhere,
)
from gradaccum_torch.large_batch import backward, coupled_backward
from gradaccum_torch.torch_private.fsdp import GLOO_SUMS

from .common import (
    WAYS,
    Way,
    alone,
    batches,
    build,
    check,
    learn,
    numbers,
    require_equal,
    require_equal_results,
    sgd,
    sharded,
    train,
    windows_of,
    wrap,
)


@check
def every_divide_factor(rank: int) -> None:
    for reduction in ("mean", "sum"):
        reference, _ = alone(windows_of(), reduction=reduction)
        for way in (way for way in WAYS if way.shape != (2, 1)):
            for factors in ((1.0, 1.0), (3.0, 3.0), (5.0, None)):
                model = sharded(way)
                for module, factor in zip((model.first, model), factors, strict=True):
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                opt = wrap(model, way, reduction=reduction)
                train(model, opt, rank)
                require_equal(model, reference)


@check
def windows_without_the_module(rank: int) -> None:
    """FSDP2's units are found by the parameters; the loss is that of all workers,
    too.
    """
    for options in ({"reduction": "sum"}, {"clip_norm": 0.01}, {"loss_scale": 64.0}):
        model = sharded(WAYS[0])
        if "reduction" in options:
            model.set_gradient_divide_factor(1.0)
            model.first.set_gradient_divide_factor(1.0)
        opt = gradaccum.wrap(sgd(model), steps=3, **options)
        train(model, opt, rank)
        reference, other = alone(windows_of(), **options)
        require_equal(model, reference)
        require_equal_results(opt, other)


@check
def factors_that_cannot_be_told(rank: int) -> None:
    model = sharded(WAYS[0])
    opt = wrap(model, WAYS[0])
    train(model, opt, rank, 2)
    model.set_gradient_divide_factor(3.0)
    with refused(gradaccum.UsageError, "set_gradient_divide_factor", "opt.discard()"):
        opt.flush()
    opt.discard()
    train(model, opt, rank, 3)
    require_equal(model, alone(windows_of((3,)))[0])
    for way in (Way("micro_batch", (2, 1)), Way("window", (2, 1))):
        model = sharded(way)
        model.set_gradient_divide_factor(3.0)
        opt = wrap(model, way)
        learn(model, opt, batches(rank)[0])
        with refused(gradaccum.UsageError, "set_gradient_divide_factor", "twice"):
            opt.flush()
    model = sharded(WAYS[0])
    model.set_all_reduce_hook(lambda _: None)
    opt = wrap(model, WAYS[0])
    learn(model, opt, batches(rank)[0])
    with refused(gradaccum.UsageError, "set_all_reduce_hook"):
        opt.flush()


WORLD = 2
X = torch.arange(32 * 6, dtype=torch.float32).reshape(32, 6) / 100 - 1
WHOLE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.01},
    {"skip_norm": 1e-3},
    {"accumulate_dtype": "float64"},
    {"on_overflow": "drop_micro_batch"},
]


def build_whole() -> nn.Module:
    """The last layer has five rows, which two processes share unevenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))


def shard(model: nn.Module, kind: str, mesh: DeviceMesh) -> nn.Module:
    if kind == "fsdp":
        return fully_shard(model, mesh=mesh)
    return parallelize_module(
        model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


def compare(
    kind: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    bad: bool,
    rank: int,
    mesh: DeviceMesh,
) -> None:
    model, reference = (
        shard(build_whole().to(dtype), kind, mesh),
        build_whole().to(dtype),
    )
    opt, other = (
        gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), steps=2, **options)
        for m in (model, reference)
    )
    for index in range(4):
        rows = X[8 * index : 8 * index + 8].to(dtype) * (
            math.inf if bad and index == 1 else 1
        )
        part = rows.chunk(WORLD)[rank] if kind == "fsdp" else rows
        for m, o, x in ((model, opt, part), (reference, other, rows)):
            m(x).float().square().mean().backward()
            o.step()
            o.zero_grad()
    mine, expected = opt.result, other.result
    off = 2.0**-20 if dtype == torch.float32 else 2.0**-6
    assert mine._replace(grad_norm=0) == expected._replace(grad_norm=0)
    assert math.isclose(mine.grad_norm, expected.grad_norm, rel_tol=off)
    require_equal(model, reference, off=off)


def refuse(kind: str, rank: int, mesh: DeviceMesh) -> None:
    model = shard(build_whole(), kind, mesh)
    opt: Any = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    model(X[:8]).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    with refused(gradaccum.UsageError, "clip_norm="):
        opt.step()


def train_replicas(dtype: torch.dtype, options: dict[str, Any], rank: int) -> None:
    """DDP reduces ``.grad`` at the end of a backward pass. With ``steps=1`` it holds
    the whole window's gradient.
    """
    model = build_whole().to(dtype)
    parallel = nn.parallel.DistributedDataParallel(model)
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5), steps=1, **options
    )
    for rows in X.to(dtype).split(8):
        parallel(rows.chunk(WORLD)[rank]).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    require_same_everywhere([p.tolist() for p in model.parameters()])


def each_kind(rank: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for options in WHOLE_OPTIONS:
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
    compare(
        "tensor parallel",
        torch.float32,
        {"reduction": "sum"},
        False,
        rank,
        init_device_mesh("cpu", (WORLD,)),
    )


@check
def replicas_train_together_in_windows_of_one(rank: int) -> None:
    for dtype, options in (
        (torch.float32, {}),
        (torch.float32, {"accumulate_dtype": "float64"}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"master_weights": True}),
    ):
        train_replicas(dtype, options, rank)


STEPS = 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.05},
    {"loss_scale": 1024.0},
    {"reduction": "sum"},
]


def batch_of(rank: int) -> Tensor:
    """Of five or of eight items: the last micro-batch is smaller, and workers count by
    their items.
    """
    return torch.randn(
        5 + 3 * rank,
        4,
        generator=torch.Generator().manual_seed(rank),
        dtype=torch.float64,
    )


@check
def large_batch_in_one_call(rank: int) -> None:
    for way in WAYS:
        for options in OPTIONS:
            summed = options.get("reduction") == "sum"
            model, whole = sharded(way), build()
            opt, other = (
                wrap(model, way, **{**options, "steps": None}),
                gradaccum.wrap(sgd(whole), steps=None, **options),
            )

            def loss(net: Any, x: Tensor, summed: bool = summed) -> Tensor:
                each = net(x).square().mean(1)
                return each.sum() if summed else each.mean()

            for _ in range(2):
                backward(
                    lambda x, model=model, loss=loss: loss(model, x),
                    batch_of(rank),
                    steps=STEPS,
                    optimizer=opt,
                )
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
    """All workers fail in the second micro-batch; the next call is as if there had been
    none.
    """
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
            backward(
                lambda x, each=each: each(x).square().mean(),
                batch_of(rank),
                steps=STEPS,
                optimizer=opt,
            )
        assert all(map(torch.equal, numbers(model), numbers(other)))
