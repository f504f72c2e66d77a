"""Bad input raises a clear error at the wrong call. The open window stays as it was."""

import math
from typing import Any

import pytest

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError, GradAccumError
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.scenarios import (
    contents_of,
    random_tree,
    require_same_contents,
    same,
    start,
)
from gradaccum_conformance.specs import LINEAR
from gradaccum_conformance.workers import Crews, WorkerError

VALUE = ArgumentValueError
TYPE = ArgumentTypeError


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


BAD_OPTIONS = [
    ("steps", VALUE, [0, [], [(1, 2)], [(0, 2), (0, 3)], [(0, 0)]]),
    ("steps", TYPE, [True, 2.5, "4"]),
    ("reduction", VALUE, ["average"]),
    ("clip_norm", VALUE, [0, math.nan, math.inf]),
    ("clip_norm", TYPE, ["1"]),
    ("skip_norm", VALUE, [-1.0]),
    ("loss_scale", VALUE, [0, math.inf]),
    ("loss_scale", TYPE, ["dynamic", ForeignScaler()]),
    ("on_overflow", VALUE, ["skip"]),
    ("accumulate_dtype", VALUE, ["int32", "float31"]),
    ("accumulate_dtype", TYPE, [3, int]),
    ("master_weights", TYPE, ["yes"]),
]


@pytest.mark.parametrize(
    ("name", "kind", "values"),
    BAD_OPTIONS,
    ids=[f"{name}-{kind.__name__}" for name, kind, _ in BAD_OPTIONS],
)
def test_bad_option_raises(
    backend: Harness, name: str, kind: type[Exception], values: list[Option]
) -> None:
    """The same class in every backend; the error names the option, what was expected
    and what was given.
    """
    for value in values:
        with pytest.raises(kind, match=f"^{name}: expected .*; got ") as caught:
            start(backend, **{"steps": 4, name: value})
        assert caught.type is kind


def test_unknown_option_raises(backend: Harness) -> None:
    with pytest.raises(TypeError, match="clip_nrom"):
        start(backend, steps=4, clip_nrom=1.0)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "1"], ids=repr)
def test_bad_weight_changes_nothing(
    backend: Harness, mode: str, weight: Option
) -> None:
    session = start(backend, steps=4, mode=mode)
    session.gradients(random_tree(LINEAR, 0))
    before = contents_of(session)
    with pytest.raises(GradAccumError, match="weight"):
        session.gradients(random_tree(LINEAR, 1), weight=weight)
    require_same_contents(session, before)


def test_gradient_of_another_shape_changes_nothing(backend: Harness) -> None:
    if backend.gradient_shapes_reach_gradaccum:
        session = start(backend, steps=4)
        tree = random_tree(LINEAR, 0)
        session.gradients(tree)
        before = contents_of(session)
        first = next(iter(tree))
        with pytest.raises(GradAccumError, match="expected"):
            session.gradients({**tree, first: tree[first][:1]})
        require_same_contents(session, before)


BAD_DENOMINATORS = [(None, 0.0), (None, math.nan), (None, "5"), (2, 5.0)]


@pytest.mark.parametrize(("steps", "denominator"), BAD_DENOMINATORS)
def test_bad_denominator_changes_nothing(
    backend: Harness, steps: Option, denominator: Option
) -> None:
    """It is a positive number, and stands for no window that ends by its `steps`."""
    session = start(backend, steps=steps)
    session.gradients(random_tree(LINEAR, 0), weight=3.0)
    before = contents_of(session)
    with pytest.raises(GradAccumError, match="denominator: expected"):
        session.flush(denominator=denominator)
    require_same_contents(session, before)
    session.flush()
    assert session.result().applied


@pytest.mark.parametrize(
    "options",
    [{"steps": 2, "reduction": "sum_per_item"}, {"steps": gradaccum.until_weight(4)}],
    ids=str,
)
def test_weight_is_asked_for(
    backend: Harness, mode: str, options: dict[str, Option]
) -> None:
    """With a weight of 1 by default the learning rate would be too large by the number
    of items, and windows of 4 items would be windows of 4 micro-batches.
    """
    session = start(backend, mode=mode, **options)
    session.gradients(random_tree(LINEAR, 0), weight=3.0)
    before = contents_of(session)
    with pytest.raises(TYPE, match="weight: expected the number of items"):
        session.gradients(random_tree(LINEAR, 1))
    if "reduction" in options:
        require_same_contents(session, before)
    else:
        # A framework may have added the refused gradient.
        assert same(session.parameters(), before[1])
        session.discard()
    session.gradients(random_tree(LINEAR, 1), weight=4.0)
    assert session.result().applied


def make_optimizer() -> None:
    """A function in the place of what it returns."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (object(), "type object"),
        (dict, r"not called. Call it: gradaccum.wrap\(dict"),
        (make_optimizer, "Call it"),
    ],
    ids=["object", "class", "function"],
)
def test_foreign_object_lists_backends(
    backend: Harness, given: Any, words: str
) -> None:
    with pytest.raises(TYPE, match=f"{backend.name}.*{words}"):
        gradaccum.wrap(given, steps=4)


def test_window_by_weight_is_refused(crews: Crews) -> None:
    """Each worker sees its own weight only, so that the ends would differ."""
    with pytest.raises(WorkerError, match="until_weight") as caught:
        crews(steps=gradaccum.until_weight(8))
    assert len(caught.value.failures) == crews.workers
    assert all("flush()" in failure for failure in caught.value.failures.values())
