"""Sums that are reduced under the window's last backward pass are the large batch's,
whatever a worker does in between, and no worker is left waiting.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum_torch.workers import overlap

from .common import (
    WORLD,
    all_windows,
    alone,
    build,
    learn,
    learn_all,
    make_shared,
    micro_batches,
    numbers,
    require_equal,
    require_same_everywhere,
    sgd,
)
from .jobs import check

LARGE = mock.patch.object(overlap, "LARGE_BYTES", 100)
"""With it each weight of the model is a bucket, and the biases are one."""
VOTE, BUCKETS, NUMBERS = 1, 3, 1


@contextmanager
def noted() -> Iterator[list[str]]:
    """Note each reduction that begins, and whether a backward pass is running."""
    calls: list[str] = []
    original = dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        inside = torch._C._current_graph_task_id() != -1
        calls.append("under the pass" if inside else "after it")
        return original(tensor, *args, **kwargs)

    with LARGE, mock.patch.object(dist, "all_reduce", noting):
        yield calls


def usual_batches(rank: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Eight micro-batches on each worker, none of which takes the rare branch."""
    usual = [(x, y, False) for x, y, _ in micro_batches(0, dtype)]
    return [(x + 0.1 * rank, y, rare) for x, y, rare in [*usual, *usual[:2]]]


def windows_of(steps: int, dtype: torch.dtype = torch.float64) -> list[list[Any]]:
    workers = [usual_batches(rank, dtype) for rank in range(WORLD)]
    return [
        [batch for worker in workers for batch in worker[first : first + steps]]
        for first in range(0, len(workers[0]), steps)
    ]


@contextmanager
def last_micro_batch(rank: int) -> Iterator[tuple[Any, Any, Any, list[Any]]]:
    """Windows of two, up to the last micro-batch of the second one."""
    with LARGE:
        model, parallel, opt = make_shared(steps=2)
        batches = usual_batches(rank)
        for batch in batches[:3]:
            learn(parallel, opt, batch)
        yield model, parallel, opt, batches


def require_third_window(
    model: nn.Module, parallel: nn.Module, opt: Any, batches: list[Any]
) -> None:
    """Train the third window; the second one has left nothing."""
    for batch in batches[4:6]:
        learn(parallel, opt, batch)
    windows = windows_of(2)
    require_equal(model, alone([windows[0], windows[2]])[0])


@check
def buckets_are_reduced_under_the_last_pass(rank: int) -> None:
    """From the second window on, when all workers know which gradients there are."""
    _, parallel, opt = make_shared()
    with noted() as calls:
        for batch in usual_batches(rank):
            learn(parallel, opt, batch)
    under = ["under the pass"] * (VOTE + BUCKETS)
    assert calls[-VOTE - BUCKETS - NUMBERS :] == [*under, "after it"]
    assert "under the pass" not in calls[: -VOTE - BUCKETS - NUMBERS]
    hooks = [parameter._backward_hooks for parameter in parallel.parameters()]
    assert not any(hooks), "each would hold a sum"
    require_equal(opt_model(parallel), alone(windows_of(4))[0])


def opt_model(parallel: nn.Module) -> nn.Module:
    return parallel.module  # type: ignore[no-any-return]


