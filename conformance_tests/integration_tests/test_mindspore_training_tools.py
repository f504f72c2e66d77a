"""MindSpore's training tools (schedules, datasets, sinks, frozen parts): with a wrapped
optimizer all is as on large batches.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, amp, boost, nn, train  # noqa: E402
from mindspore.nn import learning_rate_schedule  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.integration_tests.mindspore_runs import (  # noqa: E402
    PART,
    START,
    STEPS,
    Make,
    X,
    Y,
    assert_equals_large_batches,
    make_net,
    values,
)
from conformance_tests.integration_tests.mindspore_training import (  # noqa: E402
    WHOLE,
    Run,
    by_hand,
    data,
    everything,
    momentum,
    pynative_after,  # noqa: F401
    same,
    set_mode,
)
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell, load_checkpoint_into  # noqa: E402

os.environ.setdefault("GLOG_v", "4")


RATES: dict[str, Make] = {
    "CosineDecayLR": lambda net: nn.CosineDecayLR(0.01, 0.1, 4),
    "ExponentialDecayLR": lambda net: nn.ExponentialDecayLR(0.1, 0.5, 1),
    "InverseDecayLR": lambda net: nn.InverseDecayLR(0.1, 0.5, 1),
    "NaturalExpDecayLR": lambda net: nn.NaturalExpDecayLR(0.1, 0.5, 1),
    "PolynomialDecayLR": lambda net: nn.PolynomialDecayLR(0.1, 0.01, 4, 2.0),
    "WarmUpLR": lambda net: nn.WarmUpLR(0.1, 4),
}


def test_rates_are_mindspores() -> None:
    kinds = vars(learning_rate_schedule).values()
    found = {
        kind.__name__
        for kind in kinds
        if isinstance(kind, type)
        and issubclass(kind, nn.learning_rate_schedule.LearningRateSchedule)
    }
    assert found - {"LearningRateSchedule"} == set(RATES)


@pytest.mark.parametrize("name", RATES)
def test_rate_moves_per_update(name: str) -> None:
    assert_equals_large_batches(
        lambda net: nn.SGD(net.trainable_params(), RATES[name](net))
    )


def test_weight_decay_and_list_of_rates_move_per_update() -> None:
    rates, decay = [0.1, 0.2, 0.3], nn.ExponentialDecayLR(0.1, 0.5, 1)
    assert_equals_large_batches(
        lambda net: nn.Momentum(net.trainable_params(), rates, 0.9, weight_decay=decay)
    )


@pytest.mark.parametrize("cell", [True, False], ids=["by items", "by micro-batches"])
def test_short_last_batch_of_a_dataset(cell: bool) -> None:
    """Rows 12, 13 and 14 by twos: one batch of two and one of one. The package's cell
    weighs them by their rows, MindSpore's own alike.
    """
    run = Run(wrapped=True, cell=cell)
    got = run.train(2, [FlushAtEpochEnd(run.opt)], end=15)
    assert run.opt.result.optimizer_step == 6
    by_items = by_hand(2, (0, 6), (6, 12), (12, 15))
    if cell:
        same(got, by_items)
    else:
        assert np.abs(got - by_items).max() > 1e-4
        same(got, by_micro_batches())


def by_micro_batches() -> Any:
    """Two epochs in which the last window is the mean of two micro-batches' means."""
    net, mse = make_net(), nn.MSELoss()
    optimizer = momentum(net)
    rows = [slice(0, 6)], [slice(6, 12)], [slice(12, 14), slice(14, 15)]
    backward = ms.value_and_grad(
        lambda x, y: mse(net(x), y), None, optimizer.parameters
    )
    for window in rows * 2:
        parts = [backward(Tensor(X[each]), Tensor(Y[each]))[1] for each in window]
        optimizer(tuple(sum(part) / len(part) for part in zip(*parts, strict=True)))
    return values(net)


@pytest.mark.parametrize("graph", [False, True], ids=["pynative", "graph"])
def test_frozen_part_stays(graph: bool) -> None:
    set_mode(graph)
    runs = []
    for wrapped in (True, False):
        net = make_net()
        net.weight.requires_grad = False
        runs.append(Run(wrapped, net=net))
    got, wanted = (run.train() for run in runs)
    same(got, wanted)
    np.testing.assert_array_equal(got[:8], START[:8])
    assert [p.name for p in runs[0].opt.parameters] == ["bias"]


def test_freezing_later_needs_another_optimizer() -> None:
    """From then on MindSpore hands zeros over: momentum moves the part still, wrapped
    or not, until an optimizer is made without it.
    """
    runs = [Run(wrapped) for wrapped in (True, False)]
    for run in runs:
        run.train(end=6)
        run.net.weight.requires_grad = False
    got, wanted = (run.train(end=6) for run in runs)
    same(got, wanted)
    assert np.abs(got - by_hand(2, (0, 6)))[:8].max() > 1e-3, (
        "the gradients were not zeros"
    )
    after = Run(wrapped=True, net=runs[0].net).train(end=6)
    np.testing.assert_array_equal(after[:8], got[:8])
    assert np.abs(after[8:] - got[8:]).max() > 1e-3


