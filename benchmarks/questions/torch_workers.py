"""torch: what a window of two workers costs beside the loops that people write around
`DistributedDataParallel`.

The loop by hand reduces gradients while the last backward pass still runs. gradaccum
reduces after it, with the weights and overflow flags of workers that may hold different
numbers of micro-batches, and measures the norm of the reduced sum. A loop that clips
measures it too. The same promises by hand, without any class, are the floor of that.

Two processes on a busy machine wait for each other. So each case is also one worker
alone, in seconds of its processor, in a group in which the other one brings the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.case import Case
from benchmarks.collectives import reductions, visible
from benchmarks.contestants.torch_ddp import BASELINE, Recipe, Window, recipes
from benchmarks.two_workers import WORKERS, Built, in_step, second_worker
from conformance_tests.framework_tests.torch_mirror import mirror

ITEMS, LAYERS, CLIP = 32, 4, 1e-3
SIZES = {"66 k": 128, "1 M": 512, "4.2 M": 1024}
"""Widths of an MLP of four square layers, by the number of its parameters."""


class Setting(NamedTuple):
    """One case."""

    size: str
    steps: int = 4
    clip_norm: float | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.size}, windows of"
            f" {self.steps}{', clipped' if self.clip_norm else ''}"
        )


QUICK = (
    Setting("66 k", 1),
    Setting("66 k", 1, CLIP),
    Setting("66 k"),
    Setting("66 k", 16),
    Setting("1 M"),
)
MORE = (
    Setting("66 k", clip_norm=CLIP),
    Setting("1 M", clip_norm=CLIP),
    Setting("1 M", 1),
    Setting("1 M", 16),
    Setting("4.2 M"),
    Setting("4.2 M", clip_norm=CLIP),
)


def cases(quick: bool) -> Iterator[Case]:
    with mirror(WORKERS):
        for case in built(QUICK if quick else QUICK + MORE):
            yield Case(
                f"{case.name}, CPU time of one worker",
                BASELINE,
                case.windows,
                counts=case.counts,
                clock=time.process_time,
            )
    with second_worker(paired, quick) as tell:
        for case in in_step(paired(quick), tell):
            yield Case(case.name, BASELINE, case.windows, counts=case.counts)


def paired(quick: bool) -> Iterator[Built]:
    """What each of the two workers builds."""
    return built(QUICK[-1:] if quick else QUICK + MORE)


def built(settings: Sequence[Setting]) -> Iterator[Built]:
    torch.set_num_threads(1)
    for setting in settings:
        found = recipes(setting.clip_norm)
        windows = {label: _window(recipe, setting) for label, recipe in found.items()}
        yield Built(
            setting.name,
            windows,
            {label: counted(label, recipe, setting) for label, recipe in found.items()},
        )


def _window(recipe: Recipe, setting: Setting, own: bool = False) -> Window:
    """`own`: the reductions of the module itself can be counted."""
    torch.manual_seed(0)
    width = SIZES[setting.size]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, parallel = torch.randn(ITEMS, width), DistributedDataParallel(model)
    if own:
        visible(parallel)
    return recipe(
        parallel, inner, lambda model: model(x).square().mean(), setting.steps
    )


def counted(label: str, recipe: Recipe, setting: Setting) -> Mapping[str, float]:
    return reductions(_window(recipe, setting, own=label != "gradaccum"))
