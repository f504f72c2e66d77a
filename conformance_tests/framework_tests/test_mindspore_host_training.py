"""The training cell in graph mode on a CPU, where Python chooses the programs: the same
as PyNative, whatever happens in a window.
"""

from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    X,
    Y,
    make_net,
    pynative_after,  # noqa: F401
    set_mode,
)
from gradaccum_mindspore import TrainOneStepCell, load_checkpoint_into, training

OPTIONS = {
    "checked": {},
    "ignore": {"on_overflow": "ignore"},
    "ignore, scale": {"on_overflow": "ignore", "loss_scale": 96.0},
    "drop": {
        "on_overflow": "drop_micro_batch",
        "loss_scale": gradaccum.DynamicLossScale(2.0**7, growth_interval=2),
    },
    "clip": {"clip_norm": 0.1},
    "sum": {"reduction": "sum", "on_overflow": "ignore"},
    "item mean, clip": {"reduction": "sum_per_item", "skip_norm": 1e6},
}


class Stop(BaseException):
    """Ctrl-C."""


def stops(*args):
    raise Stop


def make_cell(mode, weight="items", **options):
    set_mode(mode)
    net = make_net()
    optimizer = gradaccum.wrap(
        nn.Momentum(net.trainable_params(), 0.01, 0.9), steps=3, **options
    )
    more = {} if weight == "items" else {"weight": weight}
    return TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, **more)


def take(cell, *sizes, bad=None):
    """A micro-batch of each size; the one at `bad` holds an inf."""
    for place, size in enumerate(sizes):
        x = np.full_like(X[:size], np.inf) if place == bad else X[place : place + size]
        cell(Tensor(x), Tensor(Y[:size]))


def gradient(cell):
    cell.optimizer(gradients_of(cell), 2.0, 1.5)


def state_of(cell):
    """The result and the parameters."""
    arrays = [p.asnumpy().reshape(-1) for p in cell.optimizer.parameters]
    return np.concatenate([tuple(cell.optimizer.result), *arrays])


def require_close(cell, other, rtol=0.0):
    for one, two in zip(
        cell.optimizer.get_parameters(), other.optimizer.get_parameters(), strict=True
    ):
        np.testing.assert_allclose(
            one.asnumpy(), two.asnumpy(), rtol=rtol, err_msg=one.name
        )


EVENTS = {
    "a window": lambda cell: take(cell, 3, 3, 3),
    "another": lambda cell: take(cell, 4, 4, 4),
    "of uneven weights": lambda cell: take(cell, 3, 5, 4),
    "forgotten": lambda cell: (take(cell, 3, 5), cell.optimizer.discard()),
    "with an overflow": lambda cell: take(cell, 3, 3, 3, bad=1),
    "with an overflow at its end": lambda cell: take(cell, 3, 3, 3, bad=2),
    "that others began": lambda cell: (gradient(cell), take(cell, 3, 5)),
    "that others ended": lambda cell: (take(cell, 3, 5), gradient(cell)),
    "flushed": lambda cell: (take(cell, 3, 4), cell.optimizer.flush()),
    "one more": lambda cell: take(cell, 2, 3, 3),
}

COMPILED = ("that others began", "that others ended", "flushed")
"""They compile a program that decides for itself, which takes seconds: without options
only.
"""


def story(mode, weight, **options):
    """The result and the parameters after each event; an overflow that is ignored would
    end it.
    """
    cell = make_cell(mode, weight, **options)
    ignoring = options.get("on_overflow") == "ignore"
    for name, happen in EVENTS.items():
        if (ignoring and "overflow" in name) or (options and name in COMPILED):
            continue
        happen(cell)
        storage = cell.optimizer.storage
        assert not any(total.asnumpy().any() for total in storage.sums), name
        assert not storage.overflow.item()
        yield name, state_of(cell)


BRIEF = [("checked", "items"), ("ignore", None), ("drop", "items")]


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        pytest.param(*case, marks=[pytest.mark.deep] * (case not in BRIEF))
        for case in product(OPTIONS, ("items", None))
        if case != ("item mean, clip", None)  # It needs a weight.
    ],
)
def test_host_decides_as_pynative_does(options, weight):
    set_mode("pynative")
    expected = dict(story("pynative", weight, **OPTIONS[options]))
    for name, got in story("graph", weight, **OPTIONS[options]):
        np.testing.assert_allclose(
            got, expected[name], rtol=2e-5, atol=1e-6, err_msg=name
        )


def test_weights_that_are_computed():
    """Nothing is known before the micro-batch; one of weight 0 is no part of the
    window, and none is no update.
    """

    def weight(x, y):
        return (x[:, 0] > 0).sum()

    nothing = Tensor(-np.abs(X[:3])), Tensor(Y[:3])
    for options in ({}, {"on_overflow": "ignore"}):
        found = []
        for mode in ("pynative", "graph"):
            cell = make_cell(mode, weight, **options)
            take(cell, 3, 5, 4)
            cell(*nothing)
            take(cell, 5, 4)
            for _ in range(3):
                cell(*nothing)
            assert cell.optimizer.result.skipped
            found.append(state_of(cell))
        np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_loss_that_one_micro_batch_did_not_tell_is_unknown():
    """The cell tells each loss of its own; the optimizer, called by itself, was told
    none.
    """
    cell = make_cell("graph", None, on_overflow="ignore")
    cell.optimizer(gradients_of(cell))
    take(cell, 3, 3)
    assert cell.optimizer.result.applied
    assert np.isnan(cell.optimizer.result.loss)
    take(cell, 3, 3, 3)
    assert np.isfinite(cell.optimizer.result.loss)


def test_interrupted_end_leaves_the_window_open(monkeypatch):
    """After the last micro-batch and before its update: the update is due, and a
    further micro-batch is refused.
    """
    cell, other = make_cell("graph"), make_cell("graph")
    take(cell, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(training.HostWindow, "decision", stops)
        with pytest.raises(Stop):
            take(cell, 5)
    with pytest.raises(gradaccum.UsageError, match="holds 3"):
        take(cell, 5)
    cell.optimizer.flush()
    take(other, 3, 4)
    take(other, 5)
    require_close(cell, other, rtol=1e-6)


@pytest.mark.parametrize("options", ["checked", "ignore"])
def test_resumed_in_mid_window_to_the_bit(options):
    cell, resumed = (make_cell("graph", **OPTIONS[options]) for _ in range(2))
    take(resumed, 3, 3, 3)
    take(cell, 3, 3, 3, 3, 5)
    saved = {
        p.name: Tensor(p.asnumpy().copy(), p.dtype)
        for p in cell.optimizer.get_parameters()
    }
    take(cell, 4)
    load_checkpoint_into(resumed.optimizer, saved)
    take(resumed, 4)
    require_close(cell, resumed)


@pytest.mark.parametrize("options", ["checked", "ignore"])
def test_micro_batches_draw_different_masks(options):
    """Where the last micro-batch of a window is a program of its own, its dropout
    begins the same sequence anew.
    """
    ms.set_seed(1)
    set_mode("graph")
    net = nn.SequentialCell(make_net(), nn.Dropout(p=0.5))
    optimizer = gradaccum.wrap(
        nn.SGD(net.trainable_params(), 0.0), steps=2, **OPTIONS[options]
    )
    cell = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()
    assert len({float(cell(Tensor(X), Tensor(Y))) for _ in range(6)}) == 6


def gradients_of(cell):
    return tuple(
        Tensor(np.full(p.shape, 0.5, np.float32)) for p in cell.optimizer.parameters
    )
