"""A checkpoint in mid-window that lies in the repository, of each framework: every
later release and every supported version resumes it.

``python -m conformance_tests.framework_tests.test_stored_checkpoints`` writes those of
a new `gradaccum.kit.FORMAT`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import gradaccum
from gradaccum_conformance.bounds import gamma, worst
from gradaccum_conformance.harness import Harness, Session
from gradaccum_conformance.loading import load_harness
from gradaccum_conformance.scenarios import random_tree, start
from gradaccum_conformance.specs import MLP, Optimizer

STORED = Path(__file__).parent / "stored_checkpoints"
FRAMEWORKS = ("torch", "jax", "mindspore")
"""The reference's checkpoints are pickles of its classes, which no user has."""
SAVED_AFTER = 6
"""Micro-batches: one update, and two in the open window."""


def begin(backend: Harness) -> Session:
    scale = gradaccum.DynamicLossScale(init_scale=64.0, growth_interval=1)
    return start(
        backend, MLP, Optimizer("momentum"), steps=4, clip_norm=0.5, loss_scale=scale
    )


def go_on(session: Session, first: int, last: int) -> None:
    for step in range(first, last):
        session.gradients(random_tree(MLP, step), weight=1.0 + step % 3)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_stored_checkpoint_is_resumed(name: str) -> None:
    if name not in gradaccum.available_backends():
        pytest.skip(f"needs {name}")
    backend = load_harness(name)
    whole = begin(backend)
    resumed = begin(backend)
    go_on(whole, 0, SAVED_AFTER)
    resumed.load(STORED / backend.name)
    assert resumed.state() == whole.state()
    go_on(whole, SAVED_AFTER, 9)
    go_on(resumed, SAVED_AFTER, 9)
    assert resumed.state() == whole.state()
    assert resumed.state().optimizer_step == 2
    # Another version of the framework may round each of a window's operations in
    # another way.
    assert worst(resumed.parameters(), whole.parameters()) <= gamma(32, "float32")


def main() -> None:
    """Write the checkpoint of each backend that is installed."""
    for name in {*FRAMEWORKS} & {*gradaccum.available_backends()}:
        session = begin(load_harness(name))
        folder = STORED / name
        folder.mkdir(parents=True, exist_ok=True)
        go_on(session, 0, SAVED_AFTER)
        session.save(folder)


if __name__ == "__main__":
    main()
