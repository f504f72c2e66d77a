"""Bad input to a call that splits, and functions that return what they should not: a
clear error that names what is wrong.
"""

from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance.harness import (
    LargeBatchCall,
    LargeBatchHarness,
    Option,
)
from gradaccum_conformance.scenarios import same, same_result, standard_batch, start
from gradaccum_conformance.specs import LINEAR, Batch, make_weights

VALUE, TYPE = gradaccum.ArgumentValueError, gradaccum.ArgumentTypeError
ONE_WAY = "steps: expected one of steps and micro_batch_size; got "
EACH = "weight: expected 12 finite numbers >= 0, one per item"
BAD: dict[str, tuple[dict[str, Option], type, str]] = {
    "no way to split": ({}, VALUE, ONE_WAY + "neither"),
    "two ways": (
        {"steps": 2, "micro_batch_size": 3},
        VALUE,
        ONE_WAY + "both",
    ),
    "no steps": ({"steps": 0}, VALUE, "steps: expected an int >= 1"),
    "half a step": ({"steps": 2.5}, TYPE, "steps: expected an int >= 1"),
    "a flag for steps": ({"steps": True}, TYPE, "steps: expected an int >= 1"),
    "no item": (
        {"micro_batch_size": 0},
        VALUE,
        "micro_batch_size: expected an int >= 1",
    ),
    "half an item": (
        {"micro_batch_size": 1.5},
        TYPE,
        "micro_batch_size: expected an int >= 1",
    ),
    "size by a wrong name": (
        {"micro_batch_size": "large"},
        VALUE,
        'micro_batch_size: expected an int >= 1 or "auto"',
    ),
    "unknown reduction": (
        {"steps": 2, "reduction": "average"},
        VALUE,
        "reduction: expected one of",
    ),
}
BAD_FOR_THE_BATCH: dict[str, tuple[dict[str, Option], str]] = {
    "too few weights": ({"weight": np.ones(11)}, EACH),
    "a negative weight": ({"weight": np.r_[np.ones(11), -1.0]}, EACH),
    "no number": ({"weight": np.r_[np.nan, np.ones(11)]}, EACH),
    "nothing to split": ({"axes": None}, "batch: expected an array to split"),
    "axis by a name": ({"axes": "batch"}, "axes: expected an int"),
    "axes of another nest": ({"axes": (0, 0, 0)}, "axes: expected a prefix of"),
}
"""What shows when the batch is there, beside ``steps=2``."""
ROWS = np.ones((2, 4), np.float32)
SCALAR = "loss_fn: expected a function that returns a scalar loss"
BAD_WEIGHTS: dict[str, Any] = {
    "negative": lambda x, y: -1.0,
    "not finite": lambda x, y: np.nan,
    "one per item": lambda x, y: x.sum(1),
}
PER_ITEM: dict[str, Any] = {
    "plain values": [{"angle": 0.5}, {"angle": 0.25}],
    "sizes": [(3, 5), (7, 2)],
    "boxes": [
        {"boxes": ROWS, "labels": ROWS[:, 0]},
        {"boxes": ROWS, "labels": ROWS[:, 0]},
    ],
    "a tuple of arrays": (ROWS, ROWS),
}
"""Lists that may have an element for each item of a batch of two: so nobody knows
whether the list is to be cut or what it holds.
"""


def refused(
    backend: LargeBatchHarness,
    call: LargeBatchCall,
    batch: Batch,
    kind: type,
    words: str,
) -> None:
    """By an error of this very class, whose message begins with these words."""
    with pytest.raises(gradaccum.GradAccumError) as caught:
        backend.value_and_grad(call, batch)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(backend: LargeBatchHarness, name: str) -> None:
    options, kind, words = BAD[name]
    refused(
        backend,
        LargeBatchCall(LINEAR, make_weights(LINEAR), options=options),
        standard_batch(LINEAR),
        kind,
        words,
    )


@pytest.mark.parametrize("name", BAD_FOR_THE_BATCH)
def test_argument_that_does_not_fit_the_batch(
    backend: LargeBatchHarness, large_batch_mode: str, name: str
) -> None:
    options, words = BAD_FOR_THE_BATCH[name]
    call = LargeBatchCall(
        LINEAR,
        make_weights(LINEAR),
        mode=large_batch_mode,
        options={"steps": 2, **options},
    )
    refused(
        backend,
        call,
        standard_batch(LINEAR),
        TYPE if words.startswith("axes: expected an int") else VALUE,
        words,
    )


