"""torch: what a window of two workers costs where the network is slow and the processor
is not, compared with `DistributedDataParallel` under ``no_sync``.

Both reduce a bucket of gradients while the window's last backward pass still runs. A
window whose end is not known beforehand, which ``flush`` closes, reduces after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from benchmarks.case import Case
from benchmarks.contestants.torch_ddp import Window, by_hand
from benchmarks.slow_link import slow_link
from benchmarks.two_workers import Built, in_step, second_worker

WIDTH = 1024
LAYERS = 8
MANY_BUCKETS = "no_sync by hand, buckets of 4 MiB"
FEW_BUCKETS = "no_sync by hand, buckets of 25 MiB"


class Setting(NamedTuple):
    """One case."""

    megabits: int
    items: int
    steps: int


QUICK = (Setting(400, 768, 1), Setting(400, 768, 4))
MORE = (
    Setting(400, 768, 16),
    Setting(200, 64, 1),
    Setting(200, 64, 4),
    Setting(200, 64, 16),
)


def cases(quick: bool) -> Iterator[Case]:
    settings = QUICK if quick else QUICK + MORE
    for megabits in dict.fromkeys(setting.megabits for setting in settings):
        with slow_link(megabits) as link:
            build = {400: at_400, 200: at_200}[megabits]
            with second_worker(build, quick, link.command) as tell:
                for case in in_step(build(quick), tell):
                    name = f"{link.rate}, {case.name}"
                    yield Case(name, MANY_BUCKETS, case.windows)


def at_400(quick: bool) -> Iterator[Built]:
    return built(400, quick)


def at_200(quick: bool) -> Iterator[Built]:
    return built(200, quick)


def built(megabits: int, quick: bool) -> Iterator[Built]:
    """What each of the two workers builds."""
    torch.set_num_threads(1)
    for setting in QUICK if quick else QUICK + MORE:
        if setting.megabits == megabits:
            name = f"{setting.items} items, windows of {setting.steps}"
            yield Built(name, windows(setting), {})


def windows(setting: Setting) -> dict[str, Window]:
    return {
        MANY_BUCKETS: _usual(setting, bucket_cap_mb=4),
        FEW_BUCKETS: _usual(setting),
        "gradaccum": _wrapped(setting, is_known=True),
        "gradaccum, closed by flush()": _wrapped(setting, is_known=False),
    }


def _model(
    setting: Setting, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(setting.items, WIDTH)
    return DistributedDataParallel(model, **options), optimizer, x


def _loss(x: torch.Tensor, parallel: torch.nn.Module) -> torch.Tensor:
    output: torch.Tensor = parallel(x)
    return output.square().mean()


def _usual(setting: Setting, **options: Any) -> Window:
    parallel, optimizer, x = _model(setting, **options)
    return by_hand()(parallel, optimizer, partial(_loss, x), setting.steps)


def _wrapped(setting: Setting, is_known: bool) -> Window:
    parallel, inner, x = _model(setting)
    steps = setting.steps if is_known else None
    optimizer = gradaccum.wrap(inner, steps=steps, module=parallel)

    def window() -> None:
        for _ in range(setting.steps):
            optimizer.backward(_loss(x, parallel))
            optimizer.step()
            optimizer.zero_grad()
        if not is_known:
            optimizer.flush()

    return window
