"""`torch.distributed.checkpoint` of an open window: by the same workers bitwise, by others with the same sum and weight."""

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
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_shards.common import (
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

OPEN = [Way("micro_batch", (2,)), Way("window", (2,)), Way("window", (2, 1))]


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
def same_workers_resume_bitwise(rank: int) -> None:
    for way in OPEN:
        for options in ({}, {"reduction": "sum"}, {"loss_scale": 64.0}):
            with folder(rank) as path:
                model, opt = open_window(way, rank, **options)
                save(model, opt, path)
                again = sharded(way)
                twin = gradaccum.wrap(adam(again), steps=3, module=again, gradient_sync=way.sync, **options)
                twin.expect_open_window()
                load(again, twin, path)
                assert twin.result.micro_step == 2
                for one, wrapped in ((model, opt), (again, twin)):
                    for batch in batches(rank, 9)[5:]:
                        learn(one, wrapped, batch)
                assert opt.result == twin.result
                assert opt.result.optimizer_step == 3
                assert all(map(torch.equal, numbers(model), numbers(again)))


@check
def saving_changes_nothing(rank: int) -> None:
    """In the first window torch would give the inner optimizer a state, which is not that of no step at all."""
    reference = build()
    other = gradaccum.wrap(adam(reference), steps=None)
    for batch in windows_of((3,))[0]:
        learn(reference, other, batch)
    other.flush()
    for way in OPEN:
        model, opt = open_window(way, rank, count=2)
        with folder(rank) as path:
            save(model, opt, path)
            assert not opt.optimizer.state
            again = sharded(way)
            twin = gradaccum.wrap(adam(again), steps=3, module=again, gradient_sync=way.sync)
            twin.expect_open_window()
            load(again, twin, path)
        for one, wrapped in ((model, opt), (again, twin)):
            learn(one, wrapped, batches(rank)[2])
            require_equal(one, reference, off=1e-12)


@check
def one_worker_goes_on_for_two(rank: int) -> None:
    """Its third micro-batch is that of both; the branches that had no gradient have none."""
    rest = [worker_batches[5] for worker_batches in (batches(0), batches(1))]
    x = torch.cat([x for x, _ in rest])
    for way in OPEN:
        with folder(rank) as path:
            model, opt = open_window(way, rank)
            save(model, opt, path)
            single = build()
            twin = gradaccum.wrap(adam(single), steps=3)
            twin.expect_open_window()
            load(single, twin, path, no_dist=True)
            learn(single, twin, (x, False))
            pair = sharded(way)
            both = gradaccum.wrap(adam(pair), steps=3, module=pair, gradient_sync=way.sync)
            both.expect_open_window()
            load(pair, both, path)
            learn(pair, both, (x.tensor_split(2)[rank], False))
            assert twin.result.optimizer_step == both.result.optimizer_step == 2
            require_equal(pair, single, off=1e-12)
            require_equal(single, reference(x), off=1e-12)


def reference(x: torch.Tensor) -> nn.Module:
    """One process that has all micro-batches from the beginning."""
    model = build()
    opt = gradaccum.wrap(adam(model), steps=None)
    for window in ([batches(r)[:3] for r in range(2)], [[*batches(r)[3:5]] for r in range(2)]):
        for batch in [batch for worker in window for batch in worker]:
            learn(model, opt, batch)
        if opt.result.optimizer_step == 0:
            opt.flush()
    learn(model, opt, (x, False))
    opt.flush()
    return model


@check
def two_workers_go_on_for_one(rank: int) -> None:
    first, second, third = windows_of((1, 1, 1), workers=1)
    for way in OPEN:
        with folder(rank) as path:
            single = build()
            opt = gradaccum.wrap(adam(single), steps=3)
            for batch in (*first, *second):
                learn(single, opt, batch)
            if rank == 0:
                save(single, opt, path, no_dist=True)
            dist.barrier()
            model = sharded(way)
            twin = gradaccum.wrap(adam(model), steps=3, module=model, gradient_sync=way.sync)
            twin.expect_open_window()
            load(model, twin, path)
            x, _ = third[0]
            learn(model, twin, (x.tensor_split(2)[rank], False))
            learn(single, opt, third[0])
            assert opt.result.applied
            require_equal(model, single, off=1e-12)


@check
def whole_tensors_in_memory(rank: int) -> None:
    model, opt = open_window(OPEN[0], rank)
    options = StateDictOptions(full_state_dict=True)
    model_state, state = copy.deepcopy(get_state_dict(model, opt, options=options))
    again = sharded(OPEN[0])
    twin = gradaccum.wrap(adam(again), steps=3)
    twin.expect_open_window()
    set_state_dict(again, twin, model_state_dict=model_state, optim_state_dict=state, options=options)
    for one, wrapped in ((model, opt), (again, twin)):
        learn(one, wrapped, batches(rank)[5])
    assert opt.result == twin.result
    assert all(map(torch.equal, numbers(model), numbers(again)))


def frozen(model: Branches) -> Branches:
    """Between two windows torch cannot load the state of a parameter that never had a gradient."""
    model.never.requires_grad_(False)
    return model


@check
def window_without_room_is_refused(rank: int) -> None:
    with folder(rank) as path:
        model, opt = open_window(OPEN[0], rank)
        save(model, opt, path)
        again = sharded(OPEN[0])
        twin = gradaccum.wrap(adam(again), steps=3)
        with refused(gradaccum.CheckpointError, "opt.expect_open_window()"):
            load(again, twin, path)
        twin.expect_open_window()
        load(again, twin, path)
        assert twin.result.micro_step == 2
    model, again = (frozen(sharded(OPEN[0])) for _ in range(2))
    opt, twin = (gradaccum.wrap(adam(each), steps=3) for each in (model, again))
    with folder(rank) as path:
        train(model, opt, rank, 3)
        save(model, opt, path)
        load(again, twin, path)
        assert twin.result.micro_step == 0
        assert all(map(torch.equal, numbers(model), numbers(again)))


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
