"""MindSpore's mixed precision, levels O0 to O3, and its boost cell around a wrapped optimizer.

From O1 on MindSpore rewrites the network's source, and writes it into a folder of the current one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("GLOG_v", "4")
ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, amp, nn  # noqa: E402
from mindspore.train import Model  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.integration_tests.mindspore_runs import PART, STEPS, X, Y, make_net, values  # noqa: E402
from conformance_tests.integration_tests.mindspore_training import (  # noqa: E402
    WHOLE,
    Run,
    by_hand,
    data,
    momentum,
    pynative_after,  # noqa: F401
    same,
)
from gradaccum_mindspore import TrainOneStepCell  # noqa: E402

LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"amp_level": "O0"},
    "O1": {"amp_level": "O1"},
    "O2": {"amp_level": "O2", "loss_scale_manager": None},
    "O3": {"amp_level": "O3"},
    "auto": {"amp_level": "auto"},
    "boost": {"boost_level": "O1"},
}
HALF = 1e-4
"""What float16 leaves of the agreement; an update moves parameters by a thousand times as much."""


@pytest.mark.parametrize("name", LEVELS)
def test_level_equals_large_batches(name: str) -> None:
    """The loss is small enough here to need no scale."""
    got, wanted = (Run(wrapped, **LEVELS[name]).train() for wrapped in (True, False))
    exact = name in ("O0", "boost")
    same(got, wanted, within=1e-6 if exact else HALF)
    assert np.array_equal(wanted, by_hand(1, (0, 6), (6, 12))) == exact, "the level changes what is computed"


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
def test_own_dynamic_scale_of_o2_needs_a_device(wrapped: bool) -> None:
    """MindSpore's error on a CPU. There ``loss_scale_manager=None`` is for the wrapped optimizer's scale, as below."""
    if ms.get_context("device_target") != "CPU":
        pytest.skip("a gap of the CPU only")
    with pytest.raises(ValueError, match="on device `CPU`"):
        Run(wrapped, amp_level="O2").train()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_level_with_the_wrapped_optimizers_scale(level: str) -> None:
    """Halved once by an overflow in the middle of the second window, which is skipped whole."""
    plain = make_net()
    net = amp.auto_mixed_precision(plain, level)
    opt = gradaccum.wrap(momentum(net), steps=STEPS, loss_scale=gradaccum.DynamicLossScale(2.0**10))
    mse = nn.MSELoss()
    cell = TrainOneStepCell(nn.WithLossCell(net, lambda out, y: mse(out.astype(ms.float32), y)), opt)
    Model(cell).train(1, data(PART, end=6), dataset_sink_mode=False)
    for factor in (1.0, 1e6, 1.0):
        cell(Tensor(X[6:8] * np.float32(factor)), Tensor(Y[6:8]))
    assert (opt.result.skipped, opt.result.overflow, opt.result.loss_scale) == (True, True, 2.0**9)
    Model(cell).train(1, data(PART, first=6), dataset_sink_mode=False)
    assert opt.result.optimizer_step == 2
    same(values(plain), by_hand(1, (0, 6), (6, 12)), within=HALF)


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_build_train_network(level: str) -> None:
    nets = []
    for wrapped in (True, False):
        net = make_net()
        opt = gradaccum.wrap(momentum(net), steps=STEPS) if wrapped else momentum(net)
        step = amp.build_train_network(net, opt, nn.MSELoss(), level, loss_scale_manager=None)
        size = PART if wrapped else PART * STEPS
        for first in range(0, WHOLE, size):
            step(Tensor(X[first : first + size]), Tensor(Y[first : first + size]))
        nets.append(net)
    same(*map(values, nets), within=1e-6 if level == "O0" else HALF)
