"""A call that raises in PyNative leaves the state from before or after the call, never
a mix.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import two_parameters, values
from gradaccum_mindspore import gradient_sum, load_checkpoint_into


class Stop(BaseException):
    """Ctrl-C."""


def gradients(value, dtype=ms.float32):
    return tuple(Tensor(np.full(shape, value), dtype) for shape in (3, 2))


def counted(optimizer):
    return optimizer.result.micro_step, optimizer.result.optimizer_step


class StopsAt:
    """Calls `function`; at call number `call` it raises `Stop`, before or after the
    work.
    """

    def __init__(self, function, call, *, after=False):
        self.function, self.call, self.after, self.calls = function, call, after, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.call and not self.after:
            raise Stop
        result = self.function(*args)
        if self.calls == self.call:
            raise Stop
        return result


def raises(run):
    with pytest.raises(Stop):
        run()


def test_missed_update_is_made_by_flush(monkeypatch):
    """Until then a further micro-batch is refused: it may be the one that raised, and
    would count twice.
    """
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    optimizer(gradients(2.0))
    monkeypatch.setattr(
        optimizer.pynative_window,
        "gradients",
        StopsAt(optimizer.pynative_window.gradients, 1),
    )
    raises(lambda: optimizer(gradients(4.0)))
    assert (values(optimizer), counted(optimizer)) == ([1.0, 1.0], (2, 0))
    with pytest.raises(gradaccum.UsageError, match="flush"):
        optimizer(gradients(4.0))
    assert optimizer.flush()
    assert (values(optimizer), counted(optimizer)) == ([-2.0, -2.0], (0, 1))


def test_interrupted_discard_is_finished(monkeypatch):
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    optimizer(gradients(7.0))
    monkeypatch.setattr(gradient_sum, "write", StopsAt(gradient_sum.write, 2))
    raises(optimizer.discard)
    assert counted(optimizer) == (0, 0)
    optimizer(gradients(1.0))
    optimizer(gradients(1.0))
    assert values(optimizer) == [0.0, 0.0]


def test_first_micro_batch_can_be_retried(monkeypatch):
    """An empty window's sums are cleared again after the failure."""
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    monkeypatch.setattr(gradient_sum, "add_into", StopsAt(gradient_sum.add_into, 2))
    raises(lambda: optimizer(gradients(2.0)))
    assert counted(optimizer) == (0, 0)
    optimizer(gradients(2.0))
    optimizer(gradients(4.0))
    assert values(optimizer) == [-2.0, -2.0]


@pytest.mark.parametrize("policy", ["skip_window", "drop_micro_batch"])
def test_half_added_micro_batch_skips_the_window(policy, monkeypatch, tmp_path):
    """The sums can be neither used nor restored, so the window counts as an overflow,
    also after a resume.
    """
    optimizer = gradaccum.wrap(
        nn.SGD(two_parameters(), 1.0), steps=2, on_overflow=policy
    )
    optimizer(gradients(2.0))
    monkeypatch.setattr(gradient_sum, "add_into", StopsAt(gradient_sum.add_into, 2))
    raises(lambda: optimizer(gradients(4.0)))
    assert counted(optimizer) == (1, 0)
    ms.save_checkpoint(optimizer, str(tmp_path / "interrupted.ckpt"))
    load_checkpoint_into(
        optimizer, ms.load_checkpoint(str(tmp_path / "interrupted.ckpt"))
    )
    assert optimizer(gradients(4.0))
    assert optimizer.result[:3] == (False, True, True)
    assert values(optimizer) == [1.0, 1.0]
    optimizer(gradients(1.0))
    optimizer(gradients(1.0))
    assert values(optimizer) == [0.0, 0.0]


def test_failure_before_adding_changes_nothing(monkeypatch):
    """Scaling by the weight raises, for example because memory runs out."""
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    optimizer(gradients(2.0), 2)
    monkeypatch.setattr(gradient_sum, "scaled", StopsAt(gradient_sum.scaled, 1))
    raises(lambda: optimizer(gradients(4.0), 2))
    optimizer(gradients(4.0), 2)
    assert values(optimizer) == [-2.0, -2.0]


def test_interrupted_state_is_saved_and_loaded(monkeypatch, tmp_path):
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=1)
    monkeypatch.setattr(nn.SGD, "__call__", StopsAt(optimizer.inner.construct, 1))
    raises(lambda: optimizer(gradients(4.0)))
    ms.save_checkpoint(optimizer, str(tmp_path / "interrupted.ckpt"))
    monkeypatch.undo()
    resumed = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=1)
    load_checkpoint_into(
        resumed, ms.load_checkpoint(str(tmp_path / "interrupted.ckpt"))
    )
    assert resumed.flush()
    assert (values(resumed), counted(resumed)) == ([-3.0, -3.0], (0, 1))


SIZES = (1000, 5, 4, 3, 2, 300)


REFUSED = "expected an update that was made or was not"


class Loop(nn.Optimizer):
    """A user's optimizer; an interrupt arrives when it has written `writes`
    parameters.
    """

    writes: int | None = None

    def __init__(self, parameters):
        super().__init__(1.0, parameters)

    def construct(self, of_all_sizes):
        for place, (parameter, gradient) in enumerate(
            zip(self.parameters, of_all_sizes, strict=True)
        ):
            if place == self.writes:
                raise Stop
            ops.assign_add(parameter, -gradient)
        if self.writes == len(of_all_sizes):
            raise Stop
        return True


def interrupted(writes):
    """A window of 1 and 3, whose update was interrupted."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    inner = Loop(
        [
            Parameter(Tensor(np.ones(size, np.float32)), name=f"p{size}")
            for size in SIZES
        ]
    )
    optimizer = gradaccum.wrap(inner, steps=2)
    optimizer(of_all_sizes(1.0))
    inner.writes = writes
    with pytest.raises(Stop):
        optimizer(of_all_sizes(3.0))
    inner.writes = None
    return optimizer


def of_all_sizes(value):
    return tuple(Tensor(np.full(size, value, np.float32)) for size in SIZES)


def firsts(optimizer):
    return [float(parameter.asnumpy()[0]) for parameter in optimizer.parameters]


@pytest.mark.parametrize("writes", [0, 3, 6])
def test_half_made_update_is_refused(writes):
    """No parameter moves a second time, and the window does not count as applied."""
    optimizer = interrupted(writes)
    left = [-1.0] * writes + [1.0] * (6 - writes)
    for call in (
        optimizer.flush,
        lambda: optimizer(of_all_sizes(1.0)),
        optimizer.flush,
    ):
        with pytest.raises(gradaccum.UsageError, match=REFUSED):
            call()
    assert (
        firsts(optimizer),
        optimizer.result.optimizer_step,
        optimizer.result.applied,
    ) == (left, 0, False)
    optimizer.discard()
    for value in (1.0, 3.0):
        optimizer(of_all_sizes(value))
    assert (firsts(optimizer), optimizer.result.optimizer_step) == (
        [value - 2.0 for value in left],
        1,
    )


def test_loaded_checkpoint_goes_on():
    optimizer = interrupted(0)
    optimizer.discard()
    saved = {
        p.name: Parameter(Tensor(p.asnumpy().copy(), p.dtype), name=p.name)
        for p in optimizer.get_parameters()
    }
    optimizer = interrupted(2)
    load_checkpoint_into(optimizer, saved)
    for value in (1.0, 3.0):
        optimizer(of_all_sizes(value))
    assert (firsts(optimizer), optimizer.result.optimizer_step) == ([-1.0] * 6, 1)
