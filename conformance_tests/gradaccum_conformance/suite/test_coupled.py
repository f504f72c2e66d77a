"""A loss that couples the items of a batch: the gradient of the large batch in two
passes, its own parameter differentiated once.
"""

from collections.abc import Mapping

import pytest

from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import worst
from gradaccum_conformance.harness import (
    Dtype,
    LargeBatchCall,
    LargeBatchHarness,
    Option,
)
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import standard_batch
from gradaccum_conformance.specs import MLP, make_weights

BATCH = standard_batch(MLP)
WEIGHTS = make_weights(MLP)
WAYS = {
    "one": {"steps": 1},
    "even": {"steps": 4},
    "ragged": {"micro_batch_size": 5},
    "more steps than items": {"steps": 99},
}
LIMITS = {"float64": 1e-13, "float32": 1e-4}
"""The terms of the loss cancel; float64 is the proof."""


def check(
    backend: LargeBatchHarness,
    errors: Errors,
    options: Mapping[str, Option],
    dtype: Dtype,
    mode: str | None = None,
) -> None:
    call = LargeBatchCall(MLP, WEIGHTS, dtype, mode, options=options)
    got = backend.coupled(call, BATCH)
    loss, truth = oracle.coupled_loss_and_gradient(MLP, WEIGHTS, BATCH)
    errors.check("loss", abs(got.loss - loss) / abs(loss), LIMITS[dtype])
    errors.check("gradient", worst(got.gradient, truth), LIMITS[dtype])


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_gradient_of_the_large_batch(
    backend: LargeBatchHarness, errors: Errors, options: dict[str, int]
) -> None:
    check(backend, errors, options, "float64")


@pytest.mark.every_mode
def test_every_mode(
    backend: LargeBatchHarness, large_batch_mode: str, errors: Errors
) -> None:
    check(backend, errors, {"micro_batch_size": 5}, "float32", large_batch_mode)
