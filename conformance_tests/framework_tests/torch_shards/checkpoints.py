"""`torch.distributed.checkpoint` between two windows, by the same workers and by others; an open window in each worker's own file."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_shards.common import (
    WAYS,
    Branches,
    Way,
    batches,
    build,
    check,
    learn,
    numbers,
    require_equal,
    sharded,
    train,
    windows_of,
)

OPEN = [way for way in (Way("micro_batch", (2,)), Way("window", (2,)), Way("all_reduce_per_window", (2, 1))) if way in WAYS]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@contextmanager
def folder(rank: int) -> Iterator[str]:
    """One for all workers."""
    name = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(name)
    yield name[0]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(name[0])


def save(model: nn.Module, opt: Any, path: str, **options: Any) -> None:
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True)), checkpoint_id=path, **options)


def load(model: nn.Module, opt: Any, path: str, **options: Any) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def open_window(way: Way, rank: int, count: int = 5, **options: Any) -> tuple[nn.Module, Any]:
    """A window of three, after two micro-batches of unequal sizes; the second window unless `count` is 2."""
    model = sharded(way)
    opt = gradaccum.wrap(adam(model), steps=3, module=model, gradient_sync=way.sync, **options)
    train(model, opt, rank, count)
    assert opt.result.micro_step == 2
    return model, opt


@check
def open_window_is_refused(rank: int) -> None:
    for way in OPEN:
        model, opt = open_window(way, rank)
        with refused(gradaccum.UsageError, "between two windows", "opt.state_dict()"):
            get_state_dict(model, opt)
        learn(model, opt, batches(rank)[5])
        require_equal(model, reference(2), off=1e-12)


def reference(windows: int) -> nn.Module:
    """One process that has all micro-batches from the beginning."""
    model = build()
    opt = gradaccum.wrap(adam(model), steps=None)
    for window in windows_of((3,) * windows):
        for batch in window:
            learn(model, opt, batch)
        opt.flush()
    return model


def frozen(model: Branches) -> Branches:
    """The state of a parameter that never had a gradient cannot be loaded by torch."""
    model.never.requires_grad_(False)
    return model


@check
def other_workers_resume(rank: int) -> None:
    """Two workers, one, and two again: between two windows the state is that of all."""
    for way in OPEN:
        with folder(rank) as path:
            model = frozen(sharded(way))
            opt = gradaccum.wrap(adam(model), steps=3, module=model, gradient_sync=way.sync, loss_scale=64.0)
            train(model, opt, rank, 3)
            save(model, opt, path)
            single = frozen(build())
            twin = gradaccum.wrap(adam(single), steps=None, loss_scale=64.0)
            load(single, twin, path, no_dist=True)
            assert twin.result.optimizer_step == 1
            for batch in windows_of((3, 3))[1]:
                learn(single, twin, batch)
            twin.flush()
            again = frozen(sharded(way))
            other = gradaccum.wrap(adam(again), steps=3, module=again, gradient_sync=way.sync, loss_scale=64.0)
            load(again, other, path)
            for each, wrapped in ((model, opt), (again, other)):
                for batch in batches(rank, 6)[3:]:
                    learn(each, wrapped, batch)
            assert opt.result == other.result
            assert all(map(torch.equal, numbers(model), numbers(again)))
            for each in (single, model):
                require_equal(each, reference(2), off=1e-12)


@check
def each_worker_s_own_file(rank: int) -> None:
    """``opt.state_dict()`` holds this worker's parts and weight."""
    for way in OPEN:
        model, opt = open_window(way, rank)
        with tempfile.TemporaryDirectory() as own:
            torch.save((model.state_dict(), opt.state_dict()), f"{own}/state.pt")
            model_state, state = torch.load(f"{own}/state.pt", weights_only=False)
        other = copy.deepcopy(state)
        other["gradaccum"]["worker"] = [1 - rank, 2]
        again = sharded(way)
        twin = gradaccum.wrap(adam(again), steps=3, module=again, gradient_sync=way.sync)
        again.load_state_dict(model_state)
        with refused(gradaccum.CheckpointError, f"rank {rank} of 2"):
            twin.load_state_dict(other)
        twin.load_state_dict(state)
        for one, wrapped in ((model, opt), (again, twin)):
            learn(one, wrapped, batches(rank)[5])
        assert opt.result == twin.result
        assert all(map(torch.equal, numbers(model), numbers(again)))
