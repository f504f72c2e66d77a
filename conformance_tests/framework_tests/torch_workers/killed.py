"""One of two processes of a job: ``python -m conformance_tests.framework_tests.torch_workers.killed PHASE RANK FOLDER``.

``first``: train undisturbed; then train anew with checkpoints, and the second worker is killed in mid-window. ``again``: go on from the
last checkpoint, as a launcher restarts a job.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.common import WORLD, build, learn, micro_batches

MICRO_BATCHES, SAVED_AFTER, KILLED_AFTER = 12, 6, 7
"""In windows of four: a whole window, then a checkpoint after two micro-batches of the next, and the end after three."""


def start() -> tuple[Any, Any, Any]:
    model = build(torch.float32)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    scale = gradaccum.DynamicLossScale(1024.0, growth_interval=2)
    return model, parallel, gradaccum.wrap(inner, steps=4, module=parallel, loss_scale=scale, clip_norm=0.05)


def train(rank: int, parallel: Any, opt: Any, first: int, last: int) -> None:
    batches = (micro_batches(rank, torch.float32) * MICRO_BATCHES)[first:last]
    for batch in batches:
        learn(parallel, opt, batch)


def write(model: Any, opt: Any, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "result": opt.result._asdict()}, path)


def undisturbed(rank: int, folder: Path) -> None:
    model, parallel, opt = start()
    train(rank, parallel, opt, 0, MICRO_BATCHES)
    write(model, opt, folder / f"undisturbed{rank}.pt")


def until_killed(rank: int, folder: Path) -> None:
    model, parallel, opt = start()
    train(rank, parallel, opt, 0, SAVED_AFTER)
    write(model, opt, folder / f"checkpoint{rank}.pt")
    dist.barrier()
    train(rank, parallel, opt, SAVED_AFTER, KILLED_AFTER)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with refused(gradaccum.UsageError, "the end of a window on rank 0", "4 micro-batches of update 2"):
        train(rank, parallel, opt, KILLED_AFTER, MICRO_BATCHES)
    (folder / "survivor.txt").write_text("was told", encoding="utf-8")


def again(rank: int, folder: Path) -> None:
    model, parallel, opt = start()
    saved = torch.load(folder / f"checkpoint{rank}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    train(rank, parallel, opt, SAVED_AFTER, MICRO_BATCHES)
    write(model, opt, folder / f"again{rank}.pt")


def main(phase: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder / phase}", datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timeout)
    if phase == "first":
        undisturbed(rank, folder)
        until_killed(rank, folder)
    else:
        again(rank, folder)
    time.sleep(0.3)  # gloo's threads let go of the last tensors; torch 2.13 may abort a process that ends before.
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
