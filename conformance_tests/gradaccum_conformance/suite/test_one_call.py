"""The large batch in one call: its loss, its gradient and its other outputs, however it
is split.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import (
    FLOAT64_RELATIVE,
    additions_in_gradient,
    gamma,
    unit_roundoff,
    worst,
)
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import (
    Dtype,
    LargeBatchCall,
    LargeBatchHarness,
    Option,
    Outcome,
    Returns,
)
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    cut,
    micro_loss,
    standard_batch,
    window_gradient,
)
from gradaccum_conformance.specs import LINEAR, MLP, MODELS, Batch, Model, make_weights

WAYS = {
    "one step": ({"steps": 1}, 1),
    "even steps": ({"steps": 3}, 3),
    "ragged steps": ({"steps": 5}, 4),
    "size": ({"micro_batch_size": 4}, 3),
    "ragged size": ({"micro_batch_size": 5}, 3),
    "single items": ({"micro_batch_size": 1}, 12),
    "larger than the batch": ({"micro_batch_size": 99}, 1),
    "more steps than items": ({"steps": 99}, 12),
}
"""Ways to split the twelve items of the standard batch, each with the number of
micro-batches that it makes.
"""
BATCH = standard_batch(MLP)
PIECES = cut(BATCH, (5, 5, 2))
TOKENS = np.array([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7])
"""An uneven weight for each item of the standard batch, one of them 0."""
TOKENS_OF_PIECES = [14.0, 21.0, 7.0]
LOGITS = oracle.predict(MLP, make_weights(MLP), BATCH.x)
by_reduction = pytest.mark.parametrize("reduction", deep_but(("mean",), REDUCTIONS))
MEANS = [part.mean(0) for part in np.split(LOGITS, [5, 10])]


def split(
    backend: LargeBatchHarness,
    options: Mapping[str, Option],
    model: Model = MLP,
    batch: Batch = BATCH,
    *,
    dtype: Dtype = "float64",
    mode: str | None = None,
    returns: Returns | None = None,
) -> Outcome:
    """The backend's call, in micro-batches of 5 items unless `options` say another."""
    if "steps" not in options:
        options = {"micro_batch_size": 5, **options}
    loss = micro_loss(str(options.get("reduction", "mean")))
    call = LargeBatchCall(
        model, make_weights(model), dtype, mode, loss, options, returns=returns
    )
    return backend.value_and_grad(call, batch)


def check(
    errors: Errors,
    got: Outcome,
    pieces: Sequence[Batch],
    weights: Sequence[float] | None = None,
    reduction: str = "mean",
    *,
    model: Model = MLP,
    dtype: Dtype = "float64",
    micro_batches: int = 3,
) -> None:
    """The loss and the gradient against the definition of the reduction over these
    micro-batches, in float64. Weights are the numbers of items by default.
    """
    weights = weights or [piece.items for piece in pieces]
    trees = []
    for piece in pieces:
        loss, gradient = oracle.loss_and_gradient(
            model, make_weights(model), piece, loss=micro_loss(reduction)
        )
        trees.append({**gradient, "loss": np.asarray(loss)})
    truth = window_gradient(trees, weights, reduction)
    # Twice the bound: of a sum that partly cancels, the error is larger beside the
    # truth.
    limit = 2 * gamma(additions_in_gradient(model, 12, micro_batches), dtype)
    if dtype == "float64":
        limit = FLOAT64_RELATIVE
    measured = {**got.gradient, "loss": np.asarray(got.loss)}
    errors.check(f"loss and gradient, {dtype}", worst(measured, truth), limit)


@pytest.mark.parametrize(("options", "micro_batches"), WAYS.values(), ids=WAYS)
def test_gradient_of_the_large_batch(
    backend: LargeBatchHarness,
    errors: Errors,
    options: dict[str, int],
    micro_batches: int,
) -> None:
    got = split(backend, options, dtype="float32")
    check(errors, got, [BATCH], dtype="float32", micro_batches=micro_batches)


@pytest.mark.every_mode
@pytest.mark.parametrize("reduction", deep_but(("sum_per_item",), REDUCTIONS))
def test_every_mode(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors, reduction: str
) -> None:
    got = split(
        backend, {"reduction": reduction}, dtype="float32", mode=large_batch_mode
    )
    check(errors, got, [BATCH], None, reduction, dtype="float32")


