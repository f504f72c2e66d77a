"""A user's loop around a window that FSDP2 keeps: end it early, forget it, clear it, fail in it, let the optimizer go."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_shards.common import (
    DTYPE,
    WAYS,
    Batch,
    Branches,
    Way,
    alone,
    batches,
    check,
    learn,
    require_equal,
    sgd,
    sharded,
    train,
    windows_of,
    wrap,
)
from gradaccum_torch.private import units_of


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
    """A weight whose gradient comes in the same memory each time, as from the replay of a CUDA graph."""

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
        model.usual.forward = lambda x, layer=model.usual, memory=memory: functional.linear(
            x, Static.apply(layer.weight, memory), layer.bias
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
    """Its backward pass is that of all workers, and adds nothing, no NaN either: in a window's first, last and only micro-batch."""
    for steps, empty in ((2, 0), (2, 1), (1, 0)):
        everyone = [batches(worker, steps) for worker in range(2)]
        reference, _ = alone([[batch for index, batch in enumerate(everyone[0] + everyone[1]) if index != steps + empty]])
        for _, model, opt in each_way(steps=steps):
            for index, (x, rare) in enumerate(everyone[rank]):
                out = model(x, rare)
                off = rank == 1 and index == empty
                opt.backward(out.sum() * math.nan if off else out.square().mean(1).mean(), weight=0 if off else len(x))
                opt.step()
                opt.zero_grad()
            assert opt.result.applied
            require_equal(model, reference)


@check
def weight_of_zero_takes_a_branch(rank: int) -> None:
    """A branch that only a micro-batch of weight 0 took has no gradient where FSDP2 waits, whoever else is in the window."""
    for everywhere, first in itertools.product((False, True), (False, True)):
        for _, model, opt in ((way, *each) for way, *each in each_way(steps=3) if way.sync != "micro_batch"):
            for index, (x, _) in enumerate(batches(rank, 3)):
                off = index == (0 if first else 2) and (everywhere or rank == 1)
                opt.backward(model(x, off).square().mean(1).mean(), weight=0 if off else len(x))
                opt.step()
            own = [(batches(worker, 3), everywhere or worker == 1) for worker in range(2)]
            left = [(x, False) for each, off in own for index, (x, _) in enumerate(each) if not off or index != (0 if first else 2)]
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
            hook = opt.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
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
    assert not any(module._forward_hooks and "look" in str(module._forward_hooks) for module in model.modules())


@check
def user_s_own_switches(rank: int) -> None:
    """FSDP2's idiom of the last micro-batch: harmless beside `gradient_sync`, refused without it where a window would lose gradients."""
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
    with refused(gradaccum.UsageError, "set_requires_gradient_sync", 'gradient_sync="window"'):
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
