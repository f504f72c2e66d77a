"""A call that raises in PyNative leaves the state before it or the state after it, never a mix of the two."""

import os

import pytest

os.environ.setdefault("GLOG_v", "4")
ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn  # noqa: E402
from mindspore.experimental import optim  # noqa: E402

import gradaccum  # noqa: E402
from gradaccum_mindspore import load_checkpoint_into, masters, pynative_sums, pynative_window  # noqa: E402


class Stop(BaseException):
    """Ctrl-C."""


def two_parameters(dtype=ms.float32):
    return [Parameter(Tensor(np.ones(shape), dtype), name=name) for name, shape in (("a", 3), ("b", 2))]


def gradients(value, dtype=ms.float32):
    return tuple(Tensor(np.full(shape, value), dtype) for shape in (3, 2))


def values(optimizer):
    return [float(p.asnumpy()[0]) for p in optimizer.parameters]


def counted(optimizer):
    return optimizer.result.micro_step, optimizer.result.optimizer_step


class StopsAt:
    """Calls a function, and raises before or after one of its calls, once."""

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


INNER = {"SGD": lambda ps: nn.SGD(ps, 1.0), "experimental SGD": lambda ps: optim.SGD(ps, 1.0)}


@pytest.mark.parametrize("kind", INNER)
def test_an_update_that_was_made_is_not_made_again(kind, monkeypatch):
    """A hook raises, or the user presses Ctrl-C, after the inner optimizer's call."""
    optimizer = gradaccum.wrap(INNER[kind](two_parameters()), steps=2)
    optimizer(gradients(2.0))
    monkeypatch.setattr(type(optimizer.inner), "__call__", StopsAt(optimizer.inner.construct, 1, after=True))
    raises(lambda: optimizer(gradients(4.0)))
    assert values(optimizer) == [-2.0, -2.0]
    assert counted(optimizer) == (0, 1)
    assert optimizer.result.applied
    assert not optimizer.flush()
    assert values(optimizer) == [-2.0, -2.0]


def test_an_update_that_was_not_made_is_made_by_flush(monkeypatch):
    """A micro-batch more is refused meanwhile: it would count twice, if it is the one that raised."""
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    optimizer(gradients(2.0))
    monkeypatch.setattr(nn.SGD, "__call__", StopsAt(optimizer.inner.construct, 1))
    raises(lambda: optimizer(gradients(4.0)))
    assert (values(optimizer), counted(optimizer)) == ([1.0, 1.0], (2, 0))
    with pytest.raises(gradaccum.UsageError, match="flush"):
        optimizer(gradients(4.0))
    assert optimizer.flush()
    assert (values(optimizer), counted(optimizer)) == ([-2.0, -2.0], (0, 1))


def test_a_half_rounded_model_is_rounded(monkeypatch):
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(ms.float16), 1.0), steps=1, master_weights=True)
    monkeypatch.setattr(masters, "write", StopsAt(masters.write, 2))
    raises(lambda: optimizer(gradients(3.0, ms.float16)))
    assert (values(optimizer), counted(optimizer)) == ([-2.0, -2.0], (0, 1))


@pytest.mark.parametrize("part", ["clear", "push"])
@pytest.mark.parametrize("value", [2.0, np.inf])
def test_a_close_that_is_interrupted_is_finished(part, value, monkeypatch):
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=1)
    if part == "clear":
        monkeypatch.setattr(pynative_sums, "write", StopsAt(pynative_sums.write, 2))
    else:
        monkeypatch.setattr(optimizer.storage, "_assign", StopsAt(optimizer.storage._assign, 3), raising=False)
    raises(lambda: optimizer(gradients(value)))
    assert (values(optimizer)[0], counted(optimizer)) == ((-1.0, (0, 1)) if value == 2.0 else (1.0, (0, 0)))
    optimizer(gradients(1.0))
    assert values(optimizer) == [-2.0, -2.0] if value == 2.0 else [0.0, 0.0]


def test_a_discard_that_is_interrupted_is_finished(monkeypatch):
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    optimizer(gradients(7.0))
    monkeypatch.setattr(pynative_sums, "write", StopsAt(pynative_sums.write, 2))
    raises(optimizer.discard)
    assert counted(optimizer) == (0, 0)
    optimizer(gradients(1.0))
    optimizer(gradients(1.0))
    assert values(optimizer) == [0.0, 0.0]


def test_a_first_micro_batch_that_raised_can_be_tried_again(monkeypatch):
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    monkeypatch.setattr(pynative_window, "add_into", StopsAt(pynative_window.add_into, 2))
    raises(lambda: optimizer(gradients(2.0)))
    assert counted(optimizer) == (0, 0)
    optimizer(gradients(2.0))
    optimizer(gradients(4.0))
    assert values(optimizer) == [-2.0, -2.0]


@pytest.mark.parametrize("policy", ["skip_window", "drop_micro_batch"])
def test_a_window_with_half_a_micro_batch_is_skipped(policy, monkeypatch, tmp_path):
    """What is in the sums can neither be used nor taken back, so the window says overflow, also after a resume."""
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2, on_overflow=policy)
    optimizer(gradients(2.0))
    monkeypatch.setattr(pynative_window, "add_into", StopsAt(pynative_window.add_into, 2))
    raises(lambda: optimizer(gradients(4.0)))
    assert counted(optimizer) == (1, 0)
    ms.save_checkpoint(optimizer, str(tmp_path / "interrupted.ckpt"))
    load_checkpoint_into(optimizer, ms.load_checkpoint(str(tmp_path / "interrupted.ckpt")))
    assert optimizer(gradients(4.0))
    assert optimizer.result[:3] == (False, True, True)
    assert values(optimizer) == [1.0, 1.0]
    optimizer(gradients(1.0))
    optimizer(gradients(1.0))
    assert values(optimizer) == [0.0, 0.0]


def test_memory_that_runs_out_before_adding_changes_nothing(monkeypatch):
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    optimizer(gradients(2.0), 2)
    monkeypatch.setattr(pynative_sums, "scaled", StopsAt(pynative_sums.scaled, 1))
    raises(lambda: optimizer(gradients(4.0), 2))
    optimizer(gradients(4.0), 2)
    assert values(optimizer) == [-2.0, -2.0]


def test_the_state_an_interrupt_leaves_can_be_saved_and_loaded(monkeypatch, tmp_path):
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=1)
    monkeypatch.setattr(nn.SGD, "__call__", StopsAt(optimizer.inner.construct, 1))
    raises(lambda: optimizer(gradients(4.0)))
    ms.save_checkpoint(optimizer, str(tmp_path / "interrupted.ckpt"))
    monkeypatch.undo()
    resumed = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=1)
    load_checkpoint_into(resumed, ms.load_checkpoint(str(tmp_path / "interrupted.ckpt")))
    assert resumed.flush()
    assert (values(resumed), counted(resumed)) == ([-3.0, -3.0], (0, 1))
