"""Listeners of closed windows, without a framework: who hears what, and when."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from gradaccum import DynamicLossScale, StepResult, until_weight
from gradaccum.kit import Listeners, State, described, make_options, status
from gradaccum.watching import ClosedWindow


def end(step: int = 1, *, applied: bool = True) -> StepResult:
    return StepResult(applied, not applied, False, 2.0, 1.0, 0, step)


def fail(window: ClosedWindow) -> None:
    raise ValueError(f"full disk {window.optimizer_step}")


def test_seconds_since_the_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 12.0, 15.0))
    monkeypatch.setattr(
        "gradaccum.watching.time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    listeners = Listeners()
    listeners.add(print)
    assert listeners.note(end()).seconds == 2.0
    result = StepResult(False, True, False, 2.0, 8.0, 0, 5, 0.5)
    window = listeners.note(result, weight=7.0, micro_batches=4)
    assert window == (5, False, True, False, 2.0, 8.0, 7.0, 4, 3.0, 0.5)


def test_every_listener_hears_though_one_raises() -> None:
    listeners = Listeners()
    heard = []

    def close():
        with listeners.settled():
            listeners.note(end())
            assert not heard, "not before everything is settled"

    listeners.add(fail)
    listeners.add(heard.append)
    with pytest.raises(ValueError, match="full disk") as raised:
        close()
    assert len(heard) == 1
    assert "If an update was due, it has been applied" in raised.value.__notes__[0]


def test_windows_of_one_call_are_told_between() -> None:
    """What a listener raises waits for the end of the call: the call may have another
    worker's windows to close.
    """
    listeners = Listeners()
    heard = []

    def close():
        with listeners.settled():
            for number in (1, 2):
                listeners.note(end(number))
                listeners.tell()
                assert [window.optimizer_step for window in heard] == [
                    *range(1, number + 1)
                ]

    listeners.add(heard.append)
    listeners.add(fail)
    with pytest.raises(ValueError, match=r"full disk 1") as raised:
        close()
    assert "full disk 2" in raised.value.__notes__[1]
    assert not listeners._failures


def test_the_own_error_goes_first() -> None:
    listeners = Listeners()

    def close():
        with listeners.settled():
            listeners.note(end())
            raise KeyError("the update's")

    listeners.add(fail)
    with pytest.raises(KeyError) as raised:
        close()
    assert "full disk" in raised.value.__notes__[0]


def test_removed_and_copied_listeners_hear_nothing() -> None:
    listeners = Listeners()
    heard = []
    handle = listeners.add(heard.append)
    assert not copy.deepcopy(listeners).added
    handle.remove()
    handle.remove()
    assert not listeners.added


def test_status_is_one_line() -> None:
    options = make_options(4, clip_norm=1.0, loss_scale=DynamicLossScale())
    state = State(2, 17, 1, 2.0, False, 65536.0, 3)
    said = "micro-batch 2 of 4, update 17, 1 skipped, scale 65536"
    assert status(state, 4) == said
    assert (
        described("AccumulatingOptimizer", "SGD", options, state, 4)
        == "AccumulatingOptimizer(SGD, steps=4, clip_norm=1.0, loss_scale=dynamic |"
        f" {said})"
    )
    assert status(State(0, 0, 0, 0.0, False, 1.0, 0), None) == "micro-batch 0, update 0"
    assert (
        status(State(2, 3, 0, 96.0, False, 1.0, 0), until_weight(128))
        == "micro-batch 2, weight 96 of 128, update 3"
    )
    by_weight = make_options(until_weight(128))
    assert described("A", "B", by_weight, state, None).startswith(
        "A(B, steps=until_weight(128) | micro-batch"
    )
    by_function = make_options(len)
    assert described("A", "B", by_function, state, 4).startswith("A(B, steps=len | ")


def test_updates_are_heard_without_arguments() -> None:
    """Not the windows that were skipped."""
    listeners = Listeners()
    heard = []
    listeners.on_update(lambda: heard.append("update"))
    for applied in (True, False, True):
        with listeners.settled():
            listeners.note(end(applied=applied))
    assert heard == ["update"] * 2
