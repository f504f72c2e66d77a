"""torch: the time of ``step()`` and ``zero_grad()`` alone, inside a window, with
gradients in place, against the number of parameters.

The backward pass is what a loop without accumulation has too and is left out; nothing
of what is left may depend on the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch

import gradaccum
from benchmarks.case import Case

COUNTS = (10, 100, 1000)
BASELINE = "gradaccum"
CALLS = 100


def cases(quick: bool) -> Iterator[Case]:
    for count in COUNTS[: 2 if quick else None]:
        contestants = {BASELINE: _gradaccum(count)} | (
            {"Accelerate": _accelerate(count)} if find_spec("accelerate") else {}
        )
        yield Case(
            f"{CALLS} micro-batches, {count} parameters", BASELINE, contestants, x=count
        )


def _filled(count: int) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(8)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    return torch.optim.AdamW(parameters)


def _gradaccum(count: int) -> Callable[[], object]:
    optimizer = gradaccum.wrap(_filled(count), steps=None)
    optimizer.step()
    return lambda: _run(optimizer)


def _accelerate(count: int) -> Callable[[], object]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2**30, cpu=True)
    optimizer = accelerator.prepare(_filled(count))
    model = torch.nn.Linear(1, 1)

    def run() -> None:
        for _ in range(CALLS):
            with accelerator.accumulate(model):
                optimizer.step()
                optimizer.zero_grad()

    return run


def _run(optimizer: torch.optim.Optimizer) -> None:
    for _ in range(CALLS):
        optimizer.step()
        optimizer.zero_grad()
