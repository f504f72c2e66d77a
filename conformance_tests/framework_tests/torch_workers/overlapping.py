"""Sums that are reduced under the window's last backward pass are the large batch's,
whatever a worker does in between, and no worker is left waiting.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch import nn
from torch.utils.checkpoint import checkpoint

import gradaccum
from gradaccum import UsageError
from gradaccum_torch.workers import overlap

from ..refusing import refused
from .common import (
    WORLD,
    Batch,
    alone,
    build,
    learn,
    loss_of,
    make_shared,
    micro_batches,
    require_equal,
    sgd,
    windows_of,
)
from .jobs import check

LARGE = mock.patch.object(overlap, "LARGE_BYTES", 100)
"""With it each weight of the model is a bucket, and the biases are one."""


def usual() -> Any:
    """A model of which each pass reaches every trainable parameter."""
    model = build()
    model.rare.requires_grad_(False)
    model.never.requires_grad_(False)
    return model


def usual_batches(rank: int) -> list[Batch]:
    """Eight micro-batches on each worker, none of which takes the rare branch."""
    return [(x + 0.1 * rank, False) for x, _ in micro_batches(0, count=8)]


def usual_windows() -> list[list[Batch]]:
    """Windows of two micro-batches on each worker."""
    return windows_of([usual_batches(rank) for rank in range(WORLD)], 2)


@contextmanager
def last_micro_batch(rank: int) -> Iterator[tuple[Any, Any, Any, list[Any]]]:
    """Windows of two, up to the last micro-batch of the second one."""
    with LARGE:
        model, parallel, opt = make_shared(usual(), steps=2)
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
    windows = usual_windows()
    require_equal(model, alone([windows[0], windows[2]])[0])


@check
def recomputed_layers_are_reduced_in_step(rank: int) -> None:
    """Each segment of a reentrant checkpoint has a backward pass of its own."""
    with LARGE:
        model, parallel, opt = make_shared(usual(), steps=2, reduction="sum")
        reference, other = alone([], reduction="sum")
        for window in usual_windows():
            for x, _ in window:
                other.backward(2 * reference(x).sum())
                other.step()
            other.flush()
        for x, _ in usual_batches(rank):
            x = x.requires_grad_()
            halves = [
                checkpoint(parallel.module, x, use_reentrant=True) for _ in range(2)
            ]
            opt.backward(sum(half.sum() for half in halves))
            opt.step()
    require_equal(model, reference, off=1e-12)


@check
def second_pass_after_the_reduction_is_refused(rank: int) -> None:
    """By either kind of call; the micro-batches before had one pass."""
    for is_plain in (False, True):
        with last_micro_batch(rank) as (model, parallel, opt, batches):
            opt.backward(loss_of(parallel, batches[3]))
            loss = loss_of(parallel, batches[3])
            with refused(
                UsageError, "on the sum of the micro-batch's losses", "opt.discard()"
            ):
                if is_plain:
                    loss.backward()
                else:
                    opt.backward(loss)
            if is_plain:
                with refused(UsageError, "discard()"):
                    opt.step()
            opt.discard()
            require_third_window(model, parallel, opt, batches)


@check
def changed_gradients_are_noticed(rank: int) -> None:
    """Between the last backward pass and step()."""
    with last_micro_batch(rank) as (model, parallel, opt, batches):
        opt.backward(loss_of(parallel, batches[3]))
        assert model.first.weight.grad is not None
        for call in (opt.zero_grad, opt.state_dict, opt.flush):
            with refused(UsageError, "between backward() and step()"):
                call()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with refused(UsageError, "clip_norm"):
            opt.step()
        opt.discard()
        require_third_window(model, parallel, opt, batches)


@check
def loop_that_changes_gradients_reduces_in_step(rank: int) -> None:
    """In windows of one micro-batch the user may change .grad, and the change is what
    the workers reduce.
    """
    with LARGE:
        model, parallel, opt = make_shared(usual(), steps=1)
        for batch in usual_batches(rank)[:3]:
            opt.backward(loss_of(parallel, batch))
            for parameter in filter(
                lambda each: each.requires_grad, model.parameters()
            ):
                parameter.grad.mul_(3)
            opt.step()
            opt.zero_grad()
    reference = usual()
    other = gradaccum.wrap(sgd(reference), steps=WORLD, process_group="alone")
    for window in windows_of([usual_batches(each) for each in range(WORLD)], 1)[:3]:
        for batch in window:
            other.backward(3 * loss_of(reference, batch))
            other.step()
            other.zero_grad()
    require_equal(model, reference)


@check
def discarding_worker_is_reported(rank: int) -> None:
    """Also one whose backward pass raises; all go on after opt.discard()."""
    for raises in (False, True):
        with last_micro_batch(rank) as (model, parallel, opt, batches):
            head = model.usual
            if rank == 1 and raises:  # A segment's pass ends before the pass around it.
                head.forward = partial(checkpoint, head.forward, use_reentrant=True)
            loss = loss_of(parallel, batches[3])
            if rank == 1 and raises:
                handle = model.first.bias.register_hook(lambda gradient: 1 / 0)
                with refused(ZeroDivisionError):
                    opt.backward(loss)
                handle.remove()
                del head.forward
                with refused(UsageError, "discard()"):
                    opt.step()
            else:
                opt.backward(loss)
            if rank == 0:
                with refused(UsageError, "called discard()"):
                    opt.step()
                with refused(UsageError, "discard()"):
                    opt.step()
            opt.discard()
            require_third_window(model, parallel, opt, batches)


@check
def frozen_parameters_are_reduced_alike(rank: int) -> None:
    """Also by a worker that reduces at the window's end, where another one does not."""
    with LARGE:
        model = usual()
        model.first.weight.requires_grad_(False)
        _, parallel, opt = make_shared(model, steps=1)
        reference, other = alone([])
        everyone = [usual_batches(worker) for worker in range(WORLD)]
        for index in range(6):
            for each in (model, reference):
                each.first.weight.requires_grad_(index != 3)
                each.first.bias.requires_grad_(index != 4)
            for worker, batches in enumerate(everyone):
                batch = batches[index]
                weight = 0 if index in (2, 4) and worker == 1 else len(batch[0])
                other.backward(loss_of(reference, batch), weight)
                other.step()
                if worker == rank:
                    opt.backward(loss_of(parallel, batch), weight)
            for each in (model, reference):
                each.first.weight.requires_grad_(index not in (2, 3))
            opt.step()
            other.flush()
        require_equal(model, reference)


@check
def overflow_on_one_worker_skips_on_all(rank: int) -> None:
    with last_micro_batch(rank) as (model, parallel, opt, batches):
        scale = float("inf") if rank else 1.0
        opt.backward(loss_of(parallel, batches[3]) * scale)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            opt.step()
        named = ["not finite on rank 1 of 2" in str(each.message) for each in given]
        assert named == [True] * rank
        assert opt.result.skipped
        assert opt.result.overflow
        require_third_window(model, parallel, opt, batches)
