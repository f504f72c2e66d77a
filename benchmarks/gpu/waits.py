"""Stage 5: who waits for the device.

`torch.cuda.set_sync_debug_mode` makes a wait an error inside a window, and a warning,
which is counted, at its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gradaccum
import gradaccum_torch
from benchmarks.gpu.problem import (
    STEPS,
    MicroBatch,
    backward,
    cut,
    inner_optimizer,
    joined,
    make_items,
    make_model,
    mean_loss,
)
from benchmarks.gpu.records import Check, Measured, Setting, shown

ITEMS = 8
WAIT = "called a synchronizing CUDA operation"


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def waits_counted() -> Iterator[list[int]]:
    """Yield a list whose one number is the waits inside the block, once it is left."""
    count = [0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
    count[0] = sum(WAIT in str(each.message) for each in caught)


class Loop(NamedTuple):
    """A loop, cut at the end of its window."""

    micro_batch: Callable[[MicroBatch], None]
    close: Callable[[], None]
    """What the last micro-batch's end is followed by."""


def micro_batches_of(setting: Setting, dtype: torch.dtype) -> list[MicroBatch]:
    return cut(make_items(setting, ITEMS * STEPS, dtype), [ITEMS] * STEPS)


def wrapped(setting: Setting, dtype: torch.dtype, **options: Any) -> Loop:
    """A wrapped optimizer, whose last micro-batch closes the window."""
    model = make_model(setting, dtype)
    opt = gradaccum.wrap(inner_optimizer(model), STEPS, **options)

    def micro_batch(items: MicroBatch) -> None:
        opt.backward(mean_loss(model, *items))
        opt.step()
        opt.zero_grad()

    return Loop(micro_batch, lambda: None)


def bare(setting: Setting, dtype: torch.dtype, clip_norm: float | None = None) -> Loop:
    model = make_model(setting, dtype)
    optimizer = inner_optimizer(model)

    def micro_batch(items: MicroBatch) -> None:
        backward(mean_loss(model, *items) / STEPS)

    def close() -> None:
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(micro_batch, close)


class Waits(NamedTuple):
    """The waits of one window."""

    error: str
    """What the first wait inside the window raised; empty if there was none."""
    at_end: int

    def __str__(self) -> str:
        if self.error:
            return f"inside: {self.error}"
        return f"inside: none; at the end: {self.at_end}"


def counted(loop: Loop, micro_batches: list[MicroBatch]) -> Waits:
    """Return the waits of the third window: the first ones make the optimizer's
    state.
    """
    for _ in range(2):
        for items in micro_batches:
            loop.micro_batch(items)
        loop.close()
    torch.cuda.synchronize()
    try:
        with waits_are_errors():
            for items in micro_batches[:-1]:
                loop.micro_batch(items)
    except RuntimeError as error:
        return Waits(shown(error), 0)
    with waits_counted() as count:
        loop.micro_batch(micro_batches[-1])
        loop.close()
    return Waits("", count[0])


def waits_of_a_window(
    setting: Setting,
    dtype: torch.dtype,
    at_most: int,
    clip_norm: float | None = None,
    **options: Any,
) -> Measured:
    micro_batches = micro_batches_of(setting, dtype)
    if clip_norm is not None:
        options["clip_norm"] = clip_norm
    found = counted(wrapped(setting, dtype, **options), micro_batches)
    usual = counted(bare(setting, dtype, clip_norm), micro_batches)
    passed = not found.error and found.at_end <= at_most
    return Measured(passed, str(found), str(Waits("", at_most)), str(usual))


def waits_of_a_scaler(setting: Setting) -> Measured:
    """Count the waits of a complete window with a `GradScaler`, whose scale is read as
    a window begins and ends.
    """
    micro_batches = micro_batches_of(setting, torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    model = make_model(setting, torch.float32)
    opt = gradaccum.wrap(inner_optimizer(model), STEPS, loss_scale=scaler)
    other_scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    other = make_model(setting, torch.float32)
    optimizer = inner_optimizer(other)

    def ours() -> None:
        for x, y in micro_batches:
            backward(scaler.scale(mean_loss(model, x, y)))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    def usual() -> None:
        for x, y in micro_batches:
            backward(other_scaler.scale(mean_loss(other, x, y) / STEPS))
        other_scaler.step(optimizer)
        other_scaler.update()
        optimizer.zero_grad()

    found = _waits_of(ours)
    return Measured(None, f"{found} in all", "", f"{_waits_of(usual)} in all")


def waits_of_backward(setting: Setting) -> Measured:
    """Count the waits of one call of `gradaccum_torch.backward`, its update included."""
    x, y = joined(micro_batches_of(setting, torch.float32))
    model = make_model(setting, torch.float32)
    opt = gradaccum.wrap(inner_optimizer(model), None, clip_norm=1.0)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return mean_loss(model, x, y)

    def call() -> None:
        gradaccum_torch.backward(loss_fn, x, y, steps=STEPS, optimizer=opt)

    found = _waits_of(call)
    return Measured(found <= 1, f"{found} in all", "1 in all")


def _waits_of(window: Callable[[], None]) -> int:
    for _ in range(2):
        window()
    torch.cuda.synchronize()
    with waits_counted() as count:
        window()
    return count[0]


FLOAT32 = torch.float32
CHECKS = (
    Check(
        "wrap, float32",
        partial(waits_of_a_window, dtype=FLOAT32, at_most=1),
        needs_gpu=True,
    ),
    Check(
        "wrap, clip_norm",
        partial(waits_of_a_window, dtype=FLOAT32, at_most=1, clip_norm=1.0),
        needs_gpu=True,
    ),
    Check(
        'wrap, on_overflow="ignore"',
        partial(waits_of_a_window, dtype=FLOAT32, at_most=0, on_overflow="ignore"),
        needs_gpu=True,
    ),
    Check(
        "wrap, bfloat16 gradients",
        partial(waits_of_a_window, dtype=torch.bfloat16, at_most=1),
        needs_gpu=True,
    ),
    Check(
        "wrap, bfloat16, master weights",
        partial(
            waits_of_a_window, dtype=torch.bfloat16, at_most=1, master_weights=True
        ),
        needs_gpu=True,
    ),
    Check(
        "wrap, separate_sums",
        partial(waits_of_a_window, dtype=FLOAT32, at_most=1, separate_sums=True),
        needs_gpu=True,
    ),
    Check("the loop of a GradScaler", waits_of_a_scaler, needs_gpu=True),
    Check("gradaccum_torch.backward", waits_of_backward, needs_gpu=True),
)
