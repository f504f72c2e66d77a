"""An update in PyNative that raised in the inner optimizer is refused by name until the window is discarded or a checkpoint is loaded."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402
from mindspore.experimental import optim  # noqa: E402

import gradaccum  # noqa: E402
from gradaccum_mindspore import load_checkpoint_into  # noqa: E402

SIZES = (1000, 5, 4, 3, 2, 300)
REFUSED = "expected an update that was made or was not"


class Stop(BaseException):
    """Ctrl-C."""


class Loop(nn.Optimizer):
    """A user's optimizer; an interrupt arrives when it has written `writes` parameters."""

    writes: int | None = None

    def __init__(self, parameters):
        super().__init__(1.0, parameters)

    def construct(self, gradients):
        for place, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if place == self.writes:
                raise Stop
            ops.assign_add(parameter, -gradient)
        if self.writes == len(gradients):
            raise Stop
        return True


def interrupted(writes):
    """A window of 1 and 3, whose update was interrupted."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    inner = Loop([Parameter(Tensor(np.ones(size, np.float32)), name=f"p{size}") for size in SIZES])
    optimizer = gradaccum.wrap(inner, steps=2)
    optimizer(gradients(1.0))
    inner.writes = writes
    with pytest.raises(Stop):
        optimizer(gradients(3.0))
    inner.writes = None
    return optimizer


def gradients(value):
    return tuple(Tensor(np.full(size, value, np.float32)) for size in SIZES)


def values(optimizer):
    return [float(parameter.asnumpy()[0]) for parameter in optimizer.parameters]


@pytest.mark.parametrize("writes", [0, 3, 6])
def test_half_made_update_is_refused(writes):
    """No parameter moves a second time, and the window does not count as applied."""
    optimizer = interrupted(writes)
    left = [-1.0] * writes + [1.0] * (6 - writes)
    for call in (optimizer.flush, lambda: optimizer(gradients(1.0)), optimizer.flush):
        with pytest.raises(gradaccum.UsageError, match=REFUSED):
            call()
    assert (values(optimizer), optimizer.result.optimizer_step, optimizer.result.applied) == (left, 0, False)
    optimizer.discard()
    for value in (1.0, 3.0):
        optimizer(gradients(value))
    assert (values(optimizer), optimizer.result.optimizer_step) == ([value - 2.0 for value in left], 1)


def test_loaded_checkpoint_goes_on():
    optimizer = interrupted(0)
    optimizer.discard()
    saved = {p.name: Parameter(Tensor(p.asnumpy().copy(), p.dtype), name=p.name) for p in optimizer.get_parameters()}
    optimizer = interrupted(2)
    load_checkpoint_into(optimizer, saved)
    for value in (1.0, 3.0):
        optimizer(gradients(value))
    assert (values(optimizer), optimizer.result.optimizer_step) == ([-1.0] * 6, 1)


def test_half_made_by_an_error():
    """MindSpore's experimental Adam counts its step, and then refuses float64 parameters."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    optimizer = gradaccum.wrap(optim.Adam([Parameter(Tensor([1.0, 2.0], ms.float64), name="p")], 0.1), steps=2)
    gradient = (Tensor([1.0, 1.0], ms.float64),)
    optimizer(gradient)
    with pytest.raises(TypeError):
        optimizer(gradient)
    assert (optimizer.result.applied, optimizer.result.optimizer_step) == (False, 0)
    with pytest.raises(gradaccum.UsageError, match=REFUSED):
        optimizer.flush()
