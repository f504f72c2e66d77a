"""One of three workers, the last of which is killed:
``python -m ...torch_workers.lost WHEN SIZE RANK FOLDER``.

The others form a group of two, take the window over, and end with what one process has
that was given the micro-batches which arrived.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum_torch.workers import group as reductions

from .common import require_equal

WORKERS, STEPS = 3, 3
SIZES = {"small": 8, "large": 700_000, "in_place": 700_000}
"""The outputs of the last layer: a large one is a message of its own."""


def build(size: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 2), nn.BatchNorm1d(2).eval(), nn.Linear(2, SIZES[size])
    ).double()


def item(rank: int, index: int) -> Tensor:
    """A micro-batch; their sizes differ."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(
        2 + (rank + index) % 3, 4, generator=generator, dtype=torch.float64
    )


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x)[:, :8] - 1).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def learn(model: nn.Module, opt: Any, x: Tensor, scheduler: Any = None) -> None:
    opt.backward(loss(model, x), weight=len(x))
    opt.step()
    opt.zero_grad()
    if scheduler is not None:
        scheduler.step()


def decaying(opt: Any) -> Any:
    """A scheduler that counts its moves, so that one too many or too few stays."""
    return gradaccum.wrap(
        torch.optim.lr_scheduler.LambdaLR(opt, lambda moves: 0.5**moves)
    )


def start(folder: Path, name: str, rank: int, workers: int) -> None:
    # A survivor may wait for the other one, which has noticed and left the group of
    # three.
    timeout = datetime.timedelta(seconds=10 if name == "three" else 120)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / name}",
        rank=rank,
        world_size=workers,
        timeout=timeout,
    )


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(
    call: Callable[..., Any], times: int, then: Callable[..., Any] = die
) -> Callable[..., Any]:
    """Run `then` as `call` is called for the last of so many `times`."""
    left = [times]

    def counting(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return then(*args, **kwargs) if left[0] == 0 else call(*args, **kwargs)

    return counting


def during(call: Callable[..., Any]) -> Callable[..., Any]:
    """Die a moment after the collective has begun, wherever it is then."""

    def killed(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(0.002, die).start()
        return call(*args, **kwargs)

    return killed


def arm(when: str, opt: Any) -> None:
    """Have this worker die in the window that begins."""
    original = dist.all_reduce
    if when == "before_the_reduction":
        dist.all_reduce = before(original, 1)
    elif when == "between_two_reductions":
        dist.all_reduce = before(original, 2)
    elif when == "during_the_reduction":
        dist.all_reduce = before(original, 1, during(original))
    elif when == "before_the_buffers":
        reductions.names.send_buffers = die
    elif when == "after_the_reduction":
        opt.register_step_pre_hook(die)


def main(when: str, size: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if size == "in_place":
        reductions.APART_BYTES = 0
    start(folder, "three", rank, WORKERS)
    model = build(size)
    parallel = DistributedDataParallel(model)
    opt = gradaccum.wrap(sgd(model), steps=STEPS, module=parallel, clip_norm=0.5)
    scheduler = decaying(opt)
    told = until_told(when, rank, parallel, opt, scheduler)
    with refused(
        gradaccum.UsageError,
        "opt.regroup(process_group)" if size != "in_place" else "discard()",
    ):
        opt.flush()
    if size != "in_place":
        assert len(opt.state_dict()["gradaccum"]["sums"]) == 6, (
            "what this worker holds is there"
        )
    dist.destroy_process_group()
    start(folder, "two", rank, 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opt.regroup(dist.group.WORLD)
    opt.flush()
    scheduler.step()
    expected, alone = taken_over(size, told, lost=bool(said))
    assert opt.result.optimizer_step == alone.result.optimizer_step
    assert opt.param_groups[0]["lr"] == alone.param_groups[0]["lr"]
    require_equal(model, expected, 1e-12)
    dist.destroy_process_group()
    (folder / f"{rank}.txt").write_text(
        f"told in micro-batch {told}, {opt.result}", encoding="utf-8"
    )


def until_told(when: str, rank: int, model: nn.Module, opt: Any, scheduler: Any) -> int:
    """Train until a reduction fails; return the number of the micro-batch."""
    for index in range(3 * STEPS):
        if rank == WORKERS - 1 and index == STEPS:
            arm(when, opt)
        if (when, rank, index) == ("in_mid_window", WORKERS - 1, STEPS + 1):
            die()
        try:
            learn(model, opt, item(rank, index), scheduler)
        except gradaccum.UsageError:
            return index
    raise AssertionError("nobody noticed")


def taken_over(size: str, told: int, lost: bool) -> tuple[nn.Module, Any]:
    """One process with the micro-batches of each window. A window that one survivor
    closed has those of all three.
    """
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (told // STEPS, lost))
    closed = max(window for window, _ in everyone)
    of_all = [(rank, window) for window in range(closed) for rank in range(WORKERS)]
    left = [
        (rank, closed)
        for rank, (window, lost) in enumerate(everyone)
        if window == closed and not lost
    ]
    model = build(size)
    alone = gradaccum.wrap(sgd(model), steps=None, clip_norm=0.5)
    scheduler = decaying(alone)
    for first in range(0, len(of_all) + len(left), WORKERS):
        for rank, window in (of_all + left)[first : first + WORKERS]:
            for index in range(STEPS):
                learn(model, alone, item(rank, STEPS * window + index))
        alone.flush()
        scheduler.step()
    return model, alone


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
