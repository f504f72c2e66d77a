"""Bad input to a call that splits, and functions that return what they should not: a
clear error that names what is wrong.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance.harness import LargeBatchCall, LargeBatchHarness, Option
from gradaccum_conformance.scenarios import same, same_result, standard_batch, start
from gradaccum_conformance.specs import LINEAR, Batch, make_weights

VALUE = gradaccum.ArgumentValueError
TYPE = gradaccum.ArgumentTypeError
BATCH = standard_batch(LINEAR)
CALL = LargeBatchCall(LINEAR, make_weights(LINEAR), options={"steps": 2})
ROWS = np.ones((2, 4), np.float32)

BAD_OPTIONS = [
    ({}, VALUE, "steps: expected either steps or micro_batch_size; got neither"),
    (
        {"steps": 2, "micro_batch_size": 3},
        VALUE,
        "steps: expected either steps or micro_batch_size; got both",
    ),
    ({"steps": 0}, VALUE, "steps: expected an int >= 1"),
    ({"steps": 2.5}, TYPE, "steps: expected an int >= 1"),
    ({"micro_batch_size": 0}, VALUE, "micro_batch_size: expected an int >= 1"),
    ({"micro_batch_size": "large"}, TYPE, "micro_batch_size: expected an int >= 1"),
    ({"steps": 2, "reduction": "average"}, VALUE, "reduction: expected one of"),
]
WORDS = "weight: expected 12 finite numbers >= 0"
BAD_FOR_THE_BATCH = [
    ({"weight": np.ones(11)}, VALUE, WORDS),
    ({"weight": np.r_[np.ones(11), -1.0]}, VALUE, WORDS),
    ({"weight": np.r_[np.nan, np.ones(11)]}, VALUE, WORDS),
    ({"axes": None}, VALUE, "batch: expected an array to split"),
    ({"axes": (0, 0, 0)}, VALUE, "axes: expected one value, or a structure with"),
]
"""What shows when the batch is there, beside ``steps=2``."""
BAD_WEIGHTS = {
    "negative": lambda x, y: -1.0,
    "not finite": lambda x, y: np.nan,
    "one per item": lambda x, y: x.sum(1),
}
UNNAMED_LISTS = {
    "plain values": [{"angle": 0.5}, {"angle": 0.25}],
    "boxes": [{"boxes": ROWS, "labels": ROWS[:, 0]}] * 2,
    "a tuple of arrays": (ROWS, ROWS),
}
"""Lists that may have an element for each item of a batch of two: so nobody knows
whether the list is to be cut or what it holds.
"""


def refused(
    backend: LargeBatchHarness,
    call: LargeBatchCall,
    batch: Batch,
    kind: type[Exception],
    words: str,
) -> None:
    """By an error of this very class, whose message begins with these words."""
    with pytest.raises(kind) as caught:
        backend.value_and_grad(call, batch)
    assert caught.type is kind
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(("options", "kind", "words"), BAD_OPTIONS)
def test_bad_argument(
    backend: LargeBatchHarness,
    options: dict[str, Option],
    kind: type[Exception],
    words: str,
) -> None:
    refused(backend, CALL._replace(options=options), BATCH, kind, words)


@pytest.mark.parametrize(("options", "kind", "words"), BAD_FOR_THE_BATCH)
def test_argument_that_does_not_fit_the_batch(
    backend: LargeBatchHarness,
    large_batch_mode: str,
    options: dict[str, Option],
    kind: type[Exception],
    words: str,
) -> None:
    call = CALL._replace(mode=large_batch_mode, options={"steps": 2, **options})
    refused(backend, call, BATCH, kind, words)


def test_empty_batch(backend: LargeBatchHarness) -> None:
    refused(backend, CALL, BATCH.rows(0, 0), VALUE, "batch: expected at least one item")


def test_loss_per_item(backend: LargeBatchHarness) -> None:
    def returns(loss, logits) -> Any:
        return logits.sum(1)

    words = "^loss_fn: expected a function that returns a scalar loss"
    call = CALL._replace(returns=returns)
    with pytest.raises(VALUE, match=words):
        backend.value_and_grad(call, BATCH)
    with pytest.raises(VALUE, match=words):
        backend.coupled(call, BATCH)
    session = start(backend)
    with pytest.raises(VALUE, match=words):
        backend.update(session, BATCH, options={"steps": 2}, returns=returns)
    assert session.state().micro_step == 0


@pytest.mark.parametrize("weight", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_function_that_returns_no_weight(
    backend: LargeBatchHarness, weight: Callable[..., Any]
) -> None:
    call = CALL._replace(options={"steps": 2, "weight": weight})
    with pytest.raises(gradaccum.GradAccumError, match=r"^weight: "):
        backend.value_and_grad(call, BATCH)


@pytest.mark.parametrize("axis", [None, 1], ids=["the loss", "two losses"])
def test_aux_that_is_missing(backend: LargeBatchHarness, axis: int | None) -> None:
    """Two losses in an array can be unpacked as if they were a loss and an aux."""

    def returns(loss, logits) -> Any:
        return loss if axis is None else logits.sum(axis)

    call = CALL._replace(
        options={"micro_batch_size": 2, "has_aux": True}, returns=returns
    )
    words = r"^loss_fn: expected a function that returns \(loss, aux\)"
    with pytest.raises(TYPE, match=words):
        backend.value_and_grad(call, BATCH)


def test_leaf_without_the_axis(backend: LargeBatchHarness) -> None:
    call = CALL._replace(extra=np.float32(0.5))
    words = r"^batch\[2\]: expected an array with axis 0 as its batch axis; got a"
    with pytest.raises(VALUE, match=words):
        backend.value_and_grad(call, BATCH)


def test_leaf_of_another_length(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    """The error names it: the second array of the batch."""
    with pytest.raises(VALUE, match=r"(\[1\]|y): expected 12 items.* got 11"):
        backend.value_and_grad(
            CALL._replace(mode=large_batch_mode), Batch(BATCH.x, BATCH.y[:11])
        )


@pytest.mark.parametrize("extra", UNNAMED_LISTS.values(), ids=UNNAMED_LISTS)
def test_list_as_long_as_the_batch(backend: LargeBatchHarness, extra: Any) -> None:
    check_list(backend, CALL._replace(extra=extra))


def test_list_as_long_as_the_batch_in_every_mode(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    call = CALL._replace(mode=large_batch_mode, extra=(ROWS, ROWS))
    check_list(backend, call)
    options = {"steps": 2, "axes": (0, 0, (0, 0))}
    backend.value_and_grad(call._replace(options=options), BATCH.rows(0, 2))


def check_list(backend: LargeBatchHarness, call: LargeBatchCall) -> None:
    """Refused until `axes` tell what it is: it would be given whole, or what it holds
    would be cut.
    """
    batch = BATCH.rows(0, 2)
    for take in (backend.value_and_grad, backend.coupled):
        with pytest.raises(VALUE, match=r"batch\[2\].*axes="):
            take(call, batch)
    options = {"steps": 2, "axes": (0, 0, None)}
    backend.value_and_grad(call._replace(options=options), batch)


def test_list_of_another_length(backend: LargeBatchHarness) -> None:
    """Each of its elements holds all items."""
    batch = BATCH.rows(0, 2)
    bare = backend.value_and_grad(CALL, batch)
    beside = backend.value_and_grad(CALL._replace(extra=[ROWS, ROWS, ROWS]), batch)
    assert same(beside.gradient, bare.gradient)


@pytest.mark.parametrize("steps", [4, [(0, 2)]], ids=str)
def test_window_that_ends_by_itself(backend: LargeBatchHarness, steps: Option) -> None:
    session = start(backend, steps=steps)
    with pytest.raises(VALUE, match="steps=None"):
        backend.update(session, BATCH, options={"steps": 2})
    assert session.state().micro_step == 0


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_error_of_the_loss_passes(
    backend: LargeBatchHarness, kind: type[BaseException]
) -> None:
    """The optimizer is as it was, as after a refused weight, and the next call as the
    first.
    """
    trouble = [True]

    def returns(loss, logits) -> Any:
        if trouble:
            raise kind("now")
        return loss

    session, other = (start(backend, loss_scale=8.0) for _ in range(2))
    before = session.state(), session.result()
    with pytest.raises(kind, match="now"):
        backend.value_and_grad(CALL._replace(returns=returns), BATCH)
    with pytest.raises(kind, match="now"):
        backend.update(session, BATCH, options={"steps": 3}, returns=returns)
    with pytest.raises(VALUE, match="weight"):
        backend.update(session, BATCH, options={"steps": 3, "weight": np.ones(11)})
    assert session.state() == before[0]
    assert same_result(session.result(), before[1])
    trouble.clear()
    assert same(
        backend.value_and_grad(CALL._replace(returns=returns), BATCH).gradient,
        backend.value_and_grad(CALL, BATCH).gradient,
    )
    assert backend.update(
        session, BATCH, options={"steps": 3}, returns=returns
    ) == backend.update(other, BATCH, options={"steps": 3})
    assert same(session.parameters(), other.parameters())
