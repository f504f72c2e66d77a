"""The sum over the workers of a window, and the large batch in one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import gradaccum
from gradaccum_torch import backward, coupled_backward

from ..refusing import refused
from .common import (
    FLAT,
    alone,
    batches,
    build,
    check,
    each_way,
    mesh_of,
    require_equal,
    require_equal_results,
    sgd,
    sharded,
    train,
    whole,
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


@check
def divided_by_another_factor(rank: int) -> None:
    """Torchtitan has FSDP2 divide by 1. In a shard of its own torch 2.13 divides float64
    by another factor twice.
    """
    for options in ({"clip_norm": 0.01}, {"reduction": "sum"}):
        reference, other = alone(windows_of(3, 3), **options)
        for way, model, opt in each_way(**options):
            model.set_gradient_divide_factor(1.0)
            if way.shape[-1] > 1:
                model.first.set_gradient_divide_factor(3.0)
            train(model, opt, rank)
            require_equal(model, reference)
            require_equal_results(opt, other)


# Experts that only some workers have.


def make_layers() -> tuple[nn.Module, list[nn.Module]]:
    """Return the dense layer, and an expert for each worker."""
    torch.manual_seed(0)
    dense, *experts = [nn.Linear(4, 4).double() for _ in range(3)]
    return dense, experts


def loss_of_expert(
    dense: nn.Module, expert: Callable[[Tensor], Tensor], x: Tensor, overflow: bool
) -> Tensor:
    hidden = dense(x).tanh()
    loss = expert(hidden).square().mean()
    # The gradient of the expert alone.
    return loss + torch.inf * expert(hidden.detach()).sum() if overflow else loss


def train_experts(
    kind: str, rank: int, overflow: bool, **options: Any
) -> tuple[list[Tensor], Any]:
    """Train the expert of one worker, sharded over this worker alone."""
    dense, experts = make_layers()
    expert: Any = experts[rank]
    mine = DeviceMesh("cpu", [rank])
    if kind == "ddp":
        weight, bias = [
            nn.Parameter(DTensor.from_local(each.detach(), mine, [Replicate()]))
            for each in expert.parameters()
        ]
        module: Any = DistributedDataParallel(dense)
        run = module
        groups = [[*dense.parameters()], [weight, bias]]

        def expert(x: Tensor) -> Tensor:
            return nn.functional.linear(x, weight.to_local(), bias.to_local())
    else:
        module = nn.ModuleList([dense, expert])
        fully_shard(expert, mesh=mine)
        fully_shard(dense, mesh=mesh_of((2,)))
        run = dense
        groups = [[*dense.parameters()], [*expert.parameters()]]
        options["gradient_sync"] = kind
    inner = SGD([{"params": each} for each in groups], lr=0.1)
    opt = gradaccum.wrap(inner, steps=2, module=module, **options)
    for index, (x, _) in enumerate(batches(rank, 4)):
        is_bad = overflow and (rank, index) == (1, 3)
        opt.backward(loss_of_expert(run, expert, x, is_bad), weight=len(x))
        opt.step()
        opt.zero_grad()
    return [whole(each) for each in chain(*groups)], opt


def train_all_experts(overflow: bool, **options: Any) -> tuple[nn.Module, Any, Any]:
    """Train all experts in one process."""
    dense, experts = make_layers()
    parameters = nn.ModuleList([dense, *experts]).parameters()
    opt = gradaccum.wrap(SGD(parameters, lr=0.1), 4, process_group="alone", **options)
    everyone = [batches(worker, 4) for worker in range(2)]
    for index in (0, 2):
        for worker, expert in enumerate(experts):
            for later, (x, _) in enumerate(everyone[worker][index : index + 2]):
                is_bad = overflow and (worker, index + later) == (1, 3)
                opt.backward(loss_of_expert(dense, expert, x, is_bad), weight=len(x))
                opt.step()
    return dense, experts, opt


@check
def experts_of_one_worker_have_one_norm(rank: int) -> None:
    """Clipped, skipped by their norm, and skipped by an overflow in one expert."""
    norm = train_all_experts(False)[2].result.grad_norm
    for kind in ("ddp", "micro_batch", "window"):
        for overflow, options in (
            (False, {"clip_norm": 0.05}),
            (False, {"skip_norm": norm * 0.999}),
            (True, {}),
            (True, {"skip_norm": 9.0}),
        ):
            parameters, opt = train_experts(kind, rank, overflow, **options)
            dense, experts, other = train_all_experts(overflow, **options)
            expected = [*dense.parameters(), *experts[rank].parameters()]
            torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)
            assert opt.result.applied == ("clip_norm" in options)
            assert opt.result.overflow == other.result.overflow == overflow
            if not overflow:
                grad_norm = other.result.grad_norm
                assert math.isclose(opt.result.grad_norm, grad_norm, rel_tol=1e-12)


@check
def expert_that_only_the_first_worker_has(rank: int) -> None:
    """The other one has no second mesh by which to know of it."""
    large, (large_expert, _) = make_layers()
    reference = nn.ModuleList([large, large_expert])
    other = gradaccum.wrap(sgd(reference), 2, process_group="alone", clip_norm=0.05)
    everyone = [batches(worker, 1)[0][0] for worker in range(2)]
    for x, expert in zip(everyone, [large_expert, nn.Identity()], strict=True):
        other.backward(loss_of_expert(large, expert, x, False), weight=len(x))
        other.step()
    dense, (own_expert, _) = make_layers()
    fully_shard(dense, mesh=mesh_of((2,)))
    own_mesh = DeviceMesh("cpu", [rank])
    expert = nn.Identity() if rank else fully_shard(own_expert, mesh=own_mesh)
    model = nn.ModuleList([dense, expert])
    opt = gradaccum.wrap(sgd(model), 1, module=model, clip_norm=0.05)
    x = everyone[rank]
    opt.backward(loss_of_expert(dense, expert, x, False), weight=len(x))
    opt.step()
    require_equal(dense, large)
    assert math.isclose(opt.result.grad_norm, other.result.grad_norm, rel_tol=1e-12)


def batch_of(rank: int) -> Tensor:
    """Of five or of eight items: the last micro-batch is smaller, and workers count by
    their items.
    """
    return torch.arange(20.0 + 12 * rank).double().sin().reshape(-1, 4)


@check
def coupled_losses_count_by_their_items(rank: int) -> None:
    whole = build()
    (sum(whole(x).std() * len(x) for x in map(batch_of, range(2))) / 13).backward()
    sgd(whole).step()
    for _, model, opt in each_way(steps=None):
        coupled_backward(model, Tensor.std, batch_of(rank), steps=2, optimizer=opt)
        require_equal(model, whole)


@check
def large_batch_in_one_call(rank: int) -> None:
    """Also after a call in which all workers failed, in the second micro-batch."""
    for reduction in ("mean", "sum"):

        def loss_of(net: Any, x: Tensor, reduction: str = reduction) -> Any:
            return getattr(net(x).square().mean(1), reduction)()

        whole = build()
        other = gradaccum.wrap(sgd(whole), 1, reduction=reduction, clip_norm=0.05)
        other.backward(loss_of(whole, torch.cat([batch_of(0), batch_of(1)])))
        other.step()
        for _, model, opt in each_way(steps=None, reduction=reduction, clip_norm=0.05):
            loss_fn = partial(loss_of, model)
            failing = partial(lambda calls, x: calls.pop()(x), [loss_fn])
            with refused(IndexError):
                backward(failing, batch_of(rank), steps=3, optimizer=opt)
            backward(loss_fn, batch_of(rank), steps=3, optimizer=opt)
            require_equal(model, whole)
    model = sharded(FLAT)
    with refused(gradaccum.UsageError, "optimizer", "several workers"):
        coupled_backward(model, Tensor.std, batch_of(rank), steps=2)
    assert all(p.grad is None for p in model.parameters())
