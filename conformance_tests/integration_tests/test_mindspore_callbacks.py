"""MindSpore's callbacks of a training with a wrapped optimizer: as on the large batches, saved and resumed bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("GLOG_v", "4")
ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402
from mindspore.train import (  # noqa: E402
    BackupAndRestore,
    Callback,
    CheckpointConfig,
    EarlyStopping,
    History,
    LambdaCallback,
    LossMonitor,
    ModelCheckpoint,
    OnRequestExit,
    ReduceLROnPlateau,
    SummaryCollector,
    TimeMonitor,
)

from conformance_tests.integration_tests.mindspore_runs import START, values  # noqa: E402
from conformance_tests.integration_tests.mindspore_training import Run, by_hand, data, everything, pynative_after, same, set_mode  # noqa: E402, F401
from gradaccum_mindspore import FlushAtEpochEnd, load_checkpoint_into  # noqa: E402


@pytest.mark.parametrize("graph", [False, True], ids=["pynative", "graph"])
def test_checkpoint_in_mid_window_resumes(graph: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit. The monitors count micro-batches."""
    set_mode(graph)
    saver = ModelCheckpoint("run", str(tmp_path), CheckpointConfig(save_checkpoint_steps=4))
    whole = Run(wrapped=True, cell=True)
    whole.train(callbacks=[LossMonitor(2), TimeMonitor(), saver])
    assert capsys.readouterr().out.count("loss is") == 3
    saved = ms.load_checkpoint(str(tmp_path / "run-1_4.ckpt"))
    assert (saved["gradaccum.micro_step"].asnumpy(), saved["gradaccum.optimizer_step"].asnumpy()) == (1, 1)
    resumed = Run(wrapped=True, cell=True)
    load_checkpoint_into(resumed.model.train_network, saved)
    resumed.model.train(1, data(2, first=8), dataset_sink_mode=False)
    assert everything(resumed.model) == everything(whole.model)
    same(values(resumed.net), by_hand(1, (0, 6), (6, 12)))


def test_backup_restores_the_open_window(tmp_path: Path) -> None:
    """Eight micro-batches an epoch: the backup at its end holds a window of two."""
    whole, stopped, resumed = (Run(wrapped=True, cell=True) for _ in range(3))
    whole.train(epochs=2, end=16)
    stopped.train(callbacks=[BackupAndRestore(str(tmp_path), delete_checkpoint=False)], end=16)
    assert stopped.opt.result.micro_step == 2
    resumed.train(callbacks=[BackupAndRestore(str(tmp_path), delete_checkpoint=False)], end=16)
    assert everything(resumed.model) == everything(whole.model)
    assert resumed.opt.result.optimizer_step == 5


def test_plateau_reduces_the_rate_per_epoch() -> None:
    runs = [Run(wrapped, metrics={"loss": nn.Loss()}) for wrapped in (True, False)]
    for run in runs:
        plateau = ReduceLROnPlateau("eval_loss", 0.5, patience=1, min_delta=100.0)
        run.model.fit(3, data(run.size), data(12), callbacks=[plateau], dataset_sink_mode=False)
        assert float(run.opt.learning_rate.asnumpy()) == pytest.approx(0.0025)
    same(*(values(run.net) for run in runs))


@pytest.fixture
def handlers_after() -> Iterator[None]:
    """`OnRequestExit` leaves its handler of a signal behind, which would keep this process from ending."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handlers_after")
def test_watching_callbacks_change_nothing(tmp_path: Path) -> None:
    seen: list[int] = []
    heard = LambdaCallback(on_train_step_end=lambda run_context: seen.append(run_context.original_args().cur_step_num))
    run, history = Run(wrapped=True), History()
    got = run.train(callbacks=[history, heard, OnRequestExit(save_mindir=False), SummaryCollector(str(tmp_path), collect_freq=1)])
    same(got, by_hand(1, (0, 6), (6, 12)))
    assert seen == [1, 2, 3, 4, 5, 6]
    assert list(history.epoch["epoch"]) == [1]


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "bare"])
def test_monitor_stops_at_a_loss_that_is_nan(wrapped: bool) -> None:
    """`LossMonitor` raises, whatever a window that is skipped would do. Without it the window is skipped and training goes on."""
    run = Run(wrapped)
    ms.ops.assign(run.net.bias, Tensor(np.full(2, np.nan, np.float32)))
    with pytest.raises(ValueError, match="loss is NAN or INF"):
        run.train(callbacks=[LossMonitor(1)])
    if wrapped:
        run.opt.discard()
        run.train()
        assert (run.opt.result.skipped, run.opt.result.optimizer_step) == (True, 0)
        np.testing.assert_array_equal(values(run.net)[:8], START[:8])


class Epochs(Callback):  # type: ignore[misc]
    """Counts them."""

    seen = 0

    def on_train_epoch_end(self, run_context: Any) -> None:
        self.seen += 1


def test_early_stopping_restores_the_best_epoch() -> None:
    """The first one; its last window is short."""
    run, epochs = Run(wrapped=True, cell=True, eval_network=None), Epochs()
    stopping = EarlyStopping("loss", patience=2, min_delta=100.0, restore_best_weights=True)
    run.train(9, [FlushAtEpochEnd(run.opt), stopping, epochs], end=16)
    assert epochs.seen == 3
    same(values(run.net), by_hand(1, (0, 6), (6, 12), (12, 16)))
    assert (run.opt.result.micro_step, run.opt.result.optimizer_step) == (0, 3)
