"""Training: the parameters after several windows are those of the large-batch run,
whatever the inner optimizer.
"""

import pytest

from gradaccum_conformance.bounds import additions_in_gradient, gamma, worst
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Dtype, Harness, Session, Setup
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import cut, feed
from gradaccum_conformance.specs import MLP, Optimizer, make_batch, make_weights

WINDOWS = 3
OPTIMIZERS = (
    Optimizer("sgd"),
    Optimizer("momentum"),
    Optimizer("adam", 2.0**-6),
    Optimizer("adamw", 2.0**-6),
)
by_optimizer = pytest.mark.parametrize(
    "optimizer",
    deep_but(OPTIMIZERS[-1:], OPTIMIZERS),
    ids=lambda optimizer: optimizer.kind,
)


def train(
    backend: Harness,
    optimizer: Optimizer,
    mode: str,
    dtype: Dtype,
    sizes: tuple[int, ...] | None,
) -> Session:
    options = None if sizes is None else {"steps": len(sizes)}
    session = backend.start(
        Setup(MLP, make_weights(MLP), optimizer, dtype, mode, options)
    )
    for window in range(WINDOWS):
        batch = make_batch(MLP, 12, seed=window)
        if sizes is None:
            session.micro_batch(batch)
        else:
            feed(session, cut(batch, sizes))
    return session


@by_optimizer
def test_same_parameters_as_the_large_batch(
    backend: Harness, mode: str, errors: Errors, optimizer: Optimizer
) -> None:
    large = train(backend, optimizer, mode, "float32", None)
    accumulated = train(backend, optimizer, mode, "float32", (4, 4, 2, 2))
    bound = _bound("float32", adaptive=optimizer.kind.startswith("adam"))
    errors.check(
        "parameters", worst(accumulated.parameters(), large.parameters()), bound
    )
    assert worst(large.parameters(), make_weights(MLP)) > 100 * bound, (
        "the large-batch run did not train"
    )


@by_optimizer
def test_same_parameters_in_float64(
    backend: Harness, errors: Errors, optimizer: Optimizer
) -> None:
    mode = backend.modes[0]
    large = train(backend, optimizer, mode, "float64", None)
    accumulated = train(backend, optimizer, mode, "float64", (4, 4, 2, 2))
    bound = _bound("float64", adaptive=optimizer.kind.startswith("adam"))
    errors.check(
        "parameters", worst(accumulated.parameters(), large.parameters()), bound
    )


def _bound(dtype: Dtype, *, adaptive: bool) -> float:
    """A gradient's bound, once per window. Adam divides by the gradient's size, so a
    small element's error counts in full: the relative error of an element is the bound
    times (norm / element), taken as at most 64 here.
    """
    return (
        (64 if adaptive else 1)
        * WINDOWS
        * gamma(additions_in_gradient(MLP, 12, 4), dtype)
    )