def test_last_batch_of_fewer_items_than_steps(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors
) -> None:
    """Each item is a micro-batch: `steps` are at most so many."""
    batch = BATCH.rows(0, 3)
    got = split(backend, {"steps": 4}, batch=batch, mode=large_batch_mode)
    check(errors, got, [batch])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_float64_of_every_model(
    backend: LargeBatchHarness, errors: Errors, model: Model
) -> None:
    batch = standard_batch(model)
    check(errors, split(backend, {}, model, batch), [batch], model=model)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_items(
    backend: LargeBatchHarness, errors: Errors, reduction: str
) -> None:
    """A micro-batch counts by the sum of its items' weights."""
    got = split(backend, {"reduction": reduction, "weight": TOKENS})
    check(errors, got, PIECES, TOKENS_OF_PIECES, reduction)


def firsts_squared(x, y) -> Any:
    return x[:, 0].sum() ** 2


@by_reduction
def test_weight_by_a_function(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors, reduction: str
) -> None:
    options = {"reduction": reduction, "weight": firsts_squared}
    got = split(backend, options, mode=large_batch_mode)
    weights = [float(firsts_squared(*piece)) for piece in PIECES]
    check(errors, got, PIECES, weights, reduction)


def with_mean(loss, logits) -> Any:
    return loss, {"mean": logits.mean(0)}


def with_rows(loss, logits) -> Any:
    return loss, {"rows": logits}


def weighted_mean(auxes: Sequence[Any], weights: Sequence[Any]) -> Any:
    total = sum(weights)
    terms = [aux["mean"] * w for aux, w in zip(auxes, weights, strict=True)]
    return {"mean": sum(terms[1:], terms[0]) / total}


def test_outputs_of_each_micro_batch(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    """Without a way to merge them, there is one for each micro-batch, in order."""
    options = {"has_aux": True}
    got = split(backend, options, mode=large_batch_mode, returns=with_mean)
    assert_allclose(got.aux["mean"], MEANS, rtol=1e-12)


def test_outputs_concatenated(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors
) -> None:
    """One row per item, in the order of the items, the short last micro-batch too."""
    options = {"has_aux": True, "merge_aux": "concatenate"}
    got = split(backend, options, mode=large_batch_mode, returns=with_rows)
    assert_allclose(got.aux["rows"], LOGITS, rtol=1e-12)
    check(errors, got, [BATCH])


def test_outputs_merged_by_a_function(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    """The function is given the outputs and the weights of all micro-batches."""
    options = {"weight": TOKENS, "has_aux": True, "merge_aux": weighted_mean}
    got = split(backend, options, mode=large_batch_mode, returns=with_mean)
    mean = np.average(MEANS, axis=0, weights=TOKENS_OF_PIECES)
    assert np.abs(mean - LOGITS.mean(0)).max() > 1e-3
    assert_allclose(got.aux["mean"], mean, rtol=1e-12)


@by_reduction
def test_weight_zero_adds_nothing(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors, reduction: str
) -> None:
    """Though all that the micro-batch gives is NaN; and where no item counts, loss and
    gradient are 0.
    """
    batch = standard_batch(MLP)
    batch.x[5:10] = np.nan
    weight = np.repeat([1.0, 0.0, 2.0], (5, 5, 2))
    options = {"reduction": reduction, "weight": weight}
    got = split(backend, options, batch=batch, mode=large_batch_mode)
    check(errors, got, [PIECES[0], PIECES[2]], [5.0, 4.0], reduction)
    options["weight"] = np.zeros(12)
    got = split(backend, options, batch=batch, mode=large_batch_mode)
    assert got.loss == 0
    assert all(not gradient.any() for gradient in got.gradient.values())


def test_half_precision_is_summed_in_float32(backend: LargeBatchHarness) -> None:
    """The terms that come late are as large as the first, however large the sum is by
    then.
    """
    batch = standard_batch(LINEAR, 256)
    weights = make_weights(LINEAR)
    for dtype in backend.half_dtypes:
        terms = [
            backend.gradient(LINEAR, weights, item, dtype=dtype)
            for item in cut(batch, (1,) * 256)
        ]
        wide = [
            {name: array.astype(np.float64) for name, array in term.items()}
            for term in terms
        ]
        got = split(backend, {"micro_batch_size": 1}, LINEAR, batch, dtype=dtype)
        assert worst(got.gradient, window_gradient(wide)) <= 2 * unit_roundoff(dtype)
