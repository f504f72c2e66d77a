"""Training: the parameters after several windows are those of the large-batch run,
whatever the inner optimizer.
"""

import pytest

from gradaccum_conformance.bounds import additions_in_gradient, gamma, worst
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Dtype, Harness, Setup
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import cut, feed
from gradaccum_conformance.specs import MLP, Optimizer, make_batch, make_weights

OPTIMIZERS = (
    Optimizer("sgd"),
    Optimizer("momentum"),
    Optimizer("adam", 2.0**-6),
    Optimizer("adamw", 2.0**-6),
)
BATCHES = [make_batch(MLP, 12, seed=window) for window in range(3)]
by_optimizer = pytest.mark.parametrize(
    "optimizer",
    deep_but(OPTIMIZERS[-1:], OPTIMIZERS),
    ids=lambda optimizer: optimizer.kind,
)


def check(
    backend: Harness, errors: Errors, optimizer: Optimizer, mode: str, dtype: Dtype
) -> None:
    """The bound is a gradient's, once per window.

    Adam divides by the gradient's size, so a small element's error counts in full: the
    relative error of an element is the bound times (norm / element), taken as at most
    64 here.
    """
    setup = Setup(MLP, make_weights(MLP), optimizer, dtype, mode)
    large = backend.start(setup)
    accumulated = backend.start(setup._replace(options={"steps": 4}))
    for batch in BATCHES:
        large.micro_batch(batch)
        feed(accumulated, cut(batch, (4, 4, 2, 2)))
    amplification = 64 if optimizer.kind.startswith("adam") else 1
    window_bound = gamma(additions_in_gradient(MLP, 12, 4), dtype)
    bound = amplification * len(BATCHES) * window_bound
    errors.check(
        "parameters", worst(accumulated.parameters(), large.parameters()), bound
    )
    # The large-batch run has trained.
    assert worst(large.parameters(), make_weights(MLP)) > 100 * bound


@by_optimizer
def test_same_parameters_as_the_large_batch(
    backend: Harness, mode: str, errors: Errors, optimizer: Optimizer
) -> None:
    check(backend, errors, optimizer, mode, "float32")


@by_optimizer
def test_same_parameters_in_float64(
    backend: Harness, errors: Errors, optimizer: Optimizer
) -> None:
    check(backend, errors, optimizer, backend.modes[0], "float64")
