"""The steps that most tests share: cut a batch, run a window, find the truth and its
bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest

from gradaccum import CheckpointError, StepResult
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import (
    FLOAT64_RELATIVE,
    additions_in_gradient,
    gamma,
    worst,
)
from gradaccum_conformance.harness import (
    Dtype,
    GradientTree,
    Harness,
    Loss,
    Option,
    Session,
    Setup,
)
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.specs import (
    LINEAR,
    Arrays,
    Batch,
    Model,
    Optimizer,
    make_batch,
    make_weights,
)

CAPTURE = Optimizer("capture")
REDUCTIONS = ("mean", "sum", "sum_per_item")


def cut(batch: Batch, sizes: Iterable[int]) -> list[Batch]:
    """The batch in consecutive pieces of these sizes, all of it used."""
    edges = list(accumulate(sizes, initial=0))
    assert edges[-1] == batch.items, (
        f"sizes sum to {edges[-1]}, the batch has {batch.items} items"
    )
    return [batch.rows(a, b) for a, b in pairwise(edges)]


def micro_loss(reduction: str) -> Loss:
    """The micro-batches' loss that makes this reduction give the large batch's
    gradient.
    """
    return "mean" if reduction == "mean" else "sum"


def large_loss(reduction: str) -> Loss:
    """The large batch's loss: the sum for ``"sum"``, else the mean."""
    return "sum" if reduction == "sum" else "mean"


def start(
    backend: Harness,
    model: Model = LINEAR,
    optimizer: Optimizer = CAPTURE,
    *,
    dtype: Dtype = "float32",
    mode: str | None = None,
    **options: Option,
) -> Session:
    """A session on the model's standard weights, wrapped with these options; without
    ``steps``, the caller closes each window.
    """
    return backend.start(
        Setup(
            model,
            make_weights(model),
            optimizer,
            dtype,
            mode,
            {"steps": None, **options},
        )
    )


def feed(session: Session, pieces: Sequence[Batch], reduction: str = "mean") -> None:
    """One micro-batch per piece, weighted by its items."""
    for piece in pieces:
        session.micro_batch(piece, weight=piece.items, loss=micro_loss(reduction))


def feed_gradients(
    session: Session,
    trees: Sequence[GradientTree],
    weights: Sequence[float | None] | None = None,
) -> None:
    """One micro-batch per tree."""
    for tree, weight in zip(trees, weights or [None] * len(trees), strict=True):
        session.gradients(tree, weight=weight)


def check_gradient(
    errors: Errors,
    backend: Harness,
    session: Session,
    model: Model,
    batch: Batch,
    *,
    micro_batches: int,
    dtype: Dtype = "float32",
    reduction: str = "mean",
) -> None:
    """The captured gradient against the float64 truth: in float32 up to twice the
    framework's own error, or the derived bound.
    """
    weights = make_weights(model)
    loss = large_loss(reduction)
    gradient = session.captured().gradient
    _, truth = oracle.loss_and_gradient(model, weights, batch, loss=loss)
    limit = FLOAT64_RELATIVE
    if dtype == "float32":
        own = worst(
            backend.gradient(model, weights, batch, dtype=dtype, loss=loss), truth
        )
        limit = max(
            2 * own,
            gamma(additions_in_gradient(model, batch.items, micro_batches), dtype),
        )
    errors.check(f"gradient, {dtype}", worst(gradient, truth), limit)


def random_tree(model: Model, seed: int, scale: float = 1.0) -> Arrays:
    """Normal gradients for every parameter, float64 values that float32 holds
    exactly.
    """
    rng = np.random.default_rng(seed)
    shapes = model.parameter_shapes()
    return {
        name: (scale * rng.standard_normal(shape)).astype(np.float32).astype(np.float64)
        for name, shape in shapes.items()
    }


def coarse(model: Model, seed: int, step: float) -> Arrays:
    """Gradients in few bits (multiples of `step`), so that every sum of them, weighted
    and scaled, is exact in float32.
    """
    return {
        name: step * np.round(4 * array)
        for name, array in random_tree(model, seed).items()
    }


