"""`steps` as a schedule over the optimizer step: a callable, or pairs."""

import pytest

import gradaccum
from gradaccum.kit import Scalar
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.scenarios import random_tree, same, start
from gradaccum_conformance.specs import LINEAR

PAIRS = [(0, 1), (2, 3), (3, 2)]


def growing(optimizer_step: Scalar) -> Scalar:
    return optimizer_step + 1


def window_sizes(
    backend: Harness, steps: Option, micro_batches: int, mode: str
) -> list[int]:
    session = start(backend, steps=steps, mode=mode)
    ends = []
    for step in range(micro_batches):
        session.gradients(random_tree(LINEAR, step), weight=1.0)
        if session.state().micro_step == 0:
            ends.append(step + 1)
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def test_pairs_set_window_sizes(backend: Harness, mode: str) -> None:
    assert window_sizes(backend, PAIRS, 9, mode) == [1, 1, 3, 2, 2]


@pytest.mark.parametrize(
    "steps", [growing, gradaccum.until_weight(growing)], ids=["micro-batches", "weight"]
)
def test_callable_sets_window_sizes(backend: Harness, mode: str, steps: Option) -> None:
    assert window_sizes(backend, steps, 10, mode) == [1, 2, 3, 4]


def vanishing(optimizer_step: Scalar) -> Scalar:
    return 1 - optimizer_step


@pytest.mark.parametrize(
    "value", [0, -1, 2.5, True, None, "4", gradaccum.until_weight(4)], ids=repr
)
def test_callable_without_size_raises(backend: Harness, value: Option) -> None:
    """At `wrap`, or at the first micro-batch."""
    with pytest.raises(gradaccum.GradAccumError, match="steps") as caught:
        start(backend, steps=lambda optimizer_step: value).gradients(
            random_tree(LINEAR, 0)
        )
    wrong_value = isinstance(value, int) and not isinstance(value, bool)
    assert isinstance(
        caught.value,
        gradaccum.ArgumentValueError if wrong_value else gradaccum.ArgumentTypeError,
    )


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_later_zero_size_makes_no_update(
    backend: Harness, mode: str, on_overflow: str
) -> None:
    """Eager code raises, because it knows the value. Compiled code makes no update and
    reports an overflow, each time.
    """
    session = start(backend, steps=vanishing, mode=mode, on_overflow=on_overflow)
    session.gradients(random_tree(LINEAR, 0))
    before = session.parameters()
    if mode in ("eager", "separate", "pynative"):
        with pytest.raises(
            gradaccum.ArgumentValueError, match=r"^steps\(1\): expected an int >= 1"
        ):
            session.gradients(random_tree(LINEAR, 1))
        assert session.state().micro_step == 0
    else:
        for lost in (1, 2):
            session.gradients(random_tree(LINEAR, lost))
            assert (
                session.result().applied,
                session.result().skipped,
                session.result().overflow,
            ) == (False, True, True)
            assert session.state().skipped_windows == lost
    assert session.state().optimizer_step == 1
    assert same(session.parameters(), before)


def test_skipped_window_keeps_the_size(backend: Harness) -> None:
    session = start(backend, steps=growing, skip_norm=1.0)
    session.gradients(random_tree(LINEAR, 0, scale=100.0))
    assert session.state().skipped_windows == 1
    session.gradients(random_tree(LINEAR, 0, scale=1e-3))
    assert session.state().optimizer_step == 1


@pytest.mark.parametrize("steps", [PAIRS, growing, 3], ids=["pairs", "callable", "int"])
def test_flush_closes_a_scheduled_window(backend: Harness, steps: Option) -> None:
    session = start(backend, steps=steps)
    while session.state().optimizer_step < 2:
        session.gradients(random_tree(LINEAR, 0))
    session.gradients(random_tree(LINEAR, 1))
    session.flush()
    assert session.state().optimizer_step == 3
