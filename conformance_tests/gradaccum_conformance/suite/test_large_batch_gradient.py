"""N micro-batches give the large batch's gradient: every model, every N, every
reduction, ragged pieces, every mode.
"""

import pytest

from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Dtype, Harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    check_gradient,
    cut,
    feed,
    standard_batch,
    start,
)
from gradaccum_conformance.specs import MLP, MODELS, Model

EVEN = {1: (12,), 2: (6, 6), 3: (4, 4, 4), 4: (3, 3, 3, 3), 8: (2, 2, 2, 2, 1, 1, 1, 1)}
RAGGED = {"short last": (5, 5, 2), "one item": (11, 1), "growing": (1, 2, 3, 6)}
by_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
by_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def check(
    backend: Harness,
    errors: Errors,
    model: Model,
    sizes: tuple[int, ...],
    dtype: Dtype,
    reduction: str = "mean",
    mode: str | None = None,
) -> None:
    batch = standard_batch(model)
    session = start(
        backend, model, steps=len(sizes), reduction=reduction, dtype=dtype, mode=mode
    )
    feed(session, cut(batch, sizes), reduction)
    assert session.captured().calls == 1
    check_gradient(
        errors,
        backend,
        session,
        model,
        batch,
        micro_batches=len(sizes),
        dtype=dtype,
        reduction=reduction,
    )


@by_dtype
@by_model
@pytest.mark.parametrize("n", deep_but((4,), EVEN))
def test_equal_micro_batches(
    backend: Harness, errors: Errors, model: Model, n: int, dtype: Dtype
) -> None:
    check(backend, errors, model, EVEN[n], dtype)


@by_dtype
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("sizes", deep_but([(11, 1)], RAGGED.values()), ids=RAGGED)
@pytest.mark.parametrize(
    "model", deep_but([MLP], MODELS), ids=[model.name for model in MODELS]
)
def test_ragged_micro_batches(
    backend: Harness,
    errors: Errors,
    model: Model,
    sizes: tuple[int, ...],
    reduction: str,
    dtype: Dtype,
) -> None:
    check(backend, errors, model, sizes, dtype, reduction)


@pytest.mark.every_mode
@pytest.mark.parametrize("reduction", deep_but(("sum_per_item",), REDUCTIONS))
def test_ragged_micro_batches_every_mode(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    check(backend, errors, MLP, (5, 5, 2), "float32", reduction, mode)