@pytest.mark.parametrize("size", [-1, 4])
def test_sink_on_cpu_is_no_sink(size: int) -> None:
    """MindSpore trains on a CPU without a sink whatever it is asked; windows stay
    whole, though MindSpore calls ``sink_size`` the epoch.
    """
    if ms.get_context("device_target") != "CPU":
        pytest.skip("sinks on a device are in the tests of FlushAtEpochEnd")
    run = Run(wrapped=True)
    got = run.train(
        2, [FlushAtEpochEnd(run.opt)], end=16, dataset_sink_mode=True, sink_size=size
    )
    assert run.opt.result.optimizer_step == 6
    same(got, by_hand(2, (0, 6), (6, 12), (12, 16)))


def test_freezing_optimizer_is_refused() -> None:
    """`mindspore.boost.FreezeOpt` is no optimizer of MindSpore's, and builds its own
    from the class that it is given.
    """
    net = make_net()
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"optimizer: .*FreezeOpt"):
        gradaccum.wrap(boost.FreezeOpt(momentum(net)), steps=3)
    with pytest.raises(TypeError, match="params"):
        boost.FreezeOpt(gradaccum.wrap(momentum(net), steps=3))


def test_all_frozen_is_mindspores_error() -> None:
    """Nothing of it is trainable: MindSpore's optimizer raises before there is anything
    to wrap.
    """
    net = make_net()
    for parameter in net.get_parameters():
        parameter.requires_grad = False
    with pytest.raises(ValueError, match="empty"):
        TrainOneStepCell(
            nn.WithLossCell(net, nn.MSELoss()), gradaccum.wrap(momentum(net), steps=3)
        )


os.environ.setdefault("GLOG_v", "4")


LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"amp_level": "O0"},
    "O1": {"amp_level": "O1"},
    "O2": {"amp_level": "O2", "loss_scale_manager": None},
    "O3": {"amp_level": "O3"},
    "auto": {"amp_level": "auto"},
    "boost": {"boost_level": "O1"},
}


HALF = 1e-4


"""What float16 leaves of the agreement; an update moves parameters by a thousand times
as much.
"""


@pytest.mark.parametrize("name", LEVELS)
def test_level_equals_large_batches(name: str) -> None:
    """The loss is small enough here to need no scale."""
    got, wanted = (Run(wrapped, **LEVELS[name]).train() for wrapped in (True, False))
    exact = name in ("O0", "boost")
    same(got, wanted, within=1e-6 if exact else HALF)
    assert np.array_equal(wanted, by_hand(1, (0, 6), (6, 12))) == exact, (
        "the level changes what is computed"
    )


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
def test_own_dynamic_scale_of_o2_needs_a_device(wrapped: bool) -> None:
    """MindSpore's error on a CPU. There ``loss_scale_manager=None`` is for the wrapped
    optimizer's scale, as below.
    """
    if ms.get_context("device_target") != "CPU":
        pytest.skip("a gap of the CPU only")
    with pytest.raises(ValueError, match="on device `CPU`"):
        Run(wrapped, amp_level="O2").train()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_level_with_the_wrapped_optimizers_scale(level: str) -> None:
    """Halved once by an overflow in the middle of the second window, which is skipped
    whole.
    """
    plain = make_net()
    net = amp.auto_mixed_precision(plain, level)
    opt = gradaccum.wrap(
        momentum(net), steps=STEPS, loss_scale=gradaccum.DynamicLossScale(2.0**10)
    )
    mse = nn.MSELoss()
    cell = TrainOneStepCell(
        nn.WithLossCell(net, lambda out, y: mse(out.astype(ms.float32), y)), opt
    )
    train.Model(cell).train(1, data(PART, end=6), dataset_sink_mode=False)
    for factor in (1.0, 1e6, 1.0):
        cell(Tensor(X[6:8] * np.float32(factor)), Tensor(Y[6:8]))
    assert (opt.result.skipped, opt.result.overflow, opt.result.loss_scale) == (
        True,
        True,
        2.0**9,
    )
    train.Model(cell).train(1, data(PART, first=6), dataset_sink_mode=False)
    assert opt.result.optimizer_step == 2
    same(values(plain), by_hand(1, (0, 6), (6, 12)), within=HALF)


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_build_train_network(level: str) -> None:
    nets = []
    for wrapped in (True, False):
        net = make_net()
        opt = gradaccum.wrap(momentum(net), steps=STEPS) if wrapped else momentum(net)
        step = amp.build_train_network(
            net, opt, nn.MSELoss(), level, loss_scale_manager=None
        )
        size = PART if wrapped else PART * STEPS
        for first in range(0, WHOLE, size):
            step(Tensor(X[first : first + size]), Tensor(Y[first : first + size]))
        nets.append(net)
    same(*map(values, nets), within=1e-6 if level == "O0" else HALF)


