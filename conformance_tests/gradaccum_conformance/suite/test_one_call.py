"""The large batch in one call: its loss, its gradient and its other outputs, however it
is split.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

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
    large_loss,
    micro_loss,
    standard_batch,
)
from gradaccum_conformance.specs import (
    LINEAR,
    MLP,
    MODELS,
    Arrays,
    Batch,
    Model,
    make_weights,
)

WAYS: dict[str, tuple[dict[str, int], int]] = {
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
TOKENS = np.array([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7])
"""An uneven weight for each item of the standard batch, one of them 0."""


def split(
    backend: LargeBatchHarness,
    options: Mapping[str, Option],
    model: Model = MLP,
    *,
    dtype: Dtype = "float32",
    mode: str | None = None,
    returns: Returns | None = None,
) -> Outcome:
    reduction = str(options.get("reduction", "mean"))
    call = LargeBatchCall(
        model,
        make_weights(model),
        dtype,
        mode,
        micro_loss(reduction),
        options,
        returns=returns,
    )
    return backend.value_and_grad(call, standard_batch(model))


def of_the_definition(
    model: Model, pieces: Sequence[Batch], weights: Sequence[float], reduction: str
) -> tuple[float, Arrays]:
    """The loss and the gradient in float64, from the definition of the reduction over
    these micro-batches.
    """
    parts = [
        oracle.loss_and_gradient(
            model, make_weights(model), piece, loss=micro_loss(reduction)
        )
        for piece in pieces
    ]
    factors = weights if reduction == "mean" else [1.0] * len(parts)
    divisor = 1.0 if reduction == "sum" else sum(weights)
    loss = (
        sum(factor * value for factor, (value, _) in zip(factors, parts, strict=True))
        / divisor
    )
    names = parts[0][1]
    return loss, {
        n: np.sum([f * g[n] for f, (_, g) in zip(factors, parts, strict=True)], axis=0)
        / divisor
        for n in names
    }


def check(
    errors: Errors,
    got: Outcome,
    loss: float,
    truth: Arrays,
    model: Model,
    micro_batches: int,
    dtype: Dtype,
) -> None:
    additions = additions_in_gradient(model, 12, micro_batches)
    # Twice the bound: of a sum that partly cancels, the error is larger beside the
    # truth.
    limit = FLOAT64_RELATIVE if dtype == "float64" else 2 * gamma(additions, dtype)
    errors.check(f"loss, {dtype}", abs(got.loss - loss) / abs(loss), limit)
    errors.check(f"gradient, {dtype}", worst(got.gradient, truth), limit)


@pytest.mark.parametrize("way", WAYS)
def test_gradient_of_the_large_batch(
    backend: LargeBatchHarness, errors: Errors, way: str
) -> None:
    options, micro_batches = WAYS[way]
    loss, truth = oracle.loss_and_gradient(MLP, make_weights(MLP), standard_batch(MLP))
    check(errors, split(backend, options), loss, truth, MLP, micro_batches, "float32")


@pytest.mark.every_mode
@pytest.mark.parametrize("reduction", deep_but(("sum_per_item",), REDUCTIONS))
def test_every_mode(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors, reduction: str
) -> None:
    loss, truth = oracle.loss_and_gradient(
        MLP, make_weights(MLP), standard_batch(MLP), loss=large_loss(reduction)
    )
    got = split(
        backend, {"micro_batch_size": 5, "reduction": reduction}, mode=large_batch_mode
    )
    check(errors, got, loss, truth, MLP, 3, "float32")


def test_last_batch_of_fewer_items_than_steps(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors
) -> None:
    """Each item is a micro-batch: `steps` are at most so many."""
    batch = standard_batch(MLP).rows(0, 3)
    got = backend.value_and_grad(
        LargeBatchCall(
            MLP, make_weights(MLP), "float64", large_batch_mode, options={"steps": 4}
        ),
        batch,
    )
    check(
        errors,
        got,
        *oracle.loss_and_gradient(MLP, make_weights(MLP), batch),
        MLP,
        3,
        "float64",
    )


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_float64_of_every_model(
    backend: LargeBatchHarness, errors: Errors, model: Model
) -> None:
    loss, truth = oracle.loss_and_gradient(
        model, make_weights(model), standard_batch(model)
    )
    check(
        errors,
        split(backend, {"micro_batch_size": 5}, model, dtype="float64"),
        loss,
        truth,
        model,
        3,
        "float64",
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_items(
    backend: LargeBatchHarness, errors: Errors, reduction: str
) -> None:
    """A micro-batch counts by the sum of its items' weights."""
    pieces, weights = (
        cut(standard_batch(MLP), (5, 5, 2)),
        [float(part.sum()) for part in np.split(TOKENS, [5, 10])],
    )
    got = split(
        backend,
        {"micro_batch_size": 5, "reduction": reduction, "weight": TOKENS},
        dtype="float64",
    )
    check(
        errors,
        got,
        *of_the_definition(MLP, pieces, weights, reduction),
        MLP,
        3,
        "float64",
    )


def firsts_squared(x: Any, y: Any) -> Any:
    return x[:, 0].sum() ** 2


