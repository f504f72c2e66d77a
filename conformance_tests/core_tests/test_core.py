"""The core's own checks: errors in one shape, options checked once, transitions that
never mix a bad value in.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum import (
    ArgumentTypeError,
    CheckpointError,
    DynamicLossScale,
    GradAccumError,
    UsageError,
)
from gradaccum.kit import (
    FORMAT,
    Decision,
    ScaleRule,
    State,
    accumulate,
    at_rest,
    decide,
    decode_terms,
    encode_terms,
    has_exact_inverse,
    initial_state,
    make_options,
    rate_bits,
    redistributed,
    require_denominator,
    require_denominator_allowed,
    require_same_rates,
    resumed,
    select,
    terms_of,
    usable,
    window_loss,
    with_denominator,
)

FLOAT32 = 3.4028234663852886e38
FLOAT64 = sys.float_info.max
ONE = State(1, 0, 0, 1.0, False, 1.0, 0)
"""A micro-batch of weight 1."""


def decided(
    state: Any, norm: float, options: Any = None, largest: float = FLOAT32
) -> Decision:
    options = options or make_options(1)
    return Decision(*decide(state, norm, True, options, select, largest))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_scale", 0),
        ("init_scale", math.nan),
        ("growth_factor", 1.0),
        ("backoff_factor", 0.0),
        ("backoff_factor", 1.0),
        ("growth_interval", 0),
        ("min_scale", 0.0),
        ("min_scale", 2.0**17),
        ("max_scale", 2.0),
    ],
)
def test_bad_loss_scales_raise(name: str, value: float) -> None:
    with pytest.raises(GradAccumError, match="expected"):
        DynamicLossScale(**{name: value})


def test_defaults_are_those_of_torch_s_scaler() -> None:
    """`torch.amp.GradScaler`'s, which has no floor below 1 and no ceiling."""
    assert dataclasses.astuple(DynamicLossScale()) == (
        2.0**16,
        2.0,
        0.5,
        2000,
        1.0,
        math.inf,
    )
    assert DynamicLossScale(0.5, 1.5, 0.25, 1, 0.25, 0.75).rule() == ScaleRule(
        0.5, 1.5, 0.25, 1, 0.25, 0.75
    )


def test_defaults_of_the_options() -> None:
    assert initial_state().loss_scale == 1
    scale = (1.0, 1.0, 1.0, 1, 0.0, math.inf)
    norms_and_dtype = (None, None, None)
    assert make_options(4) == (
        *(4, "mean", *norms_and_dtype, scale),
        *("skip_window", False, None, False),
    )


def test_at_rest_rounds_to_float32() -> None:
    state = at_rest(initial_state(0.1)._replace(weight=0.1))
    assert state.loss_scale == state.weight == 0.10000000149011612
    assert at_rest(state._replace(weight=0.1), float64_weight=True).weight == 0.1


def test_exact_inverses_are_powers_of_two_of_float32() -> None:
    found = [
        has_exact_inverse(number)
        for number in (1.0, 2.0**-126, 2.0**126, 2.0**-127, 2.0**127, 3.0, 0.75)
    ]
    assert found == [True, True, True, False, False, False, False]


@pytest.mark.parametrize("reduction", ["mean", "sum", "sum_per_item"])
def test_denominator_takes_the_place_of_the_weight(reduction: str) -> None:
    options = make_options(None, reduction=reduction, clip_norm=1.0)
    state, divides = with_denominator(
        State(2, 5, 4, 0.5, False, 8.0, 6), 16.0, options, select
    )
    assert state == (2, 5, 4, 16.0, False, 8.0, 6)
    decision = decided(state, 64.0, divides)
    assert decision.grad_norm == 0.5
    assert decision.divisor == 128.0
    assert window_loss(32.0, state, divides, select) == 2.0
    empty, _ = with_denominator(
        State(2, 0, 0, 0.0, False, 8.0, 0), 16.0, options, select
    )
    assert not decided(empty, 0.0, divides).apply, "a window of weight 0 stays one"


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan, math.inf])
def test_bad_denominator_in_compiled_code_makes_no_update(denominator: float) -> None:
    state, divides = with_denominator(
        State(2, 0, 0, 3.0, False, 1.0, 0), denominator, make_options(None), select
    )
    assert not decided(state, 64.0, divides).apply


def test_denominator_is_for_windows_that_one_worker_closes() -> None:
    require_denominator_allowed(make_options(None))
    assert require_denominator(0.5, make_options(None)) == 0.5
    with pytest.raises(UsageError, match=r"^denominator: .* steps= determines"):
        require_denominator(3.0, make_options(None), several=True)


