"""Losses that couple the items of a batch: the gradient of the large batch in two
passes, its own parameters differentiated once.
"""

from collections.abc import Mapping
from typing import get_args

import numpy as np
import pytest

from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import worst
from gradaccum_conformance.couplings import Coupling
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import (
    Dtype,
    LargeBatchCall,
    LargeBatchHarness,
    Option,
    Outcome,
)
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import cut, global_norm, standard_batch
from gradaccum_conformance.specs import MLP, Arrays, make_weights

FLOAT64 = 1e-13
FLOAT32 = 1e-4
"""Of losses whose terms cancel; the float64 of the same test is the proof."""
WAYS = {
    "one": {"steps": 1},
    "even": {"steps": 4},
    "ragged": {"micro_batch_size": 5},
    "more steps than items": {"steps": 99},
}
by_coupling = pytest.mark.parametrize("coupling", get_args(Coupling))


def run(
    backend: LargeBatchHarness,
    coupling: Coupling,
    options: Mapping[str, Option],
    dtype: Dtype = "float64",
    mode: str | None = None,
) -> Outcome:
    return backend.coupled(
        LargeBatchCall(MLP, make_weights(MLP), dtype, mode, options=options),
        coupling,
        standard_batch(MLP),
    )


def truth_of(coupling: Coupling) -> tuple[float, Arrays]:
    return oracle.coupled_loss_and_gradient(
        MLP, make_weights(MLP), coupling, standard_batch(MLP)
    )


def check(errors: Errors, got: Outcome, coupling: Coupling, limit: float) -> None:
    loss, truth = truth_of(coupling)
    errors.check("loss", abs(got.loss - loss) / abs(loss), limit)
    errors.check("gradient", distance(got.gradient, truth), limit)
    errors.check(
        "temperature",
        worst({"t": got.gradient["temperature"]}, {"t": truth["temperature"]}),
        limit,
    )


def distance(gradient: Arrays, truth: Arrays) -> float:
    """Relative to the whole gradient: a covariance does not see the last bias, whose
    gradient is rounding alone.
    """
    assert set(gradient) == set(truth)
    return global_norm(
        {name: gradient[name] - truth[name] for name in truth}
    ) / global_norm(truth)


@by_coupling
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_gradient_of_the_large_batch(
    backend: LargeBatchHarness,
    errors: Errors,
    coupling: Coupling,
    options: dict[str, int],
) -> None:
    check(errors, run(backend, coupling, options), coupling, FLOAT64)


@pytest.mark.every_mode
@pytest.mark.parametrize("coupling", deep_but(("contrast",), get_args(Coupling)))
def test_every_mode(
    backend: LargeBatchHarness,
    large_batch_mode: str,
    errors: Errors,
    coupling: Coupling,
) -> None:
    check(
        errors,
        run(backend, coupling, {"micro_batch_size": 5}, "float32", large_batch_mode),
        coupling,
        FLOAT32,
    )


@by_coupling
def test_plain_accumulation_is_another_gradient(coupling: Coupling) -> None:
    """Or the tests above would show nothing."""
    batch = standard_batch(MLP)
    parts = [
        oracle.coupled_loss_and_gradient(MLP, make_weights(MLP), coupling, piece)[1]
        for piece in cut(batch, (4, 4, 4))
    ]
    _, truth = truth_of(coupling)
    assert (
        distance(
            {name: np.mean([part[name] for part in parts], axis=0) for name in truth},
            truth,
        )
        > 1e-2
    )
