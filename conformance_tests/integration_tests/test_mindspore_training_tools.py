"""MindSpore's training tools (schedules, datasets, sinks, frozen parts): with a wrapped optimizer all is as on large batches."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("GLOG_v", "4")
ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, boost, nn  # noqa: E402
from mindspore.nn import learning_rate_schedule  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.integration_tests.mindspore_runs import START, Make, X, Y, assert_equals_large_batches, make_net, values  # noqa: E402
from conformance_tests.integration_tests.mindspore_training import Run, by_hand, momentum, pynative_after, same, set_mode  # noqa: E402, F401
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell  # noqa: E402

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
    found = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, nn.learning_rate_schedule.LearningRateSchedule)}
    assert found - {"LearningRateSchedule"} == set(RATES)


@pytest.mark.parametrize("name", RATES)
def test_rate_moves_per_update(name: str) -> None:
    assert_equals_large_batches(lambda net: nn.SGD(net.trainable_params(), RATES[name](net)))


def test_weight_decay_and_list_of_rates_move_per_update() -> None:
    rates, decay = [0.1, 0.2, 0.3], nn.ExponentialDecayLR(0.1, 0.5, 1)
    assert_equals_large_batches(lambda net: nn.Momentum(net.trainable_params(), rates, 0.9, weight_decay=decay))


@pytest.mark.parametrize("cell", [True, False], ids=["by items", "by micro-batches"])
def test_short_last_batch_of_a_dataset(cell: bool) -> None:
    """Rows 12, 13 and 14 by twos: one batch of two and one of one. The package's cell weighs them by their rows, MindSpore's own alike."""
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
    backward = ms.value_and_grad(lambda x, y: mse(net(x), y), None, optimizer.parameters)
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
    """From then on MindSpore hands zeros over: momentum moves the part still, wrapped or not, until an optimizer is made without it."""
    runs = [Run(wrapped) for wrapped in (True, False)]
    for run in runs:
        run.train(end=6)
        run.net.weight.requires_grad = False
    got, wanted = (run.train(end=6) for run in runs)
    same(got, wanted)
    assert np.abs(got - by_hand(2, (0, 6)))[:8].max() > 1e-3, "the gradients were not zeros"
    after = Run(wrapped=True, net=runs[0].net).train(end=6)
    np.testing.assert_array_equal(after[:8], got[:8])
    assert np.abs(after[8:] - got[8:]).max() > 1e-3


@pytest.mark.parametrize("size", [-1, 4])
def test_sink_on_cpu_is_no_sink(size: int) -> None:
    """MindSpore trains on a CPU without a sink whatever it is asked; windows stay whole, though MindSpore calls ``sink_size`` the epoch."""
    if ms.get_context("device_target") != "CPU":
        pytest.skip("sinks on a device are in the tests of FlushAtEpochEnd")
    run = Run(wrapped=True)
    got = run.train(2, [FlushAtEpochEnd(run.opt)], end=16, dataset_sink_mode=True, sink_size=size)
    assert run.opt.result.optimizer_step == 6
    same(got, by_hand(2, (0, 6), (6, 12), (12, 16)))


def test_freezing_optimizer_is_refused() -> None:
    """`mindspore.boost.FreezeOpt` is no optimizer of MindSpore's, and builds its own from the class that it is given."""
    net = make_net()
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"optimizer: .*FreezeOpt"):
        gradaccum.wrap(boost.FreezeOpt(momentum(net)), steps=3)
    with pytest.raises(TypeError, match="params"):
        boost.FreezeOpt(gradaccum.wrap(momentum(net), steps=3))


def test_all_frozen_is_mindspores_error() -> None:
    """Nothing of it is trainable: MindSpore's optimizer raises before there is anything to wrap."""
    net = make_net()
    for parameter in net.get_parameters():
        parameter.requires_grad = False
    with pytest.raises(ValueError, match="empty"):
        TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), gradaccum.wrap(momentum(net), steps=3))
