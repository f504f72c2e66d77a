"""Loading in the middle of a window: a wrong checkpoint changes nothing, and names of
the state are no layer's.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import gradaccum
from gradaccum_mindspore import load_checkpoint_into

from .mindspore_common import (
    X,
    Y,
    make_net,
    pynative_after,  # noqa: F401
)


def cell():
    net = make_net()
    optimizer = gradaccum.wrap(nn.Adam(net.trainable_params(), 0.1), steps=4)
    return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)


def entries_of(step):
    return {name: Tensor(p.asnumpy()) for name, p in step.parameters_dict().items()}


def everything(step):
    return {name: p.asnumpy().tobytes() for name, p in step.parameters_dict().items()}


SUM = "weight.gradaccum.grad_sum"
FAULTS = {
    "missing field": ("gradaccum.growth_tracker", None),
    "missing sum": (SUM, None),
    "dtype": (SUM, Tensor(np.zeros((2, 4), np.float16))),
    "format": ("gradaccum.terms", Tensor([2, 0, 0, 0, 4], ms.int32)),
}


@pytest.mark.parametrize(("name", "value"), FAULTS.values(), ids=FAULTS)
def test_unfit_checkpoint_is_refused_whole(name, value):
    source = cell()
    target = cell()
    for step, size in ((source, 3), (target, 5)):
        step(Tensor(X[:size]), Tensor(Y[:size]))
    entries = {**entries_of(source), name: value}
    if value is None:
        del entries[name]
    before = everything(target)
    with pytest.raises(gradaccum.CheckpointError, match="expected"):
        load_checkpoint_into(target, entries)
    assert everything(target) == before
