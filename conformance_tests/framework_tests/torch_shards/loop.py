"""The loops that FSDP users write, and their checkpoints."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum_torch.torch_private.fsdp import units_of

from .common import (
    DTYPE,
    WAYS,
    Batch,
    Branches,
    Way,
    alone,
    batches,
    build,
    check,
    learn,
    numbers,
    require_equal,
    sgd,
    sharded,
    train,
    windows_of,
    wrap,
)


def each_way(**options: Any) -> Iterator[tuple[Way, Branches, Any]]:
    for way in WAYS:
        model = sharded(way)
        yield way, model, wrap(model, way, **options)


@check
def short_and_open_windows(rank: int) -> None:
    for _, model, opt in each_way(steps=4):
        train(model, opt, rank, 5)
        opt.flush()
        require_equal(model, alone(windows_of((4, 1)))[0])
    for _, model, opt in each_way(steps=None):
        for batch in batches(rank, 3):
            learn(model, opt, batch)
        opt.flush()
        opt.flush()
        assert opt.result.optimizer_step == 1
        require_equal(model, alone(windows_of((3,)))[0])
    for _, model, opt in each_way(steps=lambda optimizer_step: 3):
        train(model, opt, rank, 3)
        require_equal(model, alone(windows_of((3,)))[0])


def lost(model: Branches, opt: Any, batch: Batch) -> Tensor:
    x, rare = batch
    loss: Tensor = opt.backward(model(x, rare).square().mean(), len(x))
    return loss


@check
def closures(rank: int) -> None:
    for _, model, opt in each_way(steps=3):
        for batch in batches(rank):
            opt.step(functools.partial(lost, model, opt, batch))
        require_equal(model, alone(windows_of())[0])


@check
def discarded_window_leaves_nothing(rank: int) -> None:
    for _, model, opt in each_way():
        train(model, opt, rank, 2)
        opt.discard()
        assert not any(unit.held() for unit in units_of(model))
        train(model, opt, rank, 3)
        require_equal(model, alone(windows_of((3,)))[0])


class Static(torch.autograd.Function):
    """A weight whose gradient comes in the same memory each time, as from the replay of
    a CUDA graph.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, memory: Tensor) -> Tensor:
        ctx.memory = memory
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        ctx.memory.data.copy_(upstream[0])
        return ctx.memory.detach(), None


@check
def gradients_in_memory_of_others(rank: int) -> None:
    for _, model, opt in each_way():
        memory = torch.zeros(5, 6, dtype=DTYPE)
        model.usual.forward = lambda x, layer=model.usual, memory=memory: (
            functional.linear(x, Static.apply(layer.weight, memory), layer.bias)
        )
        train(model, opt, rank)
        require_equal(model, alone(windows_of())[0])


@check
def weight_of_zero_ends_a_window(rank: int) -> None:
    """The last micro-batch has no backward pass, in which FSDP2 could reduce."""
    for _, model, opt in each_way():
        train(model, opt, rank, 2)
        opt.backward(model(batches(rank)[0][0]).sum() * math.nan, weight=0)
        opt.step()
        assert opt.result.applied
        require_equal(model, alone(windows_of((2,)))[0])
        with refused(gradaccum.UsageError, "loss", "without a graph", "weight=0"):
            opt.backward(torch.zeros(()), weight=0)


@check
def weight_of_zero_on_one_worker(rank: int) -> None:
    """Its backward pass is that of all workers, and adds nothing, no NaN either: in a
    window's first, last and only micro-batch.
    """
    for steps, empty in ((2, 0), (2, 1), (1, 0)):
        everyone = [batches(worker, steps) for worker in range(2)]
        reference, _ = alone(
            [
                [
                    batch
                    for index, batch in enumerate(everyone[0] + everyone[1])
                    if index != steps + empty
                ]
            ]
        )
        for _, model, opt in each_way(steps=steps):
            for index, (x, rare) in enumerate(everyone[rank]):
                out = model(x, rare)
                off = rank == 1 and index == empty
                opt.backward(
                    out.sum() * math.nan if off else out.square().mean(1).mean(),
                    weight=0 if off else len(x),
                )
                opt.step()
                opt.zero_grad()
            assert opt.result.applied
            require_equal(model, reference)