@check
def same_bits_as_at_the_end(rank: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for options in ({"steps": 4}, {"steps": 1}, {"steps": 3, "clip_norm": 1e-2}):
            trained = []
            for late in (True, False):
                with noted() as calls:
                    model, parallel, opt = make_shared(build(dtype), **options)
                    if late:
                        opt._window.workers._can_overlap = lambda: False
                    learn_all(parallel, opt, usual_batches(rank, dtype))
                # A window of one micro-batch in half precision adds it in step().
                halves = options["steps"] == 1 and dtype is torch.bfloat16
                assert ("under the pass" in calls) != (late or halves)
                trained.append((numbers(model), opt.result))
            assert trained[0] == trained[1], (dtype, options)


@check
def worker_that_ends_earlier_joins(rank: int) -> None:
    """It flushes, or its last micro-batch has weight 0; one branch is rarely taken."""
    with LARGE:
        model, parallel, opt = make_shared(steps=2)
        learn_all(parallel, opt, micro_batches(rank))
        require_equal(model, alone(all_windows(steps=2))[0])
        model, parallel, opt = make_shared(steps=2)
        for index, (x, y, rare) in enumerate(usual_batches(rank)):
            is_empty = rank == 1 and index % 2 == 1
            loss = (parallel(x, rare) - y).square().mean()
            opt.backward(loss, weight=0 if is_empty else len(x))
            opt.step()
        windows = [[a, b, c] for a, b, c, _ in windows_of(2)]
        require_equal(model, alone(windows)[0])


@check
def several_passes_of_a_micro_batch(rank: int) -> None:
    """By loss.backward(), which says nothing beforehand, and in a recomputed model."""
    with LARGE:
        reference = build()
        model, parallel, opt = make_shared(steps=2, reduction="sum")
        again, recomputed, third = make_shared(steps=2, reduction="sum")
        other = gradaccum.wrap(
            sgd(reference), steps=None, process_group="alone", reduction="sum"
        )
        for window in windows_of(2):
            for x, _, _ in window:
                other.backward(reference(x).square().sum() + reference(x).sum())
                other.step()
            other.flush()
        for x, _, _ in usual_batches(rank):
            parallel(x).square().sum().backward()
            parallel(x).sum().backward()
            opt.step()
            x = x.requires_grad_()
            squares = checkpoint(recomputed.module, x, use_reentrant=True)
            sums = checkpoint(recomputed.module, x, use_reentrant=True)
            (squares.square().sum() + sums.sum()).backward()
            third.step()
    # A summed loss makes large parameters, and rounds by as much.
    require_equal(model, reference, off=1e-12)
    require_equal(again, reference, off=1e-12)


@check
def changed_gradients_are_noticed(rank: int) -> None:
    """Between the last backward pass and step()."""
    with last_micro_batch(rank) as (model, parallel, opt, batches):
        x, y, rare = batches[3]
        opt.backward((parallel(x, rare) - y).square().mean(), len(x))
        assert model.first.weight.grad is not None
        for call in (opt.zero_grad, opt.state_dict, opt.flush):
            with refused(gradaccum.UsageError, "between backward() and step()"):
                call()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with refused(gradaccum.UsageError, "clip_norm"):
            opt.step()
        opt.discard()
        require_third_window(model, parallel, opt, batches)


@check
def discarding_worker_is_reported(rank: int) -> None:
    """Also one whose backward pass raises; all go on after opt.discard()."""
    for raises in (False, True):
        with last_micro_batch(rank) as (model, parallel, opt, batches):
            x, y, rare = batches[3]
            loss = (parallel(x, rare) - y).square().mean()
            if rank == 1 and raises:
                handle = model.first.bias.register_hook(lambda gradient: 1 / 0)
                with refused(ZeroDivisionError):
                    opt.backward(loss, len(x))
                handle.remove()
                with refused(gradaccum.UsageError, "discard()"):
                    opt.step()
            else:
                opt.backward(loss, len(x))
            if rank == 0:
                with refused(gradaccum.UsageError, "called discard()"):
                    opt.step()
                with refused(gradaccum.UsageError, "discard()"):
                    opt.step()
            opt.discard()
            require_third_window(model, parallel, opt, batches)


@check
def other_parameters_are_agreed_on(rank: int) -> None:
    """A new group, frozen parameters, and a cast fall back to the window's end once."""
    with noted() as calls:
        model, parallel, opt = make_shared(steps=1)
        reference = build()
        other = gradaccum.wrap(sgd(reference), steps=2, process_group="alone")

        def train(part: int) -> list[str]:
            calls.clear()
            for index in (part, part + 1):
                learn(parallel, opt, usual_batches(rank)[index])
                for worker in range(WORLD):
                    learn(reference, other, usual_batches(worker)[index])
            half = [call for call in calls if call == "under the pass"]
            return half

        train(0)
        assert train(2)
        for each in (model, reference):
            each.first.weight.requires_grad_(False)
        # The frozen parameter adds zeros to no bucket once the workers know of it.
        train(4)
        for each in (model, reference):
            each.first.weight.requires_grad_(True)
        train(6)
        require_equal(model, reference)


@check
def one_worker_has_changed_its_parameters(rank: int) -> None:
    """Then nobody reduces in buckets until the window's end, also if another worker
    discards the window meanwhile; after it all choose the same buckets again.
    """
    for discards in (False, True):
        with noted() as calls:
            model, parallel, opt = make_shared(steps=2)
            batches = usual_batches(rank)
            for batch in batches[:3]:
                learn(parallel, opt, batch)
            x, y, rare = batches[3]
            if rank == 1:
                opt._window.workers.parameters_changed()
            calls.clear()
            opt.backward((parallel(x, rare) - y).square().mean(), len(x))
            assert calls.count("under the pass") <= VOTE
            if not discards:
                opt.step()
            else:
                if rank == 1:
                    with refused(gradaccum.UsageError, "called discard()"):
                        opt.step()
                opt.discard()
            for batch in batches[4:8]:
                learn(parallel, opt, batch)
            assert calls.count("under the pass") >= BUCKETS
        windows = windows_of(2)
        trained = windows[:4]
        if discards:
            del trained[1]
        require_same_everywhere(numbers(model))
        require_equal(model, alone(trained)[0])


@check
def freed_wrapper_lets_the_module_reduce_at_once(rank: int) -> None:
    """Without a collection of cycles."""
    with LARGE:
        _, parallel, opt = make_shared(steps=2)
        for batch in usual_batches(rank)[:3]:
            learn(parallel, opt, batch)
    gc.collect()
    gc.disable()
    try:
        assert not parallel.require_backward_grad_sync
        del opt
        assert parallel.require_backward_grad_sync
    finally:
        gc.enable()


@check
def overflow_on_one_worker_skips_on_all(rank: int) -> None:
    with last_micro_batch(rank) as (model, parallel, opt, batches):
        x, y, rare = batches[3]
        scale = float("inf") if rank else 1.0
        opt.backward((parallel(x, rare) - y).square().mean() * scale, len(x))
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            opt.step()
        assert [
            str(each.message) for each in given if "on rank 1." in str(each.message)
        ]
        assert opt.result.skipped
        assert opt.result.overflow
        require_third_window(model, parallel, opt, batches)


@check
def other_rates_are_refused_before_a_sum_changes(rank: int) -> None:
    with last_micro_batch(rank) as (model, parallel, opt, batches):
        opt.param_groups[0]["lr"] = 0.1 + rank
        with refused(gradaccum.UsageError, "learning rates"):
            learn(parallel, opt, batches[3])
        opt.param_groups[0]["lr"] = 0.1
        opt.flush()
        require_same_everywhere(numbers(model))
        require_equal(model, alone(windows_of(2)[:2])[0])


@check
def passes_of_another_optimizer_begin_nothing(rank: int) -> None:
    """A generator's pass brings gradients to the discriminator, which are cleared."""
    with noted() as calls:
        model, parallel, opt = make_shared(steps=1)
        for batch in usual_batches(rank):
            calls.clear()
            parallel(batch[0]).sum().backward()
            assert calls == []
            opt.zero_grad()
            learn(parallel, opt, batch)
        assert "under the pass" in calls
    require_equal(model, alone(windows_of(1))[0])


@check
def gradients_with_a_graph_are_refused(rank: int) -> None:
    with last_micro_batch(rank) as (model, parallel, opt, batches):
        loss = parallel(batches[3][0]).square().mean()
        opt.weigh(len(batches[3][0]))
        opt.scale(loss).backward(create_graph=True)
        with refused(gradaccum.UsageError, "create_graph"):
            opt.step()
        opt.discard()
        require_third_window(model, parallel, opt, batches)
