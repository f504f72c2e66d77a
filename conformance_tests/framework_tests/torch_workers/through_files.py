"""A window that goes from two workers to one and to two, through files: ``python -m ...torch_workers.through_files PHASE RANK FOLDER``.

``killed``: the second of two workers is killed in mid-window, and the other one saves what it holds and ends. ``one``: a process goes on
from that file, and saves in the midst of the next window. ``two``: two processes go on from there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.common import require_equal
from conformance_tests.framework_tests.torch_workers.lost import STEPS, build, decaying, die, item, learn, sgd, start
from gradaccum_torch import redistributed

SIZE = "small"
ARRIVED = (
    [(rank, index) for index in range(STEPS) for rank in range(2)],
    [(0, index) for index in range(STEPS, 2 * STEPS)],
    [*((0, index) for index in range(2 * STEPS, 3 * STEPS - 1)), *((rank, 3 * STEPS - 1) for rank in range(2))],
)
"""The micro-batches of each window, as worker and number: the second worker dies in its second window, and is back at the third's end."""


def wrapped(model: Any, module: Any = None) -> tuple[Any, Any]:
    opt = gradaccum.wrap(sgd(model), steps=STEPS, clip_norm=0.5, module=module)
    return opt, decaying(opt)


def save(model: Any, opt: Any, scheduler: Any, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "scheduler": scheduler.state_dict()}, path)


def load(model: Any, opt: Any, scheduler: Any, path: Path, rank: int, workers: int) -> None:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(redistributed([saved["optimizer"]], workers)[rank])
    scheduler.load_state_dict(saved["scheduler"])


def killed(rank: int, folder: Path) -> None:
    start(folder, "three", rank, 2)
    model = build(SIZE)
    parallel = DistributedDataParallel(model)
    opt, scheduler = wrapped(model, parallel)
    for index in range(2 * STEPS - 1):
        if (rank, index) == (1, STEPS + 1):
            die()
        learn(parallel, opt, item(rank, index), scheduler)
    with refused(gradaccum.UsageError, "opt.regroup(process_group)"):
        learn(parallel, opt, item(rank, 2 * STEPS - 1), scheduler)
    opt.regroup(None)
    save(model, opt, scheduler, folder / "survivor.pt")


def one(rank: int, folder: Path) -> None:
    model = build(SIZE)
    opt, scheduler = wrapped(model)
    load(model, opt, scheduler, folder / "survivor.pt", 0, 1)
    opt.flush()
    scheduler.step()
    assert opt.result.optimizer_step == 2
    for index in range(2 * STEPS, 3 * STEPS - 1):
        learn(model, opt, item(0, index), scheduler)
    save(model, opt, scheduler, folder / "one.pt")


def two(rank: int, folder: Path) -> None:
    start(folder, "two", rank, 2)
    model = build(SIZE)
    parallel = DistributedDataParallel(model)
    opt, scheduler = wrapped(model, parallel)
    load(model, opt, scheduler, folder / "one.pt", rank, 2)
    learn(parallel, opt, item(rank, 3 * STEPS - 1), scheduler)
    expected = build(SIZE)
    alone = gradaccum.wrap(sgd(expected), steps=None, clip_norm=0.5)
    moving = decaying(alone)
    for window in ARRIVED:
        for each in window:
            learn(expected, alone, item(*each))
        alone.flush()
        moving.step()
    assert opt.result.optimizer_step == alone.result.optimizer_step == 3
    assert opt.param_groups[0]["lr"] == alone.param_groups[0]["lr"]
    require_equal(model, expected, 1e-12)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"killed": killed, "one": one, "two": two}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
