"""MindSpore's training tools (schedules, levels of precision, frozen parts, callbacks):
with a wrapped optimizer all is as on large batches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("GLOG_v", "4")
pytest.importorskip("mindspore")

import numpy as np
from mindspore import boost, nn, train
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model
from numpy.testing import assert_array_equal

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
)
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell

from .mindspore_runs import PART, START, STEPS, X, Y, make_net, values


class Run:
    """A model with its optimizer, which is wrapped and takes micro-batches, or bare and
    takes the large batches.
    """

    def __init__(
        self,
        wrapped: bool = True,
        net: nn.Cell | None = None,
        loss_scale: Any = None,
        **options: Any,
    ) -> None:
        self.net = make_net() if net is None else net
        self.size = PART if wrapped else PART * STEPS
        self.opt = nn.Momentum(self.net.trainable_params(), 0.01, 0.9)
        if wrapped:
            self.opt = gradaccum.wrap(self.opt, steps=STEPS, loss_scale=loss_scale)
        self.model = Model(self.net, nn.MSELoss(), self.opt, **options)

    def data(self, end: int = 12) -> NumpySlicesDataset:
        rows = NumpySlicesDataset((X[:end], Y[:end]), ["x", "y"], shuffle=False)
        return rows.batch(self.size)

    def train(self, epochs: int = 1, callbacks: Any = (), end: int = 12) -> Any:
        """On the first `end` rows; returns the parameters."""
        self.model.train(epochs, self.data(end), callbacks=list(callbacks))
        return values(self.net)


def require_same(got: Any, wanted: Any, bound: float = 1e-6) -> None:
    """Raise unless the parameters are equal, and have moved."""
    assert np.abs(wanted - START).max() > 1e-3
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_frozen_part_stays(mode: str) -> None:
    set_mode(mode)
    parameters = []
    for wrapped in (True, False):
        net = make_net()
        net.weight.requires_grad = False
        parameters.append(Run(wrapped, net=net).train())
    require_same(*parameters)
    assert_array_equal(parameters[0][:8], START[:8])


def test_freezing_later_needs_another_optimizer() -> None:
    """From then on MindSpore hands zeros over: momentum moves the part still, wrapped
    or not, until an optimizer is made without it.
    """
    runs = [Run(wrapped) for wrapped in (True, False)]
    for run in runs:
        before = run.train(end=6)
        run.net.weight.requires_grad = False
    got, wanted = (run.train(end=6) for run in runs)
    require_same(got, wanted)
    assert np.abs(got - before)[:8].max() > 1e-3
    after = Run(net=runs[0].net).train(end=6)
    assert_array_equal(after[:8], got[:8])


def test_freezing_optimizer_is_refused() -> None:
    """`mindspore.boost.FreezeOpt` is no optimizer of MindSpore's."""
    inner = nn.Momentum(make_net().trainable_params(), 0.01, 0.9)
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"optimizer: .*FreezeOpt"):
        gradaccum.wrap(boost.FreezeOpt(inner), steps=3)


by_level = pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"amp_level": "O0"}, 1e-6),
        ({"amp_level": "O1"}, 1e-4),
        ({"amp_level": "O2", "loss_scale_manager": None}, 1e-4),
        ({"amp_level": "O3"}, 1e-4),
        ({"amp_level": "auto"}, 1e-4),
    ],
    ids=str,
)


@by_level
def test_level_equals_large_batches(options: dict[str, Any], bound: float) -> None:
    """The loss is small enough here to need no scale. Float16 leaves 1e-4; an update
    moves parameters by a thousand times as much.
    """
    require_same(Run(**options).train(), Run(False, **options).train(), bound)


@by_level
def test_level_with_a_scale_is_refused(options: dict[str, Any], bound: float) -> None:
    run = Run(loss_scale=gradaccum.DynamicLossScale(), **options)
    with pytest.raises(gradaccum.UsageError, match="never read"):
        run.train()


def test_boost_makes_an_optimizer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore keeps the first boost level of a process in one object."""
    monkeypatch.setattr(boost.AutoBoost, "_instance", None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'params'"):
        Run(boost_level="O1", metrics={"loss": nn.Loss()})


def test_short_last_batch_counts_as_the_others() -> None:
    """Rows 12, 13 and 14 by twos in MindSpore's cell: one batch of two and one of
    one, so that row 14 counts as two rows.
    """
    run = Run()
    with pytest.warns(gradaccum.GradAccumWarning, match="2 and 1 items"):
        run.train(callbacks=[FlushAtEpochEnd(run.opt)], end=15)
    large = Run(wrapped=False)
    large.train()
    rows = [12, 13, 14, 14]
    data = NumpySlicesDataset((X[rows], Y[rows]), shuffle=False).batch(4)
    large.model.train(1, data)
    require_same(values(run.net), values(large.net))


def test_own_dynamic_scale_of_o2_needs_a_device() -> None:
    """MindSpore's error on a CPU, where the page names ``loss_scale_manager=None``."""
    with pytest.raises(ValueError, match="on device `CPU`"):
        Run(amp_level="O2").train()


def test_backup_restores_the_open_window(tmp_path: Path) -> None:
    """Eight micro-batches an epoch: the backup at its end holds a window of two."""
    whole = Run()
    stopped = Run()
    resumed = Run()
    whole.train(epochs=2, end=16)
    for run in (stopped, resumed):
        backup = train.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        run.train(epochs=1, callbacks=[backup], end=16)
    assert stopped.opt.result.micro_step == 2
    for mine, theirs in zip(
        resumed.model.train_network.get_parameters(),
        whole.model.train_network.get_parameters(),
        strict=True,
    ):
        assert_array_equal(mine.asnumpy(), theirs.asnumpy())
    assert resumed.opt.result.optimizer_step == 5


def test_plateau_reduces_the_rate_per_epoch() -> None:
    parameters = []
    for wrapped in (True, False):
        run = Run(wrapped, metrics={"loss": nn.Loss()})
        plateau = train.ReduceLROnPlateau("eval_loss", 0.5, patience=1, min_delta=100.0)
        run.model.fit(3, run.data(), run.data(), callbacks=[plateau])
        assert float(run.opt.learning_rate.asnumpy()) == pytest.approx(0.0025)
        parameters.append(values(run.net))
    require_same(*parameters)


def test_early_stopping_restores_the_best_epoch() -> None:
    """The first one; its last window is short."""
    net = make_net()
    inner = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    opt = gradaccum.wrap(inner, steps=STEPS)
    stopping = train.EarlyStopping(
        "loss", patience=2, min_delta=100.0, restore_best_weights=True
    )
    model = Model(TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), opt))
    model.train(9, Run().data(16), callbacks=[FlushAtEpochEnd(opt), stopping])
    assert opt.result.optimizer_step == 3
    require_same(values(net), Run(wrapped=False).train(end=16))
