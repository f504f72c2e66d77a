"""A window that nobody closes is said once: as the next epoch begins, and at the end of
the program.
"""

import re

import mindspore as ms
import pytest
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.programs import run_python

from .mindspore_common import (
    by_loader,
    entries_of,
    pynative_after,  # noqa: F401
    warned,
)

LOADER = [Tensor([1.0, 1.0], ms.float32)] * 6


def wrapped():
    parameter = Parameter(Tensor([10.0, 10.0], ms.float32), name="w")
    return gradaccum.wrap(nn.SGD([parameter], 1.0), steps=4)


def train(opt, micro_batches, **options):
    """One epoch, left after so many micro-batches."""
    for number, gradient in enumerate(opt.epoch(LOADER, **options), start=1):
        opt((gradient,))
        if number == micro_batches:
            break


def test_epoch_begins_in_a_window_that_was_left_open():
    opt = wrapped()
    with warned() as texts:
        for _ in range(3):
            train(opt, 2)
    (text,) = texts
    assert "a new epoch begins, but a window is still open" in text
    assert "(micro-batches: 2)" in text
    assert opt.result.micro_step == 2


def test_loop_that_is_right_is_not_warned_of():
    """It flushes where it breaks, breaks where a window is full, or carries over."""
    flushing = wrapped()
    full = wrapped()
    carrying = wrapped()
    with warned() as texts:
        for _ in range(2):
            train(flushing, 2)
            flushing.flush()
            train(full, 4)
            train(carrying, 2, carry=True)
    assert texts == []


@by_loader
def test_resumed_window_is_known(load):
    """The epoch after a load goes on in the window that was loaded."""
    opt = wrapped()
    train(opt, 2)
    saved = entries_of(opt)
    other = wrapped()
    train(other, 1)
    load(other, saved)
    with warned() as texts:
        train(other, 6)
    assert texts == []
    assert other.result.optimizer_step == 2


AT_THE_END = """
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint

import gradaccum
from gradaccum_mindspore import FlushAtEpochEnd, load_checkpoint_into

(how,) = sys.argv[1:]
rows = np.ones((20, 2), np.float32)


def wrapped(name):
    net = nn.Dense(2, 2)
    return net, gradaccum.wrap(nn.SGD(net.trainable_params(), 1.0), steps=8, name=name)


def train(name, micro_batches, *callbacks):
    net, opt = wrapped(name)
    data = NumpySlicesDataset((rows[:micro_batches],) * 2, shuffle=False).batch(1)
    model = Model(net, nn.MSELoss(), opt)
    model.train(1, data, callbacks=list(callbacks))
    return model.train_network, opt


kept = []


def run():
    kept.append(train("forgotten", 11))  # three are left
    if how == "raises":
        raise ValueError("of the user")
    train("full", 16)
    train("discarded", 1)[1].discard()
    train("flushed", 2)[1].flush()
    saver = ModelCheckpoint("run", ".", CheckpointConfig(save_checkpoint_steps=4))
    train("saved by a callback", 4, saver)
    cell, opt = train("saved", 5)
    ms.save_checkpoint(opt, "optimizer.ckpt")
    _, resumed = wrapped("saved")
    load_checkpoint_into(resumed, ms.load_checkpoint("optimizer.ckpt"))
    _, carrying = wrapped("carried")
    for _ in carrying.epoch(range(6), carry=True):
        carrying(tuple(Tensor(np.ones(p.shape), p.dtype) for p in carrying.parameters))
    assert carrying.result.micro_step == 6
    cell, opt = train("saved too early", 7)
    ms.save_checkpoint(cell, "early.ckpt")
    opt(tuple(Tensor(np.zeros(p.shape), p.dtype) for p in opt.parameters))
    opt(tuple(Tensor(np.zeros(p.shape), p.dtype) for p in opt.parameters))


run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "lost"), [("ends", [1, 3]), ("raises", [])])
def test_program_ends_in_an_open_window(how, lost, tmp_path):
    """Of nine optimizers two lose micro-batches: three of them, and one after a window
    that was saved has been closed.
    """
    (tmp_path / "program.py").write_text(AT_THE_END)
    run = run_python("program.py", how, cwd=tmp_path, timeout=200)
    assert run.returncode == (how == "raises"), run.stderr[-2000:]
    found = re.findall(r"GradAccumWarning: .*\(micro-batches: (\d)\)", run.stderr)
    assert sorted(map(int, found)) == lost
