"""The end of a window into which an exception comes, at each call that it makes:
Ctrl-C, or an error of the framework.

Afterwards the window has closed, or it is as before the call, or the wrapper skips it
as overflowed, or it refuses to go on. Nothing is in between, and the next window shows
that. The test raises where a call of the backend, of the core or of the framework's
optimizer begins.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.scenarios import coarse, feed_gradients, same, start
from gradaccum_conformance.specs import LINEAR, Arrays, Optimizer

SCALE = gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=1)
VARIANTS = {
    "plain": {},
    "clipped, scaled": {"clip_norm": 1.0, "loss_scale": SCALE},
    "skipped": {"skip_norm": 20.0},
    "masters": {"master_weights": True},
}
TREES = [coarse(LINEAR, seed, 2.0**-4) for seed in range(6)]
LARGE = {name: 64 * array for name, array in TREES[2].items()}
"""The first micro-batch of the window in question, where its norm is to be too large.
"""
COMPILED = ("jit", "scan")
"""The modes in which the framework runs no Python at a window's end."""
POINTS = 60
"""The calls, drawn by a seed, at which the quick run raises. ``--deep`` raises at each.
"""


class Interrupted(KeyboardInterrupt):
    """The exception that the test raises."""


def learned(session: Session) -> Arrays:
    """The parameters and the optimizer's state."""
    return {
        **{f"parameter {name}": p for name, p in session.parameters().items()},
        **{f"optimizer {name}": p for name, p in session.optimizer_state().items()},
    }


def everything(session: Session) -> Arrays:
    """What was learned, and the state but for the number of skipped windows."""
    fields = session.state()._replace(skipped_windows=0)._asdict()
    return {
        **learned(session),
        **{f"state {name}": np.asarray(value) for name, value in fields.items()},
    }


def in_backward(frame: FrameType | None) -> bool:
    """True if a backward pass of the framework made the call."""
    while frame is not None and "autograd" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


@contextmanager
def raising_at(number: int, backend: Harness) -> Iterator[list[int]]:
    """Raise at that call of those made inside the block; yields how many were made."""
    packages = ("gradaccum", type(backend).__module__.partition(".")[0])
    folders = tuple(
        str(Path(str(sys.modules[name].__file__)).parent) for name in packages
    )
    made = [0]

    def look(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        ours = name.startswith(folders) and "harness" not in Path(name).parts
        if (
            event in ("call", "c_call")
            and (ours or "optim" in Path(name).parts)
            and not in_backward(frame)
        ):
            made[0] += 1
            if made[0] == number:
                sys.setprofile(None)
                raise Interrupted

    sys.setprofile(look)
    try:
        yield made
    finally:
        sys.setprofile(None)


class Truth:
    """A session in mid-window, and what it has after each way to go on that an
    exception may leave.
    """

    def __init__(self, backend: Harness, mode: str, options: dict[str, Option]) -> None:
        self.session = session = start(
            backend,
            LINEAR,
            Optimizer("adamw"),
            dtype="bfloat16" if "master_weights" in options else "float32",
            mode=mode,
            steps=2,
            **options,
        )
        feed_gradients(session, TREES[:2])
        session.gradients(LARGE if "skip_norm" in options else TREES[2])
        self.before = session.snapshot()
        self.learned_before = learned(session)
        self.skipped_before = session.state().skipped_windows
        with raising_at(0, backend) as made:
            session.gradients(TREES[3])
        self.calls = made[0]
        self.ways = {"closed": (everything(session), self.next_window())}
        session.restore(self.before)
        session.flush()
        self.ways["closed without the last"] = everything(session), self.next_window()
        session.restore(self.before)
        session.discard()
        self.discarded = self.next_window()
        self.learned_after_discard = learned(session)

    def next_window(self) -> Arrays:
        feed_gradients(self.session, TREES[4:])
        return everything(self.session)

    def outcome(self, backend: Harness, call: int) -> str:
        """Raise at `call`, and go on as a user may; returns what the exception left."""
        session = self.session
        session.restore(self.before)
        with suppress(Interrupted), raising_at(call, backend):
            session.gradients(TREES[3])
        try:
            session.flush()
        except gradaccum.GradAccumError:
            if same(learned(session), self.learned_before):
                session.discard()
                assert same(self.next_window(), self.discarded)
                return "open, its micro-batch not counted"
            with pytest.raises(gradaccum.GradAccumError):
                session.gradients(TREES[4])
            return "refused"
        now = everything(session)
        skipped = session.state().skipped_windows > self.skipped_before
        if skipped:
            assert same(learned(session), self.learned_before)
        # A framework may hold the gradient of the micro-batch that was not counted.
        session.discard()
        after = self.next_window()
        if skipped:
            # A framework may count an overflow, and lower its scale.
            assert same(learned(session), self.learned_after_discard)
            return "skipped"
        (way,) = (name for name, (truth, _) in self.ways.items() if same(now, truth))
        assert same(after, self.ways[way][1])
        return way


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "options",
    deep_but([VARIANTS["plain"], VARIANTS["masters"]], VARIANTS.values()),
    ids=VARIANTS,
)
def test_end_of_a_window(
    backend: Harness, deep: bool, options: dict[str, Option]
) -> None:
    for mode in set(backend.modes) - {*COMPILED, *backend.deep_modes}:
        truth = Truth(backend, mode, options)
        calls = range(1, truth.calls + 1)
        drawn = random.Random(5).sample(calls, min(POINTS, len(calls)))
        outcomes = Counter(
            truth.outcome(backend, call) for call in (calls if deep else drawn)
        )
        print(f"{mode}: {outcomes.total()} of {truth.calls} calls: {dict(outcomes)}")
        assert outcomes