def test_loss_per_item(backend: LargeBatchHarness) -> None:
    def returns(loss: Any, logits: Any) -> Any:
        return logits.sum(1)

    call = LargeBatchCall(
        LINEAR, make_weights(LINEAR), options={"steps": 2}, returns=returns
    )
    with pytest.raises(VALUE, match=f"^{SCALAR}"):
        backend.value_and_grad(call, standard_batch(LINEAR))
    session = start(backend, LINEAR)
    with pytest.raises(VALUE, match=f"^{SCALAR}"):
        backend.update(
            session, standard_batch(LINEAR), options={"steps": 2}, returns=returns
        )
    assert session.state().micro_step == 0


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_function_that_returns_no_weight(backend: LargeBatchHarness, name: str) -> None:
    call = LargeBatchCall(
        LINEAR, make_weights(LINEAR), options={"steps": 2, "weight": BAD_WEIGHTS[name]}
    )
    with pytest.raises(gradaccum.GradAccumError, match=r"^weight: "):
        backend.value_and_grad(call, standard_batch(LINEAR))


def test_aux_that_was_not_announced(backend: LargeBatchHarness) -> None:
    """The call or the framework raises its own error."""

    def returns(loss: Any, logits: Any) -> Any:
        return loss, logits

    call = LargeBatchCall(
        LINEAR, make_weights(LINEAR), options={"steps": 2}, returns=returns
    )
    with pytest.raises((TypeError, ValueError), match="scalar"):
        backend.value_and_grad(call, standard_batch(LINEAR))


@pytest.mark.parametrize("axis", [None, 1], ids=["the loss", "two losses"])
def test_aux_that_is_missing(backend: LargeBatchHarness, axis: int | None) -> None:
    """Two losses in an array can be unpacked as if they were a loss and an aux."""

    def returns(loss: Any, logits: Any) -> Any:
        return loss if axis is None else logits.sum(axis)

    call = LargeBatchCall(
        LINEAR,
        make_weights(LINEAR),
        options={"micro_batch_size": 2, "has_aux": True},
        returns=returns,
    )
    words = r"^loss_fn: expected a function that returns \(loss, aux\)"
    with pytest.raises(TYPE, match=words):
        backend.value_and_grad(call, standard_batch(LINEAR))


def test_coupled_loss_that_is_no_scalar(backend: LargeBatchHarness) -> None:
    call = LargeBatchCall(LINEAR, make_weights(LINEAR), options={"steps": 2})
    with pytest.raises(VALUE, match=f"^{SCALAR}"):
        backend.coupled(
            call._replace(returns=lambda loss, left: left.sum(1)),
            "contrast",
            standard_batch(LINEAR),
        )


def test_leaf_without_the_axis(backend: LargeBatchHarness) -> None:
    call = LargeBatchCall(
        LINEAR, make_weights(LINEAR), options={"steps": 2}, extra=np.float32(0.5)
    )
    with pytest.raises(
        VALUE, match=r"^batch\[2\]: expected an array with (an )?axis 0"
    ):
        backend.value_and_grad(call, standard_batch(LINEAR))
    with pytest.raises(
        VALUE, match=r"^batch(\[0\]|\.x): expected an array with (an )?axis 5"
    ):
        backend.value_and_grad(
            call._replace(extra=None, options={"steps": 2, "axes": 5}),
            standard_batch(LINEAR),
        )


