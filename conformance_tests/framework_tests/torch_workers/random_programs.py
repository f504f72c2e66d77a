"""Random programs of two workers against one process that has all micro-batches: window
lengths, weights, branches, overflows, several backward passes of a micro-batch, and
workers that end at different times, with large sums reduced under the last pass.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import gradaccum
from gradaccum_torch.workers import overlap

from .common import WORLD, build, make_shared, require_equal, sgd
from .jobs import check

PROGRAMS = range(25)
"""The seeds; 1,000 were tried, without a difference."""


class RandomMicroBatch(NamedTuple):
    """One micro-batch of a program."""

    x: Tensor
    takes_rare_branch: bool
    weight: float
    passes: int
    """Its backward passes, which share the loss; 0: one by `opt.backward`."""
    factor: float
    """1, or inf for an overflow."""


class Program(NamedTuple):
    """What the workers do."""

    options: dict[str, Any]
    micro_batches: list[list[RandomMicroBatch]]
    """Of each worker."""


def draw_program(seed: int) -> Program:
    numbers = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    reduction = numbers.choice(["mean", "mean", "sum", "sum_per_item"])
    options: dict[str, Any] = {
        "steps": numbers.choice([1, 2, 3, 4]),
        "reduction": reduction,
    }
    if numbers.random() < 0.4:
        options["clip_norm"] = 10 ** numbers.uniform(-3, 1)
    micro_batches: list[list[RandomMicroBatch]] = []
    for _ in range(WORLD):
        drawn: list[RandomMicroBatch] = []
        for _ in range(numbers.randint(1, 12)):
            items = numbers.randint(1, 5)
            weight = 1.0 if reduction == "sum" else float(items)
            micro_batch = RandomMicroBatch(
                torch.randn(items, 4, generator=generator, dtype=torch.float64),
                numbers.random() < 0.25,
                0.0 if numbers.random() < 0.15 else weight,
                numbers.choice([0, 0, 1, 2]),
                float("inf") if numbers.random() < 0.04 else 1.0,
            )
            drawn.append(micro_batch)
        micro_batches.append(drawn)
    return Program(options, micro_batches)


def train(
    model: nn.Module, opt: Any, micro_batch: RandomMicroBatch, reduction: str
) -> None:
    def loss(share: float) -> Tensor:
        squares: Tensor = model(micro_batch.x, micro_batch.takes_rare_branch).square()
        total = squares.mean() if reduction == "mean" else squares.sum()
        return total * (micro_batch.factor * share)

    if not micro_batch.passes or not micro_batch.weight:
        opt.backward(loss(1.0), weight=micro_batch.weight)
    else:
        opt.weigh(micro_batch.weight)
        for _ in range(micro_batch.passes):
            opt.scale(loss(1.0 / micro_batch.passes)).backward()
    opt.step()
    opt.zero_grad()


@check
def random_programs_are_the_large_batch(rank: int) -> None:
    for seed in PROGRAMS:
        program = draw_program(seed)
        steps, reduction = program.options["steps"], program.options["reduction"]
        with mock.patch.object(overlap, "LARGE_BYTES", 64):
            model, parallel, opt = make_shared(**program.options)
            for micro_batch in program.micro_batches[rank]:
                train(parallel, opt, micro_batch, reduction)
            opt.flush()
        reference = build()
        options = {**program.options, "steps": None, "process_group": "alone"}
        other = gradaccum.wrap(sgd(reference), **options)
        longest = max(map(len, program.micro_batches))
        for first in range(0, longest, steps):
            for worker in program.micro_batches:
                for micro_batch in worker[first : first + steps]:
                    train(reference, other, micro_batch, reduction)
            other.flush()
        try:
            require_equal(model, reference, off=1e-11)
        except AssertionError as error:
            error.add_note(f"program {seed}: {program.options}")
            raise
        assert opt.result.optimizer_step == other.result.optimizer_step, seed
