"""The core's own checks: errors in one shape, options checked once, transitions that never mix a bad value in."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradaccum
from gradaccum import CheckpointError, DynamicLossScale
from gradaccum.kit import (
    FORMAT,
    Decision,
    State,
    accumulate,
    at_rest,
    close,
    decide,
    decode_terms,
    discard,
    encode_terms,
    given_weight,
    initial_state,
    make_options,
    rate_bits,
    redistributed,
    require_denominator,
    require_denominator_allowed,
    require_same_rates,
    require_steps,
    resumed,
    select,
    steps_at,
    terms_of,
    window_loss,
    with_denominator,
)


def test_explain_names_everything() -> None:
    error = gradaccum.kit.explain(gradaccum.ArgumentValueError, "steps", expected="an int >= 1", got=0, fix="Write steps=4.")
    assert str(error) == "steps: expected an int >= 1; got 0 (int). Write steps=4."


@pytest.mark.parametrize("make", [make_options, gradaccum.until_weight, lambda size: require_steps(size, 0, lambda step: size)])
def test_sizes_fit_into_int32(make: Any) -> None:
    """Compiled code would wrap them around, and a checkpoint could not hold them."""
    make(2**31 - 1)
    with pytest.raises(gradaccum.ArgumentValueError, match="expected an int <= 2147483647; got 2147483648"):
        make(2**31)


def test_weights_of_pairs_and_callables_fit_into_int32() -> None:
    with pytest.raises(gradaccum.ArgumentValueError, match="expected an int <= 2147483647"):
        gradaccum.until_weight([(0, 8), (9, 2**31)])
    schedule = gradaccum.until_weight(lambda step: 2**31)
    with pytest.raises(gradaccum.ArgumentValueError, match="expected an int <= 2147483647"):
        require_steps(steps_at(schedule, 0, select), 0, schedule)


def test_numpy_integer_is_an_int() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    assert make_options(numpy.int64(4)).steps == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_scale": 0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"min_scale": 0.0},
        {"min_scale": 8.0, "init_scale": 4.0},
        {"max_scale": 2.0, "init_scale": 4.0},
        {"init_scale": math.nan},
        {"init_scale": True},
    ],
)
def test_bad_loss_scales_raise(arguments) -> None:
    with pytest.raises(gradaccum.GradAccumError, match="expected"):
        gradaccum.DynamicLossScale(**arguments)


@pytest.mark.parametrize("scale", [8, 8.0, np.float32(8), np.float64(8), np.int32(8)], ids=lambda scale: type(scale).__name__)
def test_constant_loss_scale_is_any_real_number(scale: Any) -> None:
    assert make_options(4, loss_scale=scale).scale_rule.init_scale == 8.0


@given(weight=st.sampled_from([-1.0, math.nan, math.inf, -math.inf]))
def test_bad_weight_spoils_one_window(weight: float) -> None:
    """Only compiled code lets such a weight through."""
    options = make_options(4)
    state = State(*accumulate(initial_state(), weight, True, select))
    assert state.overflow
    assert state.weight == 0.0
    decision = Decision(*decide(state, 1.0, True, options, select))
    assert not decision.apply
    closed = State(*close(state, decision.apply, decision.overflow, options, select))
    assert closed == State(0, 0, 1, 0.0, False, 1.0, 0)


def test_at_rest_rounds_to_float32() -> None:
    state = at_rest(initial_state(0.1)._replace(weight=0.1))
    assert state.loss_scale == state.weight == 0.10000000149011612
    assert at_rest(state._replace(weight=0.1), float64_weight=True).weight == 0.1


def test_total_beyond_float32_ends_with_its_window() -> None:
    full = at_rest(initial_state()._replace(weight=6e38))
    assert full.weight == math.inf
    assert not Decision(*decide(full, 1.0, True, make_options(4), select)).apply
    for ended in (discard(full), close(full, False, True, make_options(4), select)):
        assert State(*ended).weight == 0, "compiled code has no at_rest"


@pytest.mark.parametrize("reduction", ["mean", "sum", "item_mean"])
def test_denominator_takes_the_place_of_the_weight(reduction: str) -> None:
    options = make_options(None, reduction=reduction, clip_norm=1.0)
    state, divides = with_denominator(State(2, 0, 0, 3.0, False, 8.0, 0), 16.0, options, select)
    decision = Decision(*decide(state, 64.0, True, divides, select))
    assert (decision.grad_norm, decision.divisor) == (0.5, 128.0)
    assert window_loss(32.0, state, divides, select) == 2.0
    empty, _ = with_denominator(State(2, 0, 0, 0.0, False, 8.0, 0), 16.0, options, select)
    assert not Decision(*decide(empty, 0.0, True, divides, select)).apply, "a window of weight 0 stays one"


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan, math.inf])
def test_bad_denominator_in_compiled_code_makes_no_update(denominator: float) -> None:
    state, divides = with_denominator(State(2, 0, 0, 3.0, False, 1.0, 0), denominator, make_options(None), select)
    assert not Decision(*decide(state, 64.0, True, divides, select)).apply


def test_item_mean_asks_for_the_weight() -> None:
    assert given_weight(None, "mean") == given_weight(None, "sum") == 1
    assert given_weight(0, "item_mean") == 0
    with pytest.raises(gradaccum.ArgumentTypeError, match="weight: expected the number of items"):
        given_weight(None, "item_mean")


@pytest.mark.parametrize("options", [{"steps": 4}, {"steps": None, "noise_scale": True}], ids=str)
def test_denominator_is_for_windows_that_the_caller_closes(options: Any) -> None:
    require_denominator_allowed(make_options(None))
    with pytest.raises(gradaccum.ArgumentValueError, match="denominator: expected to be left out beside"):
        require_denominator_allowed(make_options(**options))
    with pytest.raises(gradaccum.UsageError, match="denominator: expected to be left out where several workers"):
        require_denominator(3.0, make_options(None), several=True)


def test_clipping_divisor_beyond_float32_overflows() -> None:
    """Division by it would turn the clipped gradient into 0."""
    options = make_options(1, clip_norm=1e-30)
    decision = Decision(*decide(State(1, 0, 0, 1.0, False, 1.0, 0), 1e30, True, options, select))
    assert (decision.apply, decision.overflow) == (False, True)
    assert Decision(*decide(State(1, 0, 0, 1.0, False, 1.0, 0), 1e30, True, options, select, sys.float_info.max)).apply


@pytest.mark.parametrize("scale", [2.0**-126, 3.4028234663852886e38])
def test_divisors_at_the_limits_are_usable(scale: float) -> None:
    beyond = scale * (0.5 if scale < 1 else 2.0)
    assert Decision(*decide(State(1, 0, 0, 1.0, False, scale, 0), scale, True, make_options(1), select)).apply
    assert not Decision(*decide(State(1, 0, 0, 1.0, False, beyond, 0), scale, True, make_options(1), select)).apply


@pytest.mark.parametrize("steps", [4, None, [(0, 2), (3, 5)], lambda step: step + 1, gradaccum.until_weight(7)])
@pytest.mark.parametrize("loss_scale", [None, 8.0, DynamicLossScale()])
def test_terms_survive_their_codes(steps: Any, loss_scale: Any) -> None:
    terms = terms_of(make_options(steps, reduction="sum", loss_scale=loss_scale), 3)
    assert decode_terms(encode_terms(terms)) == terms
    for codes in ((1, 9, 0, 0, 0), (1, 0, 0, -1, 0), (1, 0), "none"):
        with pytest.raises(CheckpointError, match="terms"):
            decode_terms(codes)
    with pytest.raises(CheckpointError, match=f"format {FORMAT}; got format {FORMAT + 1}"):
        decode_terms((FORMAT + 1, *encode_terms(terms)[1:]))


def test_full_window_is_open() -> None:
    """An interrupt between the last micro-batch and its update leaves a full window. It can be saved and resumed."""
    options = make_options(4)
    full = State(4, 0, 0, 4.0, False, 1.0, 0)
    assert resumed(full, terms_of(options, 0), options) == full
    with pytest.raises(CheckpointError, match="micro_step"):
        resumed(full._replace(micro_step=5), terms_of(options, 0), options)


def test_norm_beyond_float32_is_no_overflow() -> None:
    decision = Decision(*decide(State(1, 0, 0, 1.0, False, 1.0, 0), math.inf, True, make_options(1), select))
    assert decision.apply
    assert not decision.overflow


def test_window_goes_on_with_other_workers() -> None:
    """One worker, or more than before, hold the weight and the flag once between them, and end their windows together."""
    one, other = State(2, 5, 1, 3.0, False, 8.0, 4), State(1, 5, 1, 4.0, True, 8.0, 4)
    for workers in (1, 2, 4):
        states = redistributed([one, other], workers)
        assert (len(states), sum(state.weight for state in states), sum(state.overflow for state in states)) == (workers, 7.0, 1)
        assert {state._replace(weight=0.0, overflow=False) for state in states} == {State(2, 5, 1, 0.0, False, 8.0, 4)}


def test_states_of_two_moments_are_no_window() -> None:
    one = State(2, 5, 1, 3.0, False, 8.0, 4)
    for name in ("optimizer_step", "skipped_windows", "loss_scale", "growth_tracker"):
        with pytest.raises(CheckpointError, match=name):
            redistributed([one, one._replace(**{name: 7})], 1)
    for states, workers in (([], 1), ([one], 0)):
        with pytest.raises(gradaccum.ArgumentValueError, match="at least one"):
            redistributed(states, workers)


def test_other_learning_rates_on_one_worker_are_named() -> None:
    """Whatever the number of workers, and where one alone differs: by a little, in one group, or in the groups' order."""
    for workers in (1, 2, 5000):
        bits = rate_bits([0.1, 1e-9])
        require_same_rates([0.1, 1e-9], [workers * bit for bit in bits], workers, 0)
    for other in ([0.1, 1e-9 + 1e-24], [1e-9, 0.1], [0.1], [0.1, math.nan]):
        added = np.sum([rate_bits(rates) for rates in [[0.1, 1e-9]] * 4999 + [other]], axis=0, dtype=np.float32)
        with pytest.raises(gradaccum.UsageError, match=r"learning rates on rank 3: expected the same .*; got \[0.1, 1e-09\] here"):
            require_same_rates([0.1, 1e-9], added.tolist(), 5000, 3)
