"""Stage 3: CUDA graphs, whose replays write into the same memory and run no hooks. A
loop has to be right, or refused by an error with the words "CUDA graph".

The items are of float64, so that a wrong window cannot pass for rounding. What spoils
the process when it fails, a capture, comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
from benchmarks.gpu.problem import (
    FLOAT64_BOUND,
    STEPS,
    MicroBatch,
    backward,
    cut,
    distance,
    inner_optimizer,
    joined,
    make_items,
    make_model,
    mean_loss,
    train,
    train_large,
)
from benchmarks.gpu.records import Check, Measured, Setting, shown

WINDOWS = 4
"""A graph is warmed up, recorded, and then replayed."""
ITEMS = 8
"""Of each micro-batch: a graph has one shape."""
WORDS = "CUDA graph"

Loop = Callable[[nn.Module, list[MicroBatch]], None]


def micro_batches_of(setting: Setting) -> list[MicroBatch]:
    count = WINDOWS * STEPS
    return cut(make_items(setting, ITEMS * count), [ITEMS] * count)


def judged(setting: Setting, loop: Loop, bare: Loop | None = None) -> Measured:
    """Run a loop, and compare it with the large batches."""
    micro_batches = micro_batches_of(setting)
    expected = make_model(setting)
    starts = range(0, len(micro_batches), STEPS)
    train_large(expected, [joined(micro_batches[i : i + STEPS]) for i in starts])
    bound = f"{FLOAT64_BOUND:.0e}, or refused with the words {WORDS}"
    passed, text = _outcome(setting, loop, micro_batches, expected)
    bare_text = ""
    if bare is not None:
        bare_text = _outcome(setting, bare, micro_batches, expected)[1]
    return Measured(passed, text, bound, bare_text)


def _outcome(
    setting: Setting, loop: Loop, micro_batches: list[MicroBatch], expected: nn.Module
) -> tuple[bool, str]:
    model = make_model(setting)
    try:
        loop(model, micro_batches)
    except gradaccum.GradAccumError as error:
        return WORDS in str(error), f"refused: {shown(error)}"
    except RuntimeError as error:
        return False, f"torch raised: {shown(error)}"
    found = distance(model, expected, make_model(setting))
    return found <= FLOAT64_BOUND, f"{found:.1e}"


def train_bare(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    micro_batches: list[MicroBatch],
) -> None:
    for index, (x, y) in enumerate(micro_batches):
        backward(mean_loss(model, x, y) / STEPS)
        if (index + 1) % STEPS == 0:
            optimizer.step()
            optimizer.zero_grad()


def wrapped(model: nn.Module, **options: Any) -> Any:
    return gradaccum.wrap(inner_optimizer(model), STEPS, **options)


def graphed_callables(setting: Setting) -> Measured:
    def make_graphed(model: nn.Module, micro_batches: list[MicroBatch]) -> Any:
        sample = micro_batches[0][0].clone()
        # It is typed for modules and functions alike.
        make: Any = torch.cuda.make_graphed_callables
        return make(model, (sample,))

    def loop(model: nn.Module, micro_batches: list[MicroBatch]) -> None:
        graphed = make_graphed(model, micro_batches)
        train(graphed, wrapped(model), micro_batches)

    def bare(model: nn.Module, micro_batches: list[MicroBatch]) -> None:
        graphed = make_graphed(model, micro_batches)
        train_bare(graphed, inner_optimizer(model), micro_batches)

    return judged(setting, loop, bare)


def reduce_overhead(setting: Setting) -> Measured:
    def loop(model: nn.Module, micro_batches: list[MicroBatch]) -> None:
        compiled = torch.compile(model, mode="reduce-overhead")
        train(compiled, wrapped(model), micro_batches)

    def bare(model: nn.Module, micro_batches: list[MicroBatch]) -> None:
        compiled = torch.compile(model, mode="reduce-overhead")
        train_bare(compiled, inner_optimizer(model), micro_batches)

    return judged(setting, loop, bare)


class OwnGraph:
    """A graph of one forward and backward pass, as torch's notes on CUDA graphs capture
    it: static inputs, and ``.grad`` in the graph's own memory, which each replay
    overwrites.
    """

    def __init__(
        self, model: nn.Module, sample: MicroBatch, clear: Callable[[], None]
    ) -> None:
        self.x, self.y = (each.clone() for each in sample)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                backward(mean_loss(model, self.x, self.y))
        torch.cuda.current_stream().wait_stream(stream)
        clear()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            backward(mean_loss(model, self.x, self.y))

    def replay(self, x: Tensor, y: Tensor) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()


def graph_before_wrapping(setting: Setting) -> Measured:
    """Capture first, clear ``.grad`` as `wrap` asks, and count by ``step``."""

    def loop(model: nn.Module, micro_batches: list[MicroBatch]) -> None:
        graph = OwnGraph(model, micro_batches[0], model.zero_grad)
        static = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        opt = wrapped(model)
        for parameter, gradient in zip(model.parameters(), static, strict=True):
            parameter.grad = gradient
        for x, y in micro_batches:
            graph.replay(x, y)
            opt.step()

    return judged(setting, loop)


def graph_after_wrapping(setting: Setting) -> Measured:
    """Wrap first: the wrapper's hooks see the capture, and no replay."""

    def loop(model: nn.Module, micro_batches: list[MicroBatch]) -> None:
        opt = wrapped(model)
        graph = OwnGraph(model, micro_batches[0], opt.zero_grad)
        for x, y in micro_batches:
            graph.replay(x, y)
            opt.step()

    return judged(setting, loop)


def graph_with_separate_sums(setting: Setting) -> Measured:
    """Let ``.grad`` be the graph's, and keep the sums apart."""

    def loop(model: nn.Module, micro_batches: list[MicroBatch]) -> None:
        opt = wrapped(model, separate_sums=True)
        graph = OwnGraph(model, micro_batches[0], opt.zero_grad)
        static = [parameter.grad for parameter in model.parameters()]
        opt.discard()
        for x, y in micro_batches:
            for parameter, gradient in zip(model.parameters(), static, strict=True):
                parameter.grad = gradient
            graph.replay(x, y)
            opt.step()

    return judged(setting, loop)


CHECKS = (
    Check("torch.cuda.make_graphed_callables", graphed_callables, needs_gpu=True),
    Check('torch.compile(mode="reduce-overhead")', reduce_overhead, needs_gpu=True),
    Check("own graph, captured first", graph_before_wrapping, needs_gpu=True),
    Check("own graph, separate_sums", graph_with_separate_sums, needs_gpu=True),
    Check("own graph, wrapped first", graph_after_wrapping, needs_gpu=True),
)
