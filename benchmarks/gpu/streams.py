"""Stage 9: passes on a stream of their own, and activations that wait on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradaccum
import gradaccum_torch
from benchmarks.gpu.exact import SIZES, windows_of
from benchmarks.gpu.problem import (
    FLOAT64_BOUND,
    STEPS,
    MicroBatch,
    cut,
    distance,
    inner_optimizer,
    make_items,
    make_model,
    mean_loss,
    train,
    train_large,
)
from benchmarks.gpu.records import Check, Measured, Setting

ROUNDS = 8
"""A race is seldom lost in the first window."""
BUSY = 2**22
"""Cycles that a stream sleeps before its work, so that the other one would be early."""


def judged(
    setting: Setting, loop: Callable[[nn.Module, Any, list[MicroBatch]], None]
) -> Measured:
    sizes = SIZES * ROUNDS
    micro_batches = cut(make_items(setting, sum(sizes)), sizes)
    model = make_model(setting)
    opt = gradaccum.wrap(inner_optimizer(model), STEPS, clip_norm=1e-3)
    loop(model, opt, micro_batches)
    torch.cuda.synchronize()
    expected = make_model(setting)
    train_large(expected, windows_of(micro_batches), clip_norm=1e-3)
    found = distance(model, expected, make_model(setting))
    return Measured(found <= FLOAT64_BOUND, f"{found:.1e}", f"{FLOAT64_BOUND:.0e}")


def whole_loop(setting: Setting) -> Measured:
    """Run everything on one side stream."""

    def loop(model: nn.Module, opt: Any, micro_batches: list[MicroBatch]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            train(model, opt, micro_batches)
        torch.cuda.current_stream().wait_stream(stream)

    return judged(setting, loop)


def passes_alone(setting: Setting) -> Measured:
    """Run the passes on a side stream, which sleeps first, and `step` on the usual one,
    which waits for it.
    """

    def loop(model: nn.Module, opt: Any, micro_batches: list[MicroBatch]) -> None:
        usual = torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for x, y in micro_batches:
            stream.wait_stream(usual)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
                opt.backward(mean_loss(model, x, y), weight=len(x))
            usual.wait_stream(stream)
            opt.step()
            opt.zero_grad()

    return judged(setting, loop)


def alternating(setting: Setting) -> Measured:
    """Run each micro-batch, its step included, on one of two streams in turn."""

    def loop(model: nn.Module, opt: Any, micro_batches: list[MicroBatch]) -> None:
        before = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        for index, items in enumerate(micro_batches):
            stream = streams[index % 2]
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
                train(model, opt, [items])
            before = stream
        torch.cuda.current_stream().wait_stream(before)

    return judged(setting, loop)


def borders_on_host(setting: Setting) -> Measured:
    """Compare the bits of a layered window whose borders move to the host with those of
    one that keeps them.
    """
    x, y = make_items(setting, setting.size(29, 2048))
    gradients = []
    for borders in ("keep", "host"):
        model = make_model(setting)
        gradaccum_torch.layered_backward(
            model, nn.functional.mse_loss, x, y, steps=4, borders=borders
        )
        gradients.append([each.grad for each in model.parameters()])
    pairs = list(zip(*gradients, strict=True))
    equal = all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
    return Measured(equal, "equal bits" if equal else "other bits", "equal bits")


CHECKS = (
    Check("the loop on a side stream", whole_loop, needs_gpu=True),
    Check("the passes on a side stream", passes_alone, needs_gpu=True),
    Check("two streams in turn", alternating, needs_gpu=True),
    Check('layered_backward, borders="host"', borders_on_host),
)