@check
def weight_of_zero_takes_a_branch(rank: int) -> None:
    """A branch that only a micro-batch of weight 0 took has no gradient where FSDP2
    waits, whoever else is in the window.
    """
    for everywhere, first in itertools.product((False, True), (False, True)):
        for _, model, opt in (
            (way, *each)
            for way, *each in each_way(steps=3)
            if way.sync != "micro_batch"
        ):
            for index, (x, _) in enumerate(batches(rank, 3)):
                off = index == (0 if first else 2) and (everywhere or rank == 1)
                opt.backward(
                    model(x, off).square().mean(1).mean(), weight=0 if off else len(x)
                )
                opt.step()
            own = [
                (batches(worker, 3), everywhere or worker == 1) for worker in range(2)
            ]
            left = [
                (x, False)
                for each, off in own
                for index, (x, _) in enumerate(each)
                if not off or index != (0 if first else 2)
            ]
            require_equal(model, alone([left])[0])


@check
def calls_between_backward_and_step(rank: int) -> None:
    for _, model, opt in each_way():
        model(batches(rank)[0][0]).square().mean().backward()
        opt.zero_grad()
        assert not any(unit.held() for unit in units_of(model))
        opt.step()
        for batch in batches(rank, 1):
            learn(model, opt, batch)
        model(batches(rank)[0][0]).square().mean().backward()
        for call in (opt.flush, opt.zero_grad, opt.state_dict):
            with refused(gradaccum.UsageError, "between backward() and step()"):
                call()
        opt.discard()
        train(model, opt, rank, 3)
        require_equal(model, alone(windows_of((3,)))[0])


@check
def backward_pass_that_raises(rank: int) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    if not hasattr(FSDPModule, "reset_iter_state"):
        return  # FSDP2 of an older torch stays in the midst of its pass.
    for _, model, opt in each_way():
        train(model, opt, rank, 1)
        out = model(batches(rank)[0][0])
        handle = out.grad_fn.next_functions[0][0].register_prehook(fail)
        with refused(ZeroDivisionError):
            out.square().mean().backward()
        handle.remove()
        model.reset_iter_state()
        opt.discard()
        train(model, opt, rank, 3)
        require_equal(model, alone(windows_of((3,)))[0])


@check
def failed_update_is_made_once(rank: int) -> None:
    """Not "mean" alone: twice the sum over twice the weight would be the same."""
    for reduction in ("mean", "sum"):
        for _, model, opt in each_way(reduction=reduction):
            hook = opt.register_step_pre_hook(
                lambda *_: (_ for _ in ()).throw(ZeroDivisionError)
            )
            with refused(ZeroDivisionError):
                train(model, opt, rank, 3)
            hook.remove()
            if reduction == "sum":
                for call in (opt.state_dict, opt.step):
                    with refused(gradaccum.UsageError, "flush()"):
                        call()
            opt.flush()
            require_equal(model, alone(windows_of((3,)), reduction=reduction)[0])


@check
def found_settings_come_back(rank: int) -> None:
    way = Way("window", (2,))
    model = sharded(way)
    model.set_requires_all_reduce(False)
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        model.first.set_reduce_scatter_unused_params(True)
    found = [unit.sync for unit in units_of(model)]
    opt = wrap(model, way)
    again = wrap(model, way)
    train(model, again, rank, 1)
    assert not any(unit.sync.reduce for unit in units_of(model))
    again.discard()
    del opt, again
    gc.collect()
    assert [unit.sync for unit in units_of(model)] == found
    assert not any(
        module._forward_hooks and "look" in str(module._forward_hooks)
        for module in model.modules()
    )