os.environ.setdefault("GLOG_v", "4")


@pytest.mark.parametrize("graph", [False, True], ids=["pynative", "graph"])
def test_checkpoint_in_mid_window_resumes(
    graph: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit. The monitors count micro-batches."""
    set_mode(graph)
    saver = train.ModelCheckpoint(
        "run", str(tmp_path), train.CheckpointConfig(save_checkpoint_steps=4)
    )
    whole = Run(wrapped=True, cell=True)
    whole.train(callbacks=[train.LossMonitor(2), train.TimeMonitor(), saver])
    assert capsys.readouterr().out.count("loss is") == 3
    saved = ms.load_checkpoint(str(tmp_path / "run-1_4.ckpt"))
    assert (
        saved["gradaccum.micro_step"].asnumpy(),
        saved["gradaccum.optimizer_step"].asnumpy(),
    ) == (1, 1)
    resumed = Run(wrapped=True, cell=True)
    load_checkpoint_into(resumed.model.train_network, saved)
    resumed.model.train(1, data(2, first=8), dataset_sink_mode=False)
    assert everything(resumed.model) == everything(whole.model)
    same(values(resumed.net), by_hand(1, (0, 6), (6, 12)))


def test_backup_restores_the_open_window(tmp_path: Path) -> None:
    """Eight micro-batches an epoch: the backup at its end holds a window of two."""
    whole, stopped, resumed = (Run(wrapped=True, cell=True) for _ in range(3))
    whole.train(epochs=2, end=16)
    stopped.train(
        callbacks=[train.BackupAndRestore(str(tmp_path), delete_checkpoint=False)],
        end=16,
    )
    assert stopped.opt.result.micro_step == 2
    resumed.train(
        callbacks=[train.BackupAndRestore(str(tmp_path), delete_checkpoint=False)],
        end=16,
    )
    assert everything(resumed.model) == everything(whole.model)
    assert resumed.opt.result.optimizer_step == 5


def test_plateau_reduces_the_rate_per_epoch() -> None:
    runs = [Run(wrapped, metrics={"loss": nn.Loss()}) for wrapped in (True, False)]
    for run in runs:
        plateau = train.ReduceLROnPlateau("eval_loss", 0.5, patience=1, min_delta=100.0)
        run.model.fit(
            3, data(run.size), data(12), callbacks=[plateau], dataset_sink_mode=False
        )
        assert float(run.opt.learning_rate.asnumpy()) == pytest.approx(0.0025)
    same(*(values(run.net) for run in runs))


@pytest.fixture
def handlers_after() -> Iterator[None]:
    """`OnRequestExit` leaves its handler of a signal behind, which would keep this
    process from ending.
    """
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handlers_after")
def test_watching_callbacks_change_nothing(tmp_path: Path) -> None:
    seen: list[int] = []
    heard = train.LambdaCallback(
        on_train_step_end=lambda run_context: seen.append(
            run_context.original_args().cur_step_num
        )
    )
    run, history = Run(wrapped=True), train.History()
    got = run.train(
        callbacks=[
            history,
            heard,
            train.OnRequestExit(save_mindir=False),
            train.SummaryCollector(str(tmp_path), collect_freq=1),
        ]
    )
    same(got, by_hand(1, (0, 6), (6, 12)))
    assert seen == [1, 2, 3, 4, 5, 6]
    assert list(history.epoch["epoch"]) == [1]


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "bare"])
def test_monitor_stops_at_a_loss_that_is_nan(wrapped: bool) -> None:
    """`LossMonitor` raises, whatever a window that is skipped would do. Without it the
    window is skipped and training goes on.
    """
    run = Run(wrapped)
    ms.ops.assign(run.net.bias, Tensor(np.full(2, np.nan, np.float32)))
    with pytest.raises(ValueError, match="loss is NAN or INF"):
        run.train(callbacks=[train.LossMonitor(1)])
    if wrapped:
        run.opt.discard()
        run.train()
        assert (run.opt.result.skipped, run.opt.result.optimizer_step) == (True, 0)
        np.testing.assert_array_equal(values(run.net)[:8], START[:8])


class Epochs(train.Callback):  # type: ignore[misc]
    """Counts them."""

    seen = 0

    def on_train_epoch_end(self, run_context: Any) -> None:
        self.seen += 1


def test_early_stopping_restores_the_best_epoch() -> None:
    """The first one; its last window is short."""
    run, epochs = Run(wrapped=True, cell=True, eval_network=None), Epochs()
    stopping = train.EarlyStopping(
        "loss", patience=2, min_delta=100.0, restore_best_weights=True
    )
    run.train(9, [FlushAtEpochEnd(run.opt), stopping, epochs], end=16)
    assert epochs.seen == 3
    same(values(run.net), by_hand(1, (0, 6), (6, 12), (12, 16)))
    assert (run.opt.result.micro_step, run.opt.result.optimizer_step) == (0, 3)
