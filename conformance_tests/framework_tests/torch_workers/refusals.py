"""Refusals that every worker raises, and saved windows that resume."""

from __future__ import annotations

import datetime
import gc
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_torch import window

from ..refusing import refused
from .common import (
    WORLD,
    all_windows,
    alone,
    build,
    ddp,
    learn,
    make_shared,
    micro_batches,
    numbers,
    require_equal,
    require_same_everywhere,
    sgd,
)
from .jobs import check


def wrap(model: nn.Module, **options: Any) -> Any:
    return gradaccum.wrap(sgd(model), **{"steps": 4, **options})


NOT_WRAPPED = [
    (lambda _: wrap(build(), module=build()), ArgumentTypeError, ("module",)),
    (
        lambda _: wrap(build(), module=ddp(build())),
        ArgumentValueError,
        ("8 of these parameters",),
    ),
    (
        lambda rank: wrap(parallel := ddp(build()), module=parallel, steps=4 + rank),
        ArgumentValueError,
        ("options", "on rank 1"),
    ),
    (
        lambda rank: wrap(nn.Linear(4, 2 + rank), process_group=dist.group.WORLD),
        ArgumentValueError,
        ("optimizer", "(3, 4)", "on rank 1"),
    ),
]


@check
def what_cannot_be_wrapped_is_refused(rank: int) -> None:
    for call, kind, words in NOT_WRAPPED:
        with refused(kind, *words):
            call(rank)


@check
def plain_loop_without_the_module_names_it(rank: int) -> None:
    model = build()
    parallel = ddp(model)
    opt = wrap(model)
    parallel(micro_batches(rank)[0][0]).square().mean().backward()
    with refused(UsageError, "module="):
        opt.step()


@check
def what_a_window_cannot_do_is_refused(rank: int) -> None:
    """The window stays as it is: its denominator would be that of one worker. A window
    whose norm failed has been reduced, and is not reduced again.
    """
    model, parallel, opt = make_shared(steps=None, reduction="sum")
    for way_out in (opt.discard, opt.flush):
        for batch in micro_batches(rank)[:4]:
            learn(parallel, opt, batch)
        with refused(UsageError, "denominator", "several workers"):
            opt.flush(denominator=3.0 + rank)
        failing = mock.patch.object(window, "measure", side_effect=ZeroDivisionError)
        with failing, refused(ZeroDivisionError):
            opt.flush()
        with refused(UsageError, "flush()"):
            opt.step()
        way_out()
    require_equal(model, alone(all_windows()[:1], reduction="sum")[0])


@check
def missing_worker_ends_in_an_error(rank: int) -> None:
    """In a group of its own, which is unusable after it."""
    model = build()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    parallel = DistributedDataParallel(
        model, find_unused_parameters=True, process_group=group
    )
    opt = wrap(model, steps=2, module=parallel)
    batches = micro_batches(rank)
    learn(parallel, opt, batches[0])
    if rank == 0:
        with refused(UsageError, "rank 0", "2 micro-batches", "flush()"):
            learn(parallel, opt, batches[1])


@check
def window_of_another_worker_is_refused(rank: int) -> None:
    """A job that saves on its first worker only would double that one's sum."""
    model, parallel, opt = make_shared()
    learn(parallel, opt, micro_batches(rank)[0])
    saved = [None] * WORLD
    dist.all_gather_object(saved, opt.state_dict())
    words = f"rank {rank} of 2", f"rank {1 - rank} of 2", "redistributed"
    with refused(gradaccum.CheckpointError, *words):
        opt.load_state_dict(saved[1 - rank])
    opt.load_state_dict(saved[rank])
    opt.flush()
    require_equal(model, alone([[micro_batches(0)[0], micro_batches(1)[0]]])[0])


def averages(parallel: DistributedDataParallel, rank: int) -> bool:
    """True if a plain backward pass of the module averages over the workers."""
    weight = next(parallel.parameters())
    x = micro_batches(0)[0][0]
    (once,) = torch.autograd.grad(parallel.module(x).sum(), weight)
    parallel.zero_grad()
    parallel(x).sum().mul(1.0 + rank).backward()
    reduced = weight.grad.clone()
    parallel.zero_grad()
    return torch.allclose(reduced, once * 1.5, rtol=1e-12)


@check
def module_reduces_again_without_its_wrapper(rank: int) -> None:
    """Once the last of its wrappers is gone, and after a wrap that was refused."""
    model = build()
    parallel = ddp(model)
    with refused(gradaccum.GradAccumError):
        wrap(model, module=parallel, accumulate_dtype="int32")
    assert averages(parallel, rank)
    first, second = (wrap(model.first, module=parallel) for _ in range(2))
    del first
    gc.collect()
    assert not averages(parallel, rank), "the second one still waits"
    del second
    gc.collect()
    assert averages(parallel, rank)


@check
def ignored_parameters_need_an_optimizer_of_their_own(rank: int) -> None:
    model = build()
    names = ["usual.weight", "usual.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    parallel = ddp(model)
    with refused(ArgumentValueError, "lacks or ignores 2 of these"):
        wrap(model, module=parallel)
    model.usual.requires_grad_(False)
    wrap(model, module=parallel)
    model.usual.requires_grad_(True)
    body = wrap(model.first, module=parallel)
    head = wrap(model.usual, steps=1, process_group="alone")
    learn(parallel, head, micro_batches(rank)[0])
    assert head.result.applied
    body.discard()


@check
def each_optimizer_of_a_module_names_it(rank: int) -> None:
    """A module that waits reduces nothing for an optimizer that does not know it."""
    model, x = build(), micro_batches(rank)[0][0]
    parallel = ddp(model)
    bare = sgd(model.usual)
    early = wrap(model.usual, steps=1, process_group="alone")
    body = wrap(model.first, steps=1, module=parallel)
    before = numbers(model)
    for opt in (bare, early):
        parallel(x).square().mean().backward()
        with refused(UsageError, "module=parallel", "2 of these parameters"):
            opt.step()
        model.zero_grad()
    assert numbers(model) == before
    early.discard()
    body.discard()
    del early, bare, opt
    gc.collect()
    head = wrap(model.usual, steps=1, module=parallel)
    parallel(x).square().mean().backward()
    for opt in (body, head):
        opt.step()
        assert opt.result.applied
    require_same_everywhere(numbers(model))