@check
def user_s_own_switches(rank: int) -> None:
    """FSDP2's idiom of the last micro-batch: harmless beside `gradient_sync`, refused
    without it where a window would lose gradients.
    """
    way = Way("window", (2,))
    model = sharded(way)
    opt = wrap(model, way)
    for index, batch in enumerate(batches(rank, 6)):
        model.set_requires_gradient_sync(index % 3 == 2)
        learn(model, opt, batch)
    require_equal(model, alone(windows_of())[0])
    model = sharded(way)
    plain = gradaccum.wrap(sgd(model), steps=3)
    for index, batch in enumerate(batches(rank, 6)):
        model.set_requires_gradient_sync(index % 3 == 2)
        learn(model, plain, batch)
    require_equal(model, alone(windows_of())[0])
    model.set_requires_gradient_sync(False)
    learn(model, plain, batches(rank)[0])
    with refused(
        gradaccum.UsageError, "set_requires_gradient_sync", 'gradient_sync="window"'
    ):
        plain.flush()
    plain.discard()
    assert not any(unit.held() for unit in units_of(model))


@check
def sum_that_fsdp_dropped_is_missed(rank: int) -> None:
    way = Way("all_reduce_per_window", (2, 1))
    if way not in WAYS:
        return  # The other ways leave FSDP2 nothing that this call drops.
    model = sharded(way)
    opt = wrap(model, way)
    learn(model, opt, batches(rank)[0])
    model.reset_iter_state()
    with refused(gradaccum.UsageError, "reset_iter_state", "opt.discard()"):
        learn(model, opt, batches(rank)[0])
    opt.discard()
    train(model, opt, rank, 3)
    require_equal(model, alone(windows_of((3,)))[0])


OPEN = [
    way
    for way in (
        Way("micro_batch", (2,)),
        Way("window", (2,)),
        Way("all_reduce_per_window", (2, 1)),
    )
    if way in WAYS
]


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


def state_of(model: nn.Module, opt: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, opt.optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "window": opt.state_dict()["gradaccum"],
    }


def save(model: nn.Module, opt: Any, path: str, **options: Any) -> None:
    dcp.save(state_of(model, opt), checkpoint_id=path, **options)


def load(model: nn.Module, opt: Any, path: str, **options: Any) -> None:
    state = state_of(model, opt)
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(
        model,
        opt.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    opt.load_state_dict({**opt.optimizer.state_dict(), "gradaccum": state["window"]})


def open_window(
    way: Way, rank: int, count: int = 5, **options: Any
) -> tuple[nn.Module, Any]:
    """A window of three, after two micro-batches of unequal sizes; the second window
    unless `count` is 2.
    """
    model = sharded(way)
    opt = gradaccum.wrap(
        adam(model), steps=3, module=model, gradient_sync=way.sync, **options
    )
    train(model, opt, rank, count)
    assert opt.result.micro_step == 2
    return model, opt


@check
def state_of_the_parameters_alone_is_refused(rank: int) -> None:
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
            opt = gradaccum.wrap(
                adam(model),
                steps=3,
                module=model,
                gradient_sync=way.sync,
                loss_scale=64.0,
            )
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
            other = gradaccum.wrap(
                adam(again),
                steps=3,
                module=again,
                gradient_sync=way.sync,
                loss_scale=64.0,
            )
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
        twin = gradaccum.wrap(
            adam(again), steps=3, module=again, gradient_sync=way.sync
        )
        again.load_state_dict(model_state)
        with refused(gradaccum.CheckpointError, f"rank {rank} of 2"):
            twin.load_state_dict(other)
        twin.load_state_dict(state)
        for one, wrapped in ((model, opt), (again, twin)):
            learn(one, wrapped, batches(rank)[5])
        assert opt.result == twin.result
        assert all(map(torch.equal, numbers(model), numbers(again)))
