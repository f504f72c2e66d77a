"""Bad input raises a clear error at the wrong call. The open window stays as it was."""

import math
from typing import Any, cast

import pytest

import gradaccum
from gradaccum.kit import State
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.scenarios import random_tree, same, start
from gradaccum_conformance.specs import LINEAR, Arrays

BAD_OPTIONS: dict[str, list[Option]] = {
    "steps": [
        0,
        -1,
        True,
        2.5,
        "4",
        [],
        [(1, 2)],
        [(0, 2), (0, 3)],
        [(0, 0)],
        2**31,
        [(0, 2**31)],
    ],
    "reduction": ["average", None, 1],
    "clip_norm": [0, -1.0, math.nan, math.inf, "1", True],
    "skip_norm": [0, -1.0, math.nan, "1"],
    "loss_scale": [0, -1.0, math.nan, math.inf, "dynamic", True],
    "on_overflow": ["skip", None],
    "accumulate_dtype": ["int32", "no such dtype", 3],
}
CASES = [(name, value) for name, values in BAD_OPTIONS.items() for value in values]


@pytest.mark.parametrize(
    ("name", "value"), CASES, ids=[f"{name}={value!r}" for name, value in CASES]
)
def test_bad_option_raises(backend: Harness, name: str, value: Option) -> None:
    """`wrap` raises; the error names the option, what was expected and what was
    given.
    """
    with pytest.raises(gradaccum.GradAccumError, match=name) as caught:
        start(backend, **{"steps": 4, name: value})
    assert "expected" in str(caught.value)
    assert "got" in str(caught.value)


class ForeignScaler:
    """The scaler of a framework that no backend knows, by the methods of
    `torch.amp.GradScaler`.
    """

    def get_scale(self) -> float:
        return 8.0

    def get_growth_factor(self) -> float:
        return 2.0

    def get_backoff_factor(self) -> float:
        return 0.5

    def get_growth_interval(self) -> int:
        return 100


SAME_ERRORS: dict[str, tuple[str, Option, type, str]] = {
    "dtype of a Python type": (
        "accumulate_dtype",
        int,
        gradaccum.ArgumentTypeError,
        "expected a floating dtype",
    ),
    "dtype by a wrong name": (
        "accumulate_dtype",
        "float31",
        gradaccum.ArgumentValueError,
        "expected a floating dtype",
    ),
    "foreign scaler": (
        "loss_scale",
        ForeignScaler(),
        gradaccum.ArgumentTypeError,
        "(ForeignScaler)",
    ),
}


@pytest.mark.parametrize(
    ("name", "value", "kind", "words"), SAME_ERRORS.values(), ids=SAME_ERRORS
)
def test_one_mistake_one_error(
    backend: Harness, name: str, value: Option, kind: type, words: str
) -> None:
    """The same class and the same words in every backend."""
    with pytest.raises(gradaccum.GradAccumError) as caught:
        start(backend, **{"steps": 4, name: value})
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{name}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["clip_nrom", "gradient_accumulation_steps"])
def test_unknown_option_raises(backend: Harness, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        start(backend, steps=4, **{name: 4})  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "1", True], ids=repr)
def test_bad_weight_changes_nothing(
    backend: Harness, mode: str, weight: Option
) -> None:
    session = start(backend, steps=4, mode=mode)
    session.gradients(random_tree(LINEAR, 0))
    before = session.state(), session.accumulator(), session.parameters()
    with pytest.raises(gradaccum.GradAccumError, match="weight"):
        session.gradients(random_tree(LINEAR, 1), weight=weight)
    unchanged(session, before)


def test_bad_gradients_change_nothing(backend: Harness) -> None:
    for fault in backend.gradient_faults:
        session = start(backend, steps=4)
        session.gradients(random_tree(LINEAR, 0))
        before = session.state(), session.accumulator(), session.parameters()
        with pytest.raises(gradaccum.GradAccumError, match="expected"):
            backend.bad_gradients(session, fault)
        unchanged(session, before)


def unchanged(session: Session, before: tuple[State, Arrays, Arrays]) -> None:
    assert session.state() == before[0]
    assert same(session.accumulator(), before[1])
    assert same(session.parameters(), before[2])


def test_model_is_no_optimizer(backend: Harness) -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer"):
        gradaccum.wrap(cast(Any, backend.not_an_optimizer()), steps=4)


def make_optimizer() -> None:
    """A function in the place of what it returns."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (object(), "type object"),
        (dict, r"not called. Call it: gradaccum.wrap\(dict"),
        (make_optimizer, "Call it"),
        ([object()], "each optimizer"),
    ],
    ids=["object", "class", "function", "list"],
)
def test_foreign_object_lists_backends(
    backend: Harness, given: Any, words: str
) -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match=f"{backend.name}.*{words}"):
        gradaccum.wrap(given, steps=4)
