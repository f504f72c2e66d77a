"""The loops that FSDP users write, and their checkpoints."""

from __future__ import annotations

import gc
import math
import tempfile

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import gradaccum
from gradaccum_torch.torch_private.fsdp import units_of

from ..refusing import refused
from .common import (
    DTYPE,
    FLAT,
    WAYS,
    WINDOW,
    Branches,
    alone,
    batches,
    check,
    each_way,
    learn,
    require_equal,
    require_first_window,
    sgd,
    sharded,
    train,
    windows_of,
    wrap,
)


def is_waiting(model: Branches) -> bool:
    """True if FSDP2 holds gradients that it has not reduced."""
    return any(unit.has_unreduced() for unit in units_of(model))


def in_static_memory(model: Branches) -> None:
    """A gradient comes in the same memory each time, as from the replay of a CUDA
    graph.
    """
    layer = model.usual
    memory = torch.zeros(5, 6, dtype=DTYPE)

    def forward(x: Tensor) -> Tensor:
        weight = layer.weight.view_as(layer.weight)
        weight.register_hook(memory.copy_)
        return functional.linear(x, weight, layer.bias)

    layer.forward = forward


@check
def short_and_open_windows(rank: int) -> None:
    for _, model, opt in each_way(steps=4):
        in_static_memory(model)
        train(model, opt, rank, 5)
        opt.flush()
        require_equal(model, alone(windows_of(4, 1))[0])
    for _, model, opt in each_way(steps=None):
        train(model, opt, rank, 3)
        opt.flush()
        opt.flush()
        assert opt.result.optimizer_step == 1
        require_equal(model, alone(windows_of(3))[0])


@check
def weight_of_zero_on_one_worker(rank: int) -> None:
    """Its backward pass is that of all workers, and adds nothing, no NaN either: in a
    window's first, last and only micro-batch.
    """
    for steps, empty in ((2, 0), (2, 1), (1, 0)):
        everyone = [batches(worker, steps) for worker in range(2)]
        counted = everyone[0] + everyone[1]
        del counted[steps + empty]
        reference, _ = alone([counted])
        for _, model, opt in each_way(steps=steps):
            model.never.requires_grad_(False)
            for index, (x, rare) in enumerate(everyone[rank]):
                off = rank == 1 and index == empty
                out = model(x, rare)
                loss = (out - (math.nan if off else 1)).square().mean()
                opt.backward(loss, weight=0 if off else len(x))
                opt.step()
                opt.zero_grad()
            assert opt.result.applied
            require_equal(model, reference)


@check
def backward_pass_that_raises(rank: int) -> None:
    def fail(_: Tensor) -> None:
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
        require_first_window(model, opt, rank)


@check
def freed_wrapper_lets_fsdp_reduce(rank: int) -> None:
    model = sharded(WINDOW)
    opt = wrap(model, WINDOW)
    train(model, opt, rank, 1)
    assert is_waiting(model)
    opt.discard()
    del opt
    gc.collect()
    model(batches(rank)[0][0]).sum().backward()
    assert not is_waiting(model)


@check
def user_s_own_switches(rank: int) -> None:
    """FSDP2's idiom of the last micro-batch: harmless, but refused where a window would
    lose gradients.
    """
    model = sharded(WINDOW)
    opt = gradaccum.wrap(sgd(model), 3)
    for index, batch in enumerate(batches(rank, 6)):
        model.set_requires_gradient_sync(index % 3 == 2)
        learn(model, opt, batch)
    require_equal(model, alone(windows_of(3, 3))[0])
    model.set_requires_gradient_sync(False)
    learn(model, opt, batches(rank)[0])
    with refused(
        gradaccum.UsageError, "set_requires_gradient_sync", 'gradient_sync="window"'
    ):
        opt.flush()
    opt.discard()
    assert not is_waiting(model)


@check
def each_worker_s_own_file(rank: int) -> None:
    """``opt.state_dict()`` holds this worker's parts and weight, in mid-window."""
    for way in (FLAT, WINDOW, WAYS[-1]):
        runs = []
        for _ in range(2):
            model = sharded(way)
            # torch cannot load the state of a parameter that never had a gradient.
            model.never.requires_grad_(False)
            runs.append((model, wrap(model, way, loss_scale=64.0)))
        (model, opt), (again, other) = runs
        train(model, opt, rank, 5)
        with tempfile.TemporaryDirectory() as own:
            torch.save((model.state_dict(), opt.state_dict()), f"{own}/state.pt")
            model_state, state = torch.load(f"{own}/state.pt", weights_only=False)
        again.load_state_dict(model_state)
        other.load_state_dict(state)
        for each, wrapped in runs:
            train(each, wrapped, rank, 6, first=5)
        assert opt.result == other.result
        require_equal(model, again, off=0)
