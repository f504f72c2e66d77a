"""Beside other parts of torch: a scaler, sharded optimizer state, a pipeline, the buffers of a batch norm."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import (
    WORLD,
    all_windows,
    alone,
    build,
    learn,
    micro_batches,
    numbers,
    require_equal,
    require_same_everywhere,
    sgd,
)


@check
def grad_scaler_moves_once_per_window(rank: int) -> None:
    model = build(torch.float32)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel, loss_scale=scaler)
    for index, (x, y, rare) in enumerate([*micro_batches(rank, torch.float32)[:2]] * 2):
        bad = math.inf if rank == 1 and index == 2 else 1
        scaler.scale((parallel(x * bad, rare) - y).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert scaler.get_scale() == 8.0, "doubled after the first window, halved after the second"
    require_same_everywhere((numbers(model), scaler.state_dict(), opt.result))


@check
def zero_redundancy_optimizer_is_an_inner_optimizer(rank: int) -> None:
    """Each worker updates its part of the parameters and sends it to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # Importing it warns, which is an error where the tests are collected.

    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)
    opt = gradaccum.wrap(zero, steps=4, module=parallel, clip_norm=0.05)
    for batch in micro_batches(rank):
        learn(parallel, opt, batch)
    opt.flush()
    require_equal(model, alone(all_windows(), clip_norm=0.05)[0])
    require_same_everywhere(opt.result)


@check
def pipeline_schedule_must_not_scale_gradients(rank: int) -> None:
    """One schedule step of two chunks is a micro-batch, if it leaves its gradients alone and the loss is divided by the chunks."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # Importing it takes a second, in each process of each job.

    for scale_grads in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        whole = copy.deepcopy(layers)
        stage = PipelineStage(layers[rank], rank, WORLD, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean() / 2, scale_grads=scale_grads)
        opt = gradaccum.wrap(sgd(layers[rank]), steps=2)
        reference = gradaccum.wrap(sgd(whole), steps=2)
        for x in torch.arange(64.0).double().reshape(2, 8, 4).sin():
            schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
            if scale_grads:
                with refused(gradaccum.UsageError, "scale_grads=False"):
                    opt.step()
                break
            opt.step()
            opt.zero_grad()
            (whole(x) - x).square().mean().backward()
            reference.step()
            reference.zero_grad()
        else:
            require_equal(layers[rank], whole[rank])


@check
def buffers_follow_the_first_worker(rank: int) -> None:
    """DistributedDataParallel sends them with the first forward pass after an update."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    parallel = DistributedDataParallel(model)
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel)
    for x, _, _ in micro_batches(rank, torch.float32)[:2]:
        parallel(x).square().mean().backward()
        opt.step()
    seen: list[list[float]] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append(model[1].running_mean.tolist()))
    parallel(micro_batches(rank, torch.float32)[2][0])
    require_same_everywhere(seen)


@check
def last_micro_batch_of_a_loop_is_no_other(rank: int) -> None:
    """The line of nanoGPT that has DDP reduce in the last backward pass may stay, also where the other worker flushes meanwhile."""
    for compiled in (False, True):
        model = build()
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
        called = torch.compile(parallel, backend="eager") if compiled else parallel
        for index, batch in enumerate(micro_batches(rank)):
            parallel.require_backward_grad_sync = index % 4 == 3 or index == 5
            learn(called, opt, batch)
        opt.flush()
        require_equal(model, alone(all_windows())[0])