def test_leaf_of_another_length(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    """The error names it: the second array of the batch."""
    x, y = standard_batch(LINEAR)
    with pytest.raises(VALUE, match=r"(\[1\]|y): expected 12 items.* got 11"):
        backend.value_and_grad(
            LargeBatchCall(
                LINEAR,
                make_weights(LINEAR),
                mode=large_batch_mode,
                options={"steps": 2},
            ),
            Batch(x, y[:11]),
        )


def test_empty_batch(backend: LargeBatchHarness) -> None:
    call = LargeBatchCall(LINEAR, make_weights(LINEAR), options={"micro_batch_size": 2})
    refused(
        backend,
        call,
        standard_batch(LINEAR).rows(0, 0),
        VALUE,
        "batch: expected at least one item",
    )


def test_refused_window_leaves_the_optimizer_as_it_was(
    backend: LargeBatchHarness,
) -> None:
    session = start(backend, LINEAR)
    backend.update(session, standard_batch(LINEAR), options={"steps": 3})
    before, state = session.parameters(), session.state()
    with pytest.raises(VALUE, match="weight"):
        backend.update(
            session,
            standard_batch(LINEAR),
            options={"steps": 2, "weight": np.ones(11)},
        )
    assert session.state() == state
    assert same(session.parameters(), before)


@pytest.mark.parametrize("steps", [1, 4, [(0, 2)]], ids=str)
def test_window_that_ends_by_itself(backend: LargeBatchHarness, steps: Option) -> None:
    session = start(backend, LINEAR, steps=steps)
    with pytest.raises(VALUE, match="steps=None"):
        backend.update(session, standard_batch(LINEAR), options={"steps": 2})
    assert session.state().micro_step == 0


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_error_of_the_loss_passes(
    backend: LargeBatchHarness, kind: type[BaseException]
) -> None:
    """The optimizer is as it was, and the next call as the first."""
    trouble = [True]

    def returns(loss: Any, logits: Any) -> Any:
        if trouble:
            raise kind("now")
        return loss

    batch, (session, other) = (
        standard_batch(LINEAR),
        (start(backend, LINEAR, loss_scale=8.0) for _ in range(2)),
    )
    call = LargeBatchCall(LINEAR, make_weights(LINEAR), options={"steps": 3})
    before = session.state(), session.result()
    with pytest.raises(kind, match="now"):
        backend.value_and_grad(call._replace(returns=returns), batch)
    with pytest.raises(kind, match="now"):
        backend.update(session, batch, options={"steps": 3}, returns=returns)
    assert session.state() == before[0]
    assert same_result(session.result(), before[1])
    trouble.clear()
    assert same(
        backend.value_and_grad(call._replace(returns=returns), batch).gradient,
        backend.value_and_grad(call, batch).gradient,
    )
    assert backend.update(
        session, batch, options={"steps": 3}, returns=returns
    ) == backend.update(other, batch, options={"steps": 3})
    assert same(session.parameters(), other.parameters())


@pytest.mark.parametrize("name", PER_ITEM)
def test_list_as_long_as_the_batch(backend: LargeBatchHarness, name: str) -> None:
    """Until `axes` tell what it is: else it would be given whole, or what it holds
    would be cut.
    """
    doubtful(backend, PER_ITEM[name], None)


def test_list_as_long_as_the_batch_in_every_mode(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    doubtful(backend, (ROWS, ROWS), large_batch_mode)
    batch = standard_batch(LINEAR).rows(0, 2)
    call = LargeBatchCall(
        LINEAR, make_weights(LINEAR), mode=large_batch_mode, extra=(ROWS, ROWS)
    )
    backend.value_and_grad(
        call._replace(options={"steps": 2, "axes": (0, 0, (0, 0))}), batch
    )


def doubtful(backend: LargeBatchHarness, extra: Any, mode: str | None) -> None:
    """Refused until the caller says that it is given whole."""
    batch = standard_batch(LINEAR).rows(0, 2)
    call = LargeBatchCall(
        LINEAR, make_weights(LINEAR), mode=mode, options={"steps": 2}, extra=extra
    )
    with pytest.raises(VALUE, match=r"batch\[2\].*axes="):
        backend.value_and_grad(call, batch)
    with pytest.raises(VALUE, match=r"batch\[2\].*axes="):
        backend.coupled(call, "contrast", batch)
    backend.value_and_grad(
        call._replace(options={"steps": 2, "axes": (0, 0, None)}), batch
    )


def test_list_of_another_length(backend: LargeBatchHarness) -> None:
    """Each of its elements holds all items."""
    batch = standard_batch(LINEAR).rows(0, 2)
    call = LargeBatchCall(LINEAR, make_weights(LINEAR), options={"steps": 2})
    bare, beside = (
        backend.value_and_grad(each, batch)
        for each in (call, call._replace(extra=[ROWS, ROWS, ROWS]))
    )
    assert same(beside.gradient, bare.gradient)
