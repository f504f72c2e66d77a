"""`steps` as a schedule over the optimizer step: a callable, or pairs."""

import pytest

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Scalar
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.scenarios import outcome_of, random_tree, same, start
from gradaccum_conformance.specs import LINEAR

TREE = random_tree(LINEAR, 0)
LARGE = random_tree(LINEAR, 0, 2.0**20)


def growing(optimizer_step: Scalar) -> Scalar:
    return optimizer_step + 1


@pytest.mark.parametrize(
    ("steps", "ends"),
    [([(0, 1), (2, 3), (3, 2)], [0, 1, 4, 6, 8]), (growing, [0, 2, 5, 9])],
    ids=["pairs", "callable"],
)
def test_schedule_sets_window_sizes(
    backend: Harness, mode: str, steps: Option, ends: list[int]
) -> None:
    """It counts updates: a skipped window keeps its size."""
    session = start(backend, steps=steps, skip_norm=1e5, mode=mode)
    session.gradients(LARGE)
    assert session.state().skipped_windows == 1
    closed = []
    for _ in range(10):
        session.gradients(TREE)
        closed.append(session.state().micro_step == 0)
    assert [step for step, is_closed in enumerate(closed) if is_closed] == ends


def vanishing(optimizer_step: Scalar) -> Scalar:
    return 1 - optimizer_step


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, ArgumentValueError),
        (2.5, ArgumentTypeError),
        (None, ArgumentTypeError),
        (gradaccum.until_weight(4), ArgumentTypeError),
    ],
    ids=repr,
)
def test_callable_without_size_raises(
    backend: Harness, value: Option, kind: type[Exception]
) -> None:
    """At `wrap`, or at the first micro-batch."""
    with pytest.raises(kind, match="steps"):
        start(backend, steps=lambda optimizer_step: value).gradients(TREE)


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_later_zero_size_makes_no_update(
    backend: Harness, mode: str, on_overflow: str
) -> None:
    """Eager code raises, because it knows the value. Compiled code applies no update
    and reports an overflow, each time.
    """
    session = start(backend, steps=vanishing, mode=mode, on_overflow=on_overflow)
    session.gradients(TREE)
    before = session.parameters()
    if mode in ("eager", "separate", "pynative"):
        words = r"^steps\(1\): expected an int >= 1"
        with pytest.raises(ArgumentValueError, match=words):
            session.gradients(TREE)
        assert session.state().micro_step == 0
    else:
        for lost in (1, 2):
            session.gradients(TREE)
            assert outcome_of(session.result()) == {"skipped", "overflow"}
            assert session.state().skipped_windows == lost
    assert session.state().optimizer_step == 1
    assert same(session.parameters(), before)
