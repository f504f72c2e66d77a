"""Beside other parts of torch: sharded optimizer state, a pipeline, a split sequence,
the buffers of a batch norm.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradaccum

from ..refusing import refused
from .common import (
    WORLD,
    all_windows,
    alone,
    build,
    ddp,
    learn,
    learn_all,
    make_shared,
    micro_batches,
    require_equal,
    sgd,
)
from .jobs import check


def advance(opt: Any, other: Any) -> None:
    """Step both, whose norms are then one."""
    for each in (opt, other):
        each.step()
        each.zero_grad()
    norms = opt.result.grad_norm, other.result.grad_norm
    torch.testing.assert_close(*norms, rtol=1e-12, atol=0, equal_nan=True)


@check
def zero_redundancy_optimizer_is_an_inner_optimizer(rank: int) -> None:
    """Each worker updates its part of the parameters and sends it to the others."""
    # Importing it warns, which is an error where the tests are collected.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = build()
    parallel = ddp(model)
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.SGD,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.1,
    )
    opt = gradaccum.wrap(zero, steps=4, module=parallel, clip_norm=0.05)
    learn_all(parallel, opt, micro_batches(rank))
    require_equal(model, alone(all_windows(), clip_norm=0.05)[0])


def pipeline(part: nn.Module, rank: int, scale_grads: bool) -> Any:
    """A schedule of two chunks, whose loss is divided by them."""
    # Importing it takes a second, in each process of each job.
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(y, target) / 2

    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
    options: dict[str, Any] = {}
    # Older schedules never scale.
    if "scale_grads" in inspect.signature(ScheduleGPipe).parameters:
        options["scale_grads"] = scale_grads
    return ScheduleGPipe(stage, 2, loss_fn=loss_fn, **options)


def step_pipeline(schedule: Any, rank: int, x: Tensor) -> None:
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.roll(1))


def two_stages() -> tuple[nn.Module, nn.Module]:
    """Return an embedding and a head."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    return nn.Embedding(7, 4).double(), head.double()


@check
def stages_have_one_norm(rank: int) -> None:
    """Over two stages: one norm, one clip, one overflow."""
    for options in ({"clip_norm": 0.05}, {"separate_sums": True}):
        stages = two_stages()
        whole = nn.Sequential(*copy.deepcopy(stages))
        part = stages[rank]
        opt = gradaccum.wrap(sgd(part), steps=2, norm_group=dist.group.WORLD, **options)
        reference = gradaccum.wrap(sgd(whole), steps=2, **options)
        schedule = pipeline(part, rank, scale_grads=False)
        for index, x in enumerate(torch.arange(48).reshape(6, 8) * 5 % 7):
            factor = math.inf if index == 2 else 1.0  # One stage alone overflows.
            hooks = [
                head[0].weight.register_hook(lambda grad, factor=factor: grad * factor)
                for head in (stages[1], whole[1])
            ]
            step_pipeline(schedule, rank, x)
            reference.backward(cross_entropy(whole(x), x.roll(1)))
            advance(opt, reference)
            for hook in hooks:
                hook.remove()
            assert opt.result[:3] == reference.result[:3]
        require_equal(part, whole[rank])
        assert opt.result.optimizer_step == 2


@check
def pipeline_schedule_must_not_scale_gradients(rank: int) -> None:
    part = two_stages()[rank]
    schedule = pipeline(part, rank, scale_grads=True)
    opt = gradaccum.wrap(sgd(part), steps=2, norm_group=dist.group.WORLD)
    step_pipeline(schedule, rank, torch.arange(8) % 7)
    if hasattr(schedule, "scale_grads"):
        with refused(gradaccum.UsageError, "scale_grads=False"):
            opt.step()


@check
def buffers_are_sent_at_a_window_s_end(rank: int) -> None:
    """The first worker's, in the step that ends it: a forward pass that waited for the
    others would wait for ever if these flush.
    """
    for option, is_sent in (({}, True), ({"broadcast_buffers": False}, False)):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        parallel = DistributedDataParallel(model, **option)
        opt = gradaccum.wrap(sgd(model), steps=2, module=parallel)
        items = [*micro_batches(0), *micro_batches(1)][: 2 + 4 * rank]
        for x, _ in items:
            opt.backward((parallel(x + rank) - 1).square().mean(), len(x))
            opt.step()
        opt.flush()
        everyone = [None] * WORLD
        dist.all_gather_object(everyone, model[1].running_mean.tolist())
        assert (everyone[0] == everyone[1]) is is_sent, everyone
        with torch.no_grad():  # One worker alone evaluates.
            if rank == 0:
                parallel(items[0][0])