@pytest.mark.parametrize(
    ("scale", "largest"),
    [
        (2.0**-126, FLOAT32),
        (FLOAT32, FLOAT32),
        (2.0**-1022, FLOAT64),
        (FLOAT64, FLOAT64),
    ],
)
def test_divisors_at_the_limits_are_usable(scale: float, largest: float) -> None:
    for divisor, applies in (
        (scale, True),
        (scale * (0.5 if scale < 1 else 2.0), False),
    ):
        state = ONE._replace(loss_scale=divisor)
        for on_overflow in ("ignore", "skip_window"):
            options = make_options(1, on_overflow=on_overflow)
            assert decided(state, divisor, options, largest).apply is applies


def test_weight_that_does_not_count_is_not_added() -> None:
    """It is 0, or would make the total infinite."""
    assert not usable(ONE, 0.0, True)
    state = ONE._replace(weight=FLOAT64)
    added = State(*accumulate(state, FLOAT64, True, select))
    assert (added.weight, added.overflow) == (FLOAT64, True)


@pytest.mark.parametrize(
    "steps",
    [4, None, [(0, 2), (3, 5)], lambda step: step + 1, gradaccum.until_weight(7)],
)
@pytest.mark.parametrize("loss_scale", [None, 8.0, DynamicLossScale()])
def test_terms_survive_their_codes(steps: Any, loss_scale: Any) -> None:
    terms = terms_of(make_options(steps, reduction="sum", loss_scale=loss_scale), 3)
    assert decode_terms(encode_terms(terms)) == terms
    with pytest.raises(
        CheckpointError, match=f"format {FORMAT}; got format {FORMAT + 1}"
    ):
        decode_terms((FORMAT + 1, *encode_terms(terms)[1:]))


def test_full_window_is_open() -> None:
    """An interrupt between the last micro-batch and its update leaves a full window. It
    can be saved and resumed.
    """
    options = make_options(4)
    full = State(4, 0, 0, 4.0, False, 1.0, 0)
    assert resumed(full, terms_of(options, 0), options) == full
    with pytest.raises(CheckpointError, match="micro_step"):  # written in part
        resumed(full._replace(micro_step=-1), terms_of(options, 0), options)


def test_window_goes_on_with_other_workers() -> None:
    """One worker, or more than before, hold the weight and the flag once between them,
    and end their windows together.
    """
    one = State(2, 5, 1, 3.0, False, 8.0, 4)
    other = State(1, 5, 1, 4.0, True, 8.0, 4)
    for workers in (1, 2, 4):
        states = redistributed([one, other], workers)
        assert len(states) == workers
        assert sum(state.weight for state in states) == 7.0
        assert sum(state.overflow for state in states) == 1
        assert {state._replace(weight=0.0, overflow=False) for state in states} == {
            State(2, 5, 1, 0.0, False, 8.0, 4)
        }


def test_states_of_two_moments_are_no_window() -> None:
    one = State(2, 5, 1, 3.0, False, 8.0, 4)
    assert redistributed([one], 1) == [one]
    for name in ("optimizer_step", "skipped_windows", "loss_scale", "growth_tracker"):
        with pytest.raises(CheckpointError, match=name):
            redistributed([one, one._replace(**{name: 7})], 1)


def test_other_learning_rates_on_one_worker_are_named() -> None:
    """Whatever the number of workers, and where one alone differs: by a little, in one
    group, or in the groups' order.
    """
    for workers in (1, 2, 5000):
        bits = rate_bits(0.1, 1e-9)
        require_same_rates([0.1, 1e-9], [workers * bit for bit in bits], workers, 0)
    bits = rate_bits(-0.0)
    rate_bits.cache_clear()
    assert rate_bits(0.0) == bits
    for other in ([0.1, 1e-9 + 1e-24], [1e-9, 0.1], [0.1], [0.1, math.nan]):
        added = np.sum(
            [[*rate_bits(*rates)] for rates in [[0.1, 1e-9]] * 4999 + [other]],
            axis=0,
            dtype=np.float32,
        )
        with pytest.raises(
            UsageError,
            match=(
                r"learning rates on rank 3: expected the same .*; got \[0.1, 1e-09\]"
                r" on this worker"
            ),
        ):
            require_same_rates([0.1, 1e-9], added.tolist(), 5000, 3)


class Driver:
    """A backend that drives loss scalers, which are texts."""

    scaler_kind = "a text"

    def scaler_rule(self, scaler: object) -> ScaleRule | None:
        return ScaleRule(init_scale=8.0) if isinstance(scaler, str) else None


def test_scaler_of_the_framework() -> None:
    options = make_options(4, loss_scale="scaler", driver=Driver())
    assert options.scaler == "scaler"
    assert options.scale_rule.init_scale == 8.0
    with pytest.raises(ArgumentTypeError, match=r"loss_scale: .* or a text; got \[\]"):
        make_options(4, loss_scale=[], driver=Driver())
