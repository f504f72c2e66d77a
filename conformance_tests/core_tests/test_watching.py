"""Listeners of closed windows, without a framework: who hears what, when, and what the
ready-made ones write.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gradaccum
from gradaccum import (
    ArgumentTypeError,
    MissingPackageError,
    StepResult,
    UsageError,
    Watch,
)
from gradaccum.kit import Listeners, State, described, make_options, status
from gradaccum.watching import ClosedWindow, JsonLines, RichProgress, TensorBoard

WINDOW = ClosedWindow(17, True, False, False, 0.5, 1024.0, 32.0, 4, 0.25, 1.5)
OVERFLOW = WINDOW._replace(
    applied=False, skipped=True, overflow=True, grad_norm=math.inf, loss=math.nan
)


def mid(micro_step: int, *, overflow: bool = False, step: int = 0) -> StepResult:
    return StepResult(False, False, overflow, 0.0, 1.0, micro_step, step)


def end(step: int = 1, *, applied: bool = True, overflow: bool = False) -> StepResult:
    return StepResult(applied, not applied, overflow, 2.0, 1.0, 0, step)


def watched(
    *events: tuple[StepResult, dict[str, float]], **options: Any
) -> list[ClosedWindow]:
    heard: list[ClosedWindow] = []
    watch = Watch(heard.append, **options)
    for result, told in events:
        watch(result, **told)
    return heard


def test_only_closed_windows_are_heard() -> None:
    heard = watched(
        (mid(1), {}),
        (mid(2), {}),
        (end(1), {}),
        (mid(1, step=1), {}),
        (end(1, applied=False), {}),
    )
    assert [(w.optimizer_step, w.applied, w.skipped, w.grad_norm) for w in heard] == [
        (1, True, False, 2.0),
        (1, False, True, 2.0),
    ]
    assert all(
        math.isnan(w.weight) and math.isnan(w.micro_batches) and math.isnan(w.loss)
        for w in heard
    )
    assert all(w.seconds > 0 for w in heard)


def test_seconds_since_the_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 12.0, 15.0))
    monkeypatch.setattr(
        "gradaccum.watching.watch.time",
        SimpleNamespace(perf_counter=lambda: next(clock)),
    )
    listeners = Listeners()
    listeners.add(print)
    assert [listeners.note(end()).seconds for _ in range(2)] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("reduction", "loss"),
    [("mean", (1 * 3 + 2 * 3 + 4 * 2) / 8), ("sum", 7.0), ("sum_per_item", 7 / 8)],
)
def test_told_losses_make_the_large_batch_loss(reduction: str, loss: float) -> None:
    told = [
        {"loss": 1.0, "weight": 3},
        {"loss": 2.0, "weight": 3},
        {"loss": 4.0, "weight": 2},
    ]
    (window,) = watched(
        *zip([mid(1), mid(2), end()], told, strict=True), reduction=reduction
    )
    assert (window.weight, window.micro_batches, window.loss) == (8, 3, loss)


def test_flush_counts_no_micro_batch() -> None:
    told = {"loss": 3.0}
    (window,) = watched((mid(1), told), (mid(2), told), (end(), {}))
    assert (window.micro_batches, window.weight, window.loss) == (2, 2, 3)


def test_flush_of_an_empty_window_is_not_heard() -> None:
    """Two windows with equal results are two."""
    skipped = end(1, applied=False)._replace(grad_norm=math.nan)
    nothing = end()._replace(applied=False)
    told = {"loss": 3.0}
    heard = watched(
        (mid(1), told),
        (end(), told),
        (nothing, {}),
        (nothing, {}),
        (skipped, told),
        (nothing, {}),
        (skipped, told),
        (mid(1), {}),
    )
    assert [(w.applied, w.micro_batches) for w in heard] == [
        (True, 2),
        (False, 1),
        (False, 1),
    ]


def test_discard_forgets() -> None:
    told = {"loss": 3.0}
    (window,) = watched(
        (mid(1), {"loss": 99.0}), (mid(0), {}), (mid(1), told), (end(), told)
    )
    assert (window.micro_batches, window.loss) == (2, 3)


@pytest.mark.parametrize(
    "events",
    [
        [(mid(1), {}), (end(), {"loss": 1.0})],  # the first was not told
        [(end(), {"loss": 1.0})],  # it may have been resumed
        [(mid(3), {"loss": 1.0}), (end(), {"loss": 1.0})],  # it was
    ],
)
def test_unknown_is_nan(events: list[tuple[StepResult, dict[str, float]]]) -> None:
    (window,) = watched(*events)
    assert math.isnan(window.micro_batches)
    assert math.isnan(window.weight)
    assert math.isnan(window.loss)


def test_after_an_unknown_window_all_is_known() -> None:
    told = {"weight": 2.0}
    _, window = watched((end(1), told), (mid(1), told), (end(2), told))
    assert (window.micro_batches, window.weight) == (2, 4)
    assert math.isnan(window.loss)


def test_overflow_has_a_count_only() -> None:
    told = {"loss": 1.0}
    (window,) = watched((mid(1), told), (end(0, applied=False, overflow=True), told))
    assert (window.overflow, window.micro_batches) == (True, 2)
    assert math.isnan(window.weight)


def test_watch_refuses() -> None:
    with pytest.raises(
        ArgumentTypeError,
        match=r"result: expected a StepResult; got a tuple. Write watch\(opt.result\)",
    ):
        Watch()((1, 2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="host callback"):
        Watch()(mid(1)._replace(micro_step=[1, 2]))
    with pytest.raises(ArgumentTypeError, match="loss: expected a number"):
        Watch()(mid(1), loss=[1.0])  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="listener: expected a function"):
        Watch("no function")  # type: ignore[arg-type]
    with pytest.raises(gradaccum.ArgumentValueError, match="reduction"):
        Watch(reduction="nonsense")


def test_loss_of_weight_zero_is_left_out() -> None:
    heard = watched(
        (mid(1), {"loss": math.nan, "weight": 0.0}),
        (end(), {"loss": 5.0, "weight": 2.0}),
    )
    assert [window.loss for window in heard[-1:]] == [5.0]


def test_loss_of_the_result_needs_no_telling() -> None:
    """The optimizer was told it. What the loop tells stands in its place."""
    known = end()._replace(loss=3.0)
    heard = watched((mid(1), {}), (known, {}), (known, {"loss": 4.0}))
    assert [window.loss for window in heard] == [3.0, 4.0]


def test_every_listener_hears_though_one_raises() -> None:
    listeners, heard = Listeners(), []

    def fail(window: ClosedWindow) -> None:
        raise ValueError("full disk")

    def close() -> None:
        with listeners.settled():
            listeners.note(end())
            assert not heard, "not before everything is settled"

    listeners.add(fail)
    listeners.add(heard.append)
    with pytest.raises(ValueError, match="full disk") as raised:
        close()
    assert len(heard) == 1
    assert "the update, if one was due, is made" in raised.value.__notes__[0]


def test_windows_of_one_call_are_told_between() -> None:
    """What a listener raises waits for the end of the call: the call may have another
    worker's windows to close.
    """
    listeners, heard = Listeners(), []

    def close() -> None:
        with listeners.settled():
            for number in (1, 2):
                listeners.note(end(number))
                listeners.tell()
                assert [window.optimizer_step for window in heard] == [
                    *range(1, number + 1)
                ]

    def fail(window: ClosedWindow) -> None:
        raise ValueError(f"full disk {window.optimizer_step}")

    listeners.add(heard.append)
    listeners.add(fail)
    with pytest.raises(ValueError, match=r"full disk 1") as raised:
        close()
    assert "full disk 2" in raised.value.__notes__[1]
    assert not listeners._failures


def test_the_own_error_goes_first() -> None:
    listeners = Listeners()

    def fail(window: ClosedWindow) -> None:
        raise ValueError("full disk")

    def close() -> None:
        with listeners.settled():
            listeners.note(end())
            raise KeyError("the update's")

    listeners.add(fail)
    with pytest.raises(KeyError) as raised:
        close()
    assert "full disk" in raised.value.__notes__[0]


def test_removed_and_copied_listeners_hear_nothing() -> None:
    listeners, heard = Listeners(), []
    handle = listeners.add(heard.append)
    assert not copy.deepcopy(listeners).added
    assert not pickle.loads(pickle.dumps(listeners)).added
    handle.remove()
    handle.remove()
    assert not listeners.added


def test_json_lines_are_json_and_append(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    first = JsonLines(path)
    first(OVERFLOW)
    assert path.read_text().endswith("\n"), "flushed before it is closed"
    first.close()
    path.write_text(path.read_text() + '{"optimizer_st')  # a crash
    with JsonLines(str(path)) as again:
        again(WINDOW)
    overflow, _, window = path.read_text().splitlines()
    assert json.loads(window) == WINDOW._asdict()
    assert json.loads(overflow, parse_constant=pytest.fail) == {
        **OVERFLOW._asdict(),
        "grad_norm": None,
        "loss": None,
    }


def test_json_lines_leave_a_given_file_open() -> None:
    file = io.StringIO()
    with JsonLines(file) as lines:
        lines(WINDOW)
    assert json.loads(file.getvalue())["optimizer_step"] == 17
    with pytest.raises(ArgumentTypeError, match="target"):
        JsonLines(17)  # type: ignore[arg-type]


class Writer:
    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((tag, value, step))


def test_tensorboard_gets_what_is_known() -> None:
    writer = Writer()
    TensorBoard(writer, prefix="a/")(OVERFLOW)
    expected = {
        "grad_norm": math.inf,
        "loss_scale": 1024.0,
        "weight": 32.0,
        "micro_batches": 4.0,
        "seconds": 0.25,
        "skipped": 1.0,
    }
    assert writer.points == [
        (f"a/{name}", value, 17) for name, value in expected.items()
    ]
    TensorBoard(writer)(WINDOW)
    assert ("gradaccum/loss", 1.5, 17) in writer.points
    with pytest.raises(ArgumentTypeError, match="add_scalar"):
        TensorBoard(17)


def test_rich_progress_stands_at_the_update() -> None:
    console = pytest.importorskip("rich.console", reason="needs rich").Console(
        file=io.StringIO(), force_terminal=True, width=120
    )
    progress = RichProgress(20, console=console)
    with pytest.raises(UsageError, match="with RichProgress"):
        progress(WINDOW)
    with progress:
        progress(OVERFLOW)
        progress(WINDOW)
    drawn = console.file.getvalue()
    assert "17/20" in drawn
    assert "loss 1.5, norm 0.5, scale 1024, 1 skipped" in drawn
    progress(WINDOW)  # the run goes on
    with pytest.raises(gradaccum.ArgumentValueError, match="total_updates"):
        RichProgress(0)


@pytest.mark.parametrize(
    "make",
    [lambda: RichProgress(3), lambda: TensorBoard("runs")],
    ids=["rich", "tensorboard"],
)
def test_missing_package_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("gradaccum.errors.import_module", missing)
    with pytest.raises(MissingPackageError, match="Run: pip install"):
        make()


def test_watching_imports_the_standard_library_only() -> None:
    code = (
        "import sys, gradaccum.watching; print(sorted({'rich', 'tensorboard',"
        " 'tensorboardX', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_status_is_one_line() -> None:
    options = make_options(4, clip_norm=1.0, loss_scale=gradaccum.DynamicLossScale())
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
        status(State(2, 3, 0, 96.0, False, 1.0, 0), gradaccum.until_weight(128))
        == "micro-batch 2, weight 96 of 128, update 3"
    )
    by_weight = make_options(gradaccum.until_weight(128), skip_norm=0.5)
    assert described("A", "B", by_weight, state, None).startswith(
        "A(B, steps=until_weight(128), skip_norm=0.5 | micro-batch"
    )


def test_status_names_a_schedule() -> None:
    def growing(step: int) -> int:
        return step + 1

    state = State(0, 3, 0, 0.0, False, 1.0, 0)
    assert (
        described("A", "B", make_options(growing), state, 4)
        == "A(B, steps=growing | micro-batch 0 of 4, update 3)"
    )
