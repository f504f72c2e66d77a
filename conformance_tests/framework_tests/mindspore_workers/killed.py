"""A worker is killed within a window, and the job is started anew from its last checkpoint: ``killed.py killed``, ``killed.py resumed``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import mindspore as ms
from mindspore.communication import get_rank, init

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.common import WORLD, Worker, micro_batches, numbers
from gradaccum_mindspore import load_checkpoint_into

KILLED_AFTER = 2
"""Micro-batches of the second worker; a window has more."""


def build() -> Worker:
    return Worker("graph", clip_norm=1.0, loss_scale=gradaccum.DynamicLossScale(1024.0))


def train_and_be_killed(rank: int) -> None:
    worker = build()
    for index, batch in enumerate(micro_batches(rank), start=1):
        worker.learn(batch)
        ms.save_checkpoint(worker.cell, f"{rank}-{index}.ckpt")
        if rank == 1 and index == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
    worker.opt.flush()
    sys.exit("the other worker was not missed")


def resume(rank: int) -> None:
    done = min(len(list(Path().glob(f"{one}-*.ckpt"))) for one in range(WORLD))
    assert done == KILLED_AFTER
    worker, whole = build(), build()
    load_checkpoint_into(worker.cell, ms.load_checkpoint(f"{rank}-{done}.ckpt"))
    assert worker.opt.result.micro_step == done
    worker.train(micro_batches(rank)[done:])
    whole.train(micro_batches(rank))
    assert (numbers(worker), worker.opt.result) == (numbers(whole), whole.opt.result)


if __name__ == "__main__":
    init()
    {"killed": train_and_be_killed, "resumed": resume}[sys.argv[1]](get_rank())