def constant_tree(model: Model, value: float) -> Arrays:
    """Gradients whose elements are all `value`."""
    return {
        name: np.full(shape, value) for name, shape in model.parameter_shapes().items()
    }


def elements_of(tree: Arrays) -> set[float]:
    """All elements of all arrays."""
    return {float(element) for array in tree.values() for element in array.flat}


def poisoned(tree: Arrays, value: float) -> Arrays:
    """A copy of the gradients with one element replaced, in the last parameter."""
    copy = {name: array.copy() for name, array in tree.items()}
    copy[list(copy)[-1]].flat[0] = value
    return copy


def global_norm(tree: Arrays) -> float:
    """2-norm of all elements."""
    return float(
        np.sqrt(
            sum(float((array.astype(np.float64) ** 2).sum()) for array in tree.values())
        )
    )


def terms_of_sum(
    trees: Sequence[GradientTree], weights: Sequence[float] | None, reduction: str
) -> list[Arrays]:
    """The terms of a window's sum: w g for ``"mean"``, else g.

    A gradient of None is zero. A micro-batch of weight 0 is left out.
    """
    weights = weights or [1.0] * len(trees)
    zeros = {
        name: np.zeros_like(array)
        for tree in trees
        for name, array in tree.items()
        if array is not None
    }
    return [
        {
            name: zeros[name]
            if array is None
            else array * (weight if reduction == "mean" else 1.0)
            for name, array in tree.items()
        }
        for tree, weight in zip(trees, weights, strict=True)
        if weight > 0
    ]


def window_gradient(
    trees: Sequence[GradientTree],
    weights: Sequence[float] | None = None,
    reduction: str = "mean",
) -> Arrays:
    """The definition in float64: sum(w g)/sum(w), sum(g), or sum(g)/sum(w)."""
    terms = terms_of_sum(trees, weights, reduction)
    divisor = 1.0 if reduction == "sum" else sum(weights or [1.0] * len(trees))
    return {
        name: np.sum([term[name] for term in terms], axis=0) / divisor
        for name in terms[0]
    }


def same(a: Arrays, b: Arrays) -> bool:
    """Bit for bit, names included."""
    return set(a) == set(b) and all(
        a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes()
        for name in a
    )


def same_result(a: StepResult, b: StepResult) -> bool:
    """Equal in every field, where what nobody told or measured equals itself."""
    return all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))


def same_decision(result: StepResult, truth: StepResult, norm_error: float) -> bool:
    """Equal but for the loss, which some backends do not know, and the rounding of the
    norm.
    """
    return same_result(
        result._replace(grad_norm=0.0, loss=0.0),
        truth._replace(grad_norm=0.0, loss=0.0),
    ) and math.isclose(result.grad_norm, truth.grad_norm, rel_tol=norm_error)


def outcome_of(result: StepResult) -> set[str]:
    """Which of applied, skipped and overflow the result says."""
    return {
        name for name in ("applied", "skipped", "overflow") if getattr(result, name)
    }


def require_skipped(session: Session, before: Arrays, *more: str) -> None:
    """The first window has ended without an update of the parameters `before`; the
    result says that it was skipped, and `more`.
    """
    assert outcome_of(session.result()) == {"skipped", *more}
    assert session.captured().calls == 0
    assert same(session.parameters(), before)


def contents_of(session: Session) -> list[Arrays]:
    """What a session holds, in arrays that `same` compares bit for bit."""
    fields = session.state()._asdict()
    return [
        {name: np.asarray(value) for name, value in fields.items()},
        session.parameters(),
        session.optimizer_state(),
        session.accumulator(),
    ]


def require_same_contents(session: Session, contents: Sequence[Arrays]) -> None:
    """The session holds exactly these contents."""
    assert all(map(same, contents_of(session), contents))


def refuses_to_load(
    session: Session, directory: Path, words: str | None = None
) -> None:
    """Loading raises, in these words, and changes nothing."""
    before = contents_of(session)
    with pytest.raises(CheckpointError, match=words):
        session.load(directory)
    require_same_contents(session, before)


def standard_batch(model: Model, items: int = 12) -> Batch:
    """The batch most tests use."""
    return make_batch(model, items, seed=1)
