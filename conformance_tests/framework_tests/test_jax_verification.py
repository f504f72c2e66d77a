"""`verify` names the mistake planted in each loss, and passes the sound ones. Nothing
of the user's is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import gradaccum
from gradaccum_jax import verify

from .jax_losses import CLASSES, KEY, PARAMS, Case, X, Y, plain, squares
from .jax_mistaken_losses import PLANTED
from .jax_sound_losses import SOUND

DEAR = ("expert_capacity",)
DEAR_SOUND = (
    "rematerialised",
    "tied",
    "recurrent",
    "per_item_vmap",
    "columns_first",
)
"""Each has a sister with the same cause in the default run."""


@pytest.fixture
def compiled_quickly() -> Iterator[None]:
    """Without most of XLA's passes: what a mistake does to a gradient is larger than
    what they do.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def verified(case: Case) -> gradaccum.VerificationReport:
    return verify(case.params, case.loss_fn, case.batch, **{"steps": 4, **case.options})


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.deep) if name in DEAR else name
        for name in PLANTED
    ],
)
def test_mistake_is_named(name: str) -> None:
    report = verified(PLANTED[name])
    assert not report.equivalent
    cause = report.causes[0]
    assert cause.kind == PLANTED[name].kind, str(report)
    assert cause.where == PLANTED[name].where, str(report)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.deep) if name in DEAR_SOUND else name
        for name in SOUND
    ],
)
def test_sound_loss_passes(name: str) -> None:
    report = verified(SOUND[name])
    assert report.equivalent, str(report)
    assert not report.causes


def test_flax_batch_norm_couples_items() -> None:
    """A dropout beside it does not disturb; alone it cannot be compared."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")

    class Net(linen.Module):  # type: ignore[misc, name-defined]
        normalised: bool

        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.Dense(CLASSES)(x)
            x = (
                linen.BatchNorm(use_running_average=False)(x)
                if self.normalised
                else linen.LayerNorm()(x)
            )
            return linen.Dense(CLASSES)(linen.Dropout(0.5, deterministic=False)(x))

    for normalised in (True, False):
        net = Net(normalised)
        variables = net.init({"params": KEY, "dropout": KEY}, X)

        def loss_fn(
            params: Any, x: Any, y: Any, key: Any, net: Any = net, rest: Any = variables
        ) -> Any:
            variables = {**rest, "params": params}
            output, _ = net.apply(
                variables, x, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            return squares(PARAMS, output, y).mean()

        report = verify(variables["params"], loss_fn, (X, Y, KEY))
        assert [cause.kind for cause in report.causes] == [
            "coupled" if normalised else "not_repeatable"
        ], str(report)


def test_loss_with_aux() -> None:
    def with_aux(params: Any, x: Any, y: Any) -> Any:
        return plain(params, x, y), {"items": len(x)}

    assert verify(PARAMS, with_aux, (X, Y), has_aux=True).equivalent
    report = verify(PARAMS, with_aux, (X, Y), has_aux=True, reduction="sum")
    assert [cause.kind for cause in report.causes] == ["weights"]


def test_summed_loss_is_told_of_both_reductions() -> None:
    report = verify(PARAMS, lambda params, x, y: plain(params, x, y) * len(x), (X, Y))
    assert "reduction='sum'; or, for the mean over" in report.causes[0].fix
    weighed = verify(
        PARAMS,
        lambda params, x, y: plain(params, x, y) * len(x),
        (X, Y),
        reduction="sum_per_item",
    )
    assert weighed.equivalent


def test_one_tree_is_the_only_argument() -> None:
    assert verify(
        PARAMS,
        lambda params, both: plain(params, both["x"], both["y"]),
        {"x": X, "y": Y},
    ).equivalent


def test_a_list_of_a_loader_is_taken_apart() -> None:
    assert verify(PARAMS, jax.jit(plain), [X, Y]).equivalent


def test_numpy_arrays_of_the_user_stay() -> None:
    case = SOUND["numpy_parameters"]
    before = jax.tree.map(np.copy, (case.params, case.batch))
    verified(case)
    jax.tree.map(np.testing.assert_array_equal, before, (case.params, case.batch))
