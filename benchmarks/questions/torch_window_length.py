"""torch: time and memory by window length, at the same number of micro-batches.

Longer windows mean fewer updates, so the time falls and then stays: what is left is the
micro-batch. Memory is what torch's allocator has handed out since the window began and
has not got back after its last but one micro-batch: the sum, one gradient of the model,
however long the window is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import gradaccum
from benchmarks.axes import FEW, QUICK_WINDOWS, RUN, SMALL, WINDOWS, sizes
from benchmarks.case import Case

BASELINE = "hand-written loop"

Loop = Callable[[int], None]
"""Does so many micro-batches."""


def cases(quick: bool) -> Iterator[Case]:
    for steps in QUICK_WINDOWS if quick else WINDOWS:
        held = {
            label: {"bytes held": held_bytes(make(model(FEW, SMALL), steps), steps)}
            for label, make in LOOPS.items()
        }
        yield make_case(
            f"windows of {steps}",
            steps,
            steps=steps,
            tensors=FEW,
            elements=SMALL,
            run=RUN,
        )._replace(counts=held)


def make_case(
    name: str, x: float, *, steps: int, tensors: int, elements: int, run: int
) -> Case:
    """`run` micro-batches in windows of `steps`, a divisor of it, over a model of
    `elements` in equal `tensors`.
    """
    contestants = {
        label: _bound(make(model(tensors, elements), steps), run)
        for label, make in LOOPS.items()
    }
    return Case(
        name,
        BASELINE,
        contestants,
        x=x,
        rates={label: {"micro-batches/s": run} for label in contestants},
    )


def model(tensors: int, elements: int) -> list[Tensor]:
    """Leaves that require gradients, all of one size."""
    torch.manual_seed(0)
    return [torch.randn(size).requires_grad_() for size in sizes(tensors, elements)]


class HalfSquare(torch.autograd.Function):
    """Half the sum of squares of all parameters, whose gradient is the parameters
    themselves.

    One operation for the whole model, so that its tensors cost little but their sums.
    The loss's value is not computed.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        return tuple(torch._foreach_mul(ctx.parameters, outer[0]))


def loss(parameters: Sequence[Tensor]) -> Tensor:
    """A scalar to differentiate."""
    return HalfSquare.apply(*parameters)  # type: ignore[no-any-return,no-untyped-call]


def hand_written(parameters: Sequence[Tensor], steps: int) -> Loop:
    """The loop of the tutorials."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def loop(count: int) -> None:
        for index in range(count):
            (loss(parameters) / steps).backward()  # type: ignore[no-untyped-call]
            if (index + 1) % steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    return loop


def with_gradaccum(parameters: Sequence[Tensor], steps: int) -> Loop:
    """The same, wrapped."""
    optimizer = gradaccum.wrap(torch.optim.AdamW(parameters, lr=1e-4), steps=steps)

    def loop(count: int) -> None:
        for _ in range(count):
            loss(parameters).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return loop


LOOPS = {BASELINE: hand_written, "gradaccum": with_gradaccum}


def held_bytes(loop: Loop, steps: int) -> float:
    """Bytes allocated and not freed by the micro-batches of a window but the last; the
    loop ends at the end of a window.
    """
    loop(steps)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loop(steps - 1)
    found = sum(event.self_cpu_memory_usage for event in profiled.key_averages())
    loop(1)
    return float(found)


def _bound(loop: Loop, count: int) -> Callable[[], object]:
    return lambda: loop(count)