@pytest.mark.parametrize("reduction", deep_but(("mean",), REDUCTIONS))
def test_weight_by_a_function(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors, reduction: str
) -> None:
    pieces = cut(standard_batch(MLP), (5, 5, 2))
    weights = [float(piece.x[:, 0].sum()) ** 2 for piece in pieces]
    options = {"micro_batch_size": 5, "reduction": reduction, "weight": firsts_squared}
    got = split(backend, options, dtype="float64", mode=large_batch_mode)
    check(
        errors,
        got,
        *of_the_definition(MLP, pieces, weights, reduction),
        MLP,
        3,
        "float64",
    )


def with_mean(loss: Any, logits: Any) -> Any:
    return loss, {"mean": logits.mean(0)}


def with_rows(loss: Any, logits: Any) -> Any:
    return loss, {"rows": logits}


def test_outputs_of_each_micro_batch(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    """Without a way to merge them, there is one for each micro-batch, in order."""
    got = split(
        backend,
        {"micro_batch_size": 5, "has_aux": True},
        mode=large_batch_mode,
        returns=with_mean,
    )
    logits = oracle.predict(MLP, make_weights(MLP), standard_batch(MLP).x)
    means = [part.mean(0) for part in np.split(logits, [5, 10])]
    np.testing.assert_allclose(got.aux["mean"], means, rtol=1e-5, atol=1e-6)


def test_outputs_concatenated(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors
) -> None:
    """One row per item, in the order of the items, the short last micro-batch too."""
    got = split(
        backend,
        {"micro_batch_size": 5, "has_aux": True, "merge_aux": "concatenate"},
        dtype="float64",
        mode=large_batch_mode,
        returns=with_rows,
    )
    logits = oracle.predict(MLP, make_weights(MLP), standard_batch(MLP).x)
    np.testing.assert_allclose(got.aux["rows"], logits, rtol=1e-12)
    loss, truth = oracle.loss_and_gradient(MLP, make_weights(MLP), standard_batch(MLP))
    check(errors, got, loss, truth, MLP, 3, "float64")


def weighted_mean(auxes: Sequence[Any], weights: Sequence[Any]) -> Any:
    total = sum(weights)
    terms = [aux["mean"] * w for aux, w in zip(auxes, weights, strict=True)]
    return {"mean": sum(terms[1:], terms[0]) / total}


def test_outputs_merged_by_a_function(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    """The function is given the outputs and the weights of all micro-batches."""
    got = split(
        backend,
        {
            "micro_batch_size": 5,
            "weight": TOKENS,
            "has_aux": True,
            "merge_aux": weighted_mean,
        },
        mode=large_batch_mode,
        returns=with_mean,
    )
    logits = oracle.predict(MLP, make_weights(MLP), standard_batch(MLP).x)
    parts = zip(np.split(logits, [5, 10]), np.split(TOKENS, [5, 10]), strict=True)
    terms = [part.mean(0) * tokens.sum() for part, tokens in parts]
    mean = np.sum(terms, axis=0) / TOKENS.sum()
    assert np.abs(mean - logits.mean(0)).max() > 1e-3
    np.testing.assert_allclose(got.aux["mean"], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", deep_but(("mean",), REDUCTIONS))
def test_weight_zero_adds_nothing(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors, reduction: str
) -> None:
    """Though all that the micro-batch gives is NaN; and where no item counts, loss and
    gradient are 0.
    """
    batch = standard_batch(MLP)
    batch.x[5:10] = np.nan
    weight = np.repeat([1.0, 0.0, 2.0], (5, 5, 2))
    options = {
        "micro_batch_size": 5,
        "reduction": reduction,
        "weight": weight,
    }
    call = LargeBatchCall(
        MLP,
        make_weights(MLP),
        "float64",
        large_batch_mode,
        micro_loss(reduction),
        options,
    )
    got, (first, _, last) = backend.value_and_grad(call, batch), cut(batch, (5, 5, 2))
    check(
        errors,
        got,
        *of_the_definition(MLP, [first, last], [5.0, 4.0], reduction),
        MLP,
        3,
        "float64",
    )
    got = backend.value_and_grad(
        call._replace(options={**options, "weight": np.zeros(12)}), batch
    )
    assert got.loss == 0
    assert all(not gradient.any() for gradient in got.gradient.values())


def test_half_precision_is_summed_in_float32(backend: LargeBatchHarness) -> None:
    """The terms that come late are as large as the first, however large the sum is by
    then.
    """
    batch, weights = standard_batch(LINEAR, 256), make_weights(LINEAR)
    for dtype in backend.half_dtypes:
        terms = [
            backend.gradient(LINEAR, weights, batch.rows(i, i + 1), dtype=dtype)
            for i in range(batch.items)
        ]
        truth = {
            name: np.mean([term[name].astype(np.float64) for term in terms], axis=0)
            for name in weights
        }
        got = backend.value_and_grad(
            LargeBatchCall(LINEAR, weights, dtype, options={"micro_batch_size": 1}),
            batch,
        )
        assert worst(got.gradient, truth) <= 2 * unit_roundoff(dtype)