@check
def averages_of_each_micro_batch_need_one_weight(rank: int) -> None:
    """Beside ``separate_sums`` the module reduces by itself, which is right as long as
    all workers have the same weights; with the group these are added up, and may
    differ.
    """
    for group, equal in (("alone", True), (dist.group.WORLD, False)):
        batches = [
            [(x + worker, False) for x, _ in micro_batches(worker * (not equal))]
            for worker in range(WORLD)
        ]
        model = build()
        # The module may be built after the optimizer was wrapped.
        opt = gradaccum.wrap(
            sgd(model), steps=2, separate_sums=True, process_group=group
        )
        parallel = ddp(model)
        for batch in batches[rank][:2]:
            learn(parallel, opt, batch)
        require_equal(model, alone([batches[0][:2] + batches[1][:2]])[0])


@check
def last_micro_batch_of_a_loop_is_no_other(rank: int) -> None:
    """The line of nanoGPT that has a compiled module reduce in the last backward pass
    may stay, also where the other worker flushes meanwhile.
    """
    model, parallel, opt = make_shared()
    called = torch.compile(parallel, backend="eager")
    for index, batch in enumerate(micro_batches(rank)):
        parallel.require_backward_grad_sync = index % 4 == 3 or index == 5
        learn(called, opt, batch)
    opt.flush()
    require_equal(model, alone(all_windows())[0])


def block() -> nn.Module:
    """A part of a transformer, without attention."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    nn.init.normal_(norm.weight)
    layers = nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Linear(8, 11)
    return nn.Sequential(norm, *layers).double()


@check
def tensor_and_sequence_parallel_are_exact(rank: int) -> None:
    """The gradient of a norm whose items are split along the sequence is a part on each
    worker: it is added up before it is measured. Eleven rows are shared unevenly.
    """
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for options in ({"clip_norm": 0.05}, {"on_overflow": "drop_micro_batch"}):
        model, whole = block(), block()
        parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
        opt, other = (
            gradaccum.wrap(torch.optim.Adam(each.parameters()), steps=3, **options)
            for each in (model, whole)
        )
        for index in range(6):
            x = torch.arange(64.0 * (1 + index % 3)).double().reshape(-1, 8, 8).sin()
            outputs = model(x.chunk(WORLD, 1)[rank])
            opt.backward(outputs.square().mean(), weight=len(x))
            other.backward(whole(x).square().mean(), weight=len(x))
            advance(opt, other)
        require_equal(model, whole, off=1e-12)


@check
def context_parallel_tokens_weigh(rank: int) -> None:
    """Each worker has a half of each sequence, whose tokens meet, and weighs its own;
    padding stands at the end, so that the second half has no token in the end.
    """
    mesh = init_device_mesh("cpu", (WORLD,))
    large = nn.Linear(4, 4).double()
    model = copy.deepcopy(large)
    module = DistributedDataParallel(model)
    options = {"steps": 3, "clip_norm": 0.05, "reduction": "sum_per_item"}
    opt = gradaccum.wrap(sgd(model), module=module, **options)
    other = gradaccum.wrap(sgd(large), process_group="alone", **options)
    for index in range(6):
        x = torch.arange(64.0).double().reshape(2, 8, 4).add(index).sin()
        mask = (torch.arange(8) < 8 - index).expand(2, 8).unsqueeze(-1)
        own = module(x.chunk(WORLD, 1)[rank])
        keys = DTensor.from_local(own, mesh, [Shard(1)]).full_tensor(
            grad_placements=[Partial()]
        )
        own_mask = mask.chunk(WORLD, 1)[rank]
        opt.weigh(int(own_mask.sum()))
        ((own * keys.mean(1, keepdim=True)) * own_mask).square().sum().backward()
        outputs = large(x)
        loss = ((outputs * outputs.mean(1, keepdim=True)) * mask).square().sum()
        other.backward(loss, weight=int(mask.sum()))
        advance(opt, other)
    require_equal(model, large)
