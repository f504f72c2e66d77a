"""A call that raises in PyNative leaves the state from before or after the call, never
a mix.
"""

from contextlib import contextmanager
from itertools import count

import mindspore as ms
import pytest
from mindspore import nn, ops

import gradaccum
from gradaccum import CheckpointError, UsageError
from gradaccum_mindspore import gradient_sum, load_checkpoint_into

from .mindspore_common import entries_of, two_gradients, two_parameters, values


class Stop(BaseException):
    """Ctrl-C."""


def wrapped(**options):
    return gradaccum.wrap(nn.SGD(two_parameters(), 1.0), **{"steps": 2, **options})


def counted(optimizer):
    return optimizer.result.micro_step, optimizer.result.optimizer_step


@contextmanager
def stopped(place, name, call=1):
    """At call number `call` this function of `place` raises."""
    function = getattr(place, name)
    calls = count(1)

    def stops(*args):
        if next(calls) == call:
            raise Stop
        return function(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, stops)
        with pytest.raises(Stop):
            yield


def saved_and_loaded(optimizer, into, folder):
    ms.save_checkpoint(optimizer, str(folder / "interrupted.ckpt"))
    load_checkpoint_into(into, ms.load_checkpoint(str(folder / "interrupted.ckpt")))


@pytest.mark.parametrize("steps", [2, gradaccum.until_weight(4)], ids=str)
def test_missed_update_is_made_by_flush(steps, tmp_path):
    """Until then a further micro-batch is refused: it may be the one that raised, and
    would count twice. Also after a resume.
    """
    optimizer = wrapped(steps=steps)
    resumed = wrapped(steps=steps)
    optimizer(two_gradients(2.0), 2)
    with stopped(gradient_sum, "divided"):
        optimizer(two_gradients(4.0), 2)
    assert values(optimizer) == [1.0, 1.0]
    assert counted(optimizer) == (2, 0)
    saved_and_loaded(optimizer, resumed, tmp_path)
    for each in (optimizer, resumed):
        with pytest.raises(UsageError, match="flush"):
            each(two_gradients(4.0), 2)
        assert each.flush()
        assert values(each) == [-2.0, -2.0]
        assert counted(each) == (0, 1)


@pytest.mark.parametrize("policy", ["skip_window", "drop_micro_batch"])
@pytest.mark.parametrize("micro_batches", [0, 1])
def test_half_added_micro_batch_is_refused_until_discard(
    policy, micro_batches, tmp_path
):
    """Only some sums hold it. A checkpoint of it is refused too."""
    optimizer = wrapped(on_overflow=policy)
    for _ in range(micro_batches):
        optimizer(two_gradients(2.0), 1, 2.0)
    with stopped(gradient_sum, "add_into", 2):
        optimizer(two_gradients(4.0), 1, 50.0)
    for call in (lambda: optimizer(two_gradients(4.0), 1, 4.0), optimizer.flush):
        with pytest.raises(UsageError, match="discard"):
            call()
    with pytest.raises(CheckpointError, match="micro_step"):
        saved_and_loaded(optimizer, wrapped(on_overflow=policy), tmp_path)
    optimizer.discard()
    for value in (1.0, 3.0):
        optimizer(two_gradients(value), 1, value)
    assert values(optimizer) == [-1.0, -1.0]
    assert optimizer.result.loss == 2.0


class Loop(nn.Optimizer):
    """A user's optimizer; an interrupt arrives when it has written `writes`
    parameters.
    """

    writes: int | None = None

    def construct(self, gradients):
        for place, gradient in enumerate(gradients):
            if place == self.writes:
                raise Stop
            ops.assign_add(self.parameters[place], -gradient)
        if self.writes == len(gradients):
            raise Stop
        return True


def interrupted(writes):
    """A window of 1 and 3, whose update was interrupted."""
    inner = Loop(1.0, two_parameters())
    optimizer = gradaccum.wrap(inner, steps=2)
    optimizer(two_gradients(1.0))
    inner.writes = writes
    with pytest.raises(Stop):
        optimizer(two_gradients(3.0))
    inner.writes = None
    return optimizer


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_half_made_update_is_refused(writes):
    """No parameter moves a second time, and the window does not count as applied, until
    it is discarded or another state is loaded.
    """
    fresh = wrapped()
    entries = entries_of(fresh)
    left = [-1.0] * writes + [1.0] * (2 - writes)
    for start, release in (
        (left, lambda optimizer: optimizer.discard()),
        ([1.0, 1.0], lambda optimizer: load_checkpoint_into(optimizer, entries)),
    ):
        optimizer = interrupted(writes)
        for call in (
            optimizer.flush,
            lambda optimizer=optimizer: optimizer(two_gradients(1.0)),
            optimizer.flush,
        ):
            with pytest.raises(UsageError, match="expected no half-finished update"):
                call()
        assert values(optimizer) == left
        release(optimizer)
        for value in (1.0, 3.0):
            optimizer(two_gradients(value))
        assert values(optimizer) == [each - 2.0 for each in start]
        assert optimizer.result.optimizer_step == 1
