"""A window's statistics in the core's own transitions: its end by weight, its loss and its noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError, CheckpointError, DynamicLossScale, until_weight
from gradaccum.kit import (
    Decision,
    Noise,
    State,
    UntilWeight,
    accumulate,
    close,
    decide,
    ends,
    first_seen,
    forget_window,
    initial_state,
    is_first,
    is_known,
    make_options,
    measures,
    no_noise,
    noise_scale,
    require_steps,
    resumed,
    select,
    steps_at,
    terms_of,
    window_seen,
)

REDUCTIONS = ("mean", "sum", "item_mean")
IGNORING = make_options(4, on_overflow="ignore")


def test_weight_of_a_window_has_a_schedule() -> None:
    pairs, function = until_weight([(0, 8), (5, 16)]), until_weight(lambda step: 8 + step)
    assert [steps_at(pairs, step, select) for step in (0, 4, 5)] == [until_weight(8), until_weight(8), until_weight(16)]
    assert steps_at(function, 3, select) == until_weight(11)
    assert (is_known(pairs), is_known(function), is_known(until_weight(8))) == (True, False, True)
    assert terms_of(make_options(function), 3).steps == until_weight(11)
    with pytest.raises(ArgumentValueError, match=r"until_weight\(...\)\(3\): expected an int >= 1"):
        require_steps(UntilWeight(0), 3, function)


@pytest.mark.parametrize("weight", [0, -1, 0.5, None, "8", [(1, 8)], until_weight(8)])
def test_bad_weights_of_a_window_raise(weight: Any) -> None:
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=r"^weight: expected .* Write steps=until_weight\("):
        until_weight(weight)


def test_weights_stand_inside_of_their_schedule() -> None:
    """A backend asks the schedule itself whether windows end by weight, before any callable."""
    with pytest.raises(ArgumentTypeError, match=r"got until_weight\(4\).* Write steps=until_weight\(\[\(0, "):
        make_options([(0, until_weight(4)), (2, until_weight(8))])
    for steps in (lambda _: until_weight(4), until_weight(lambda _: until_weight(4))):
        with pytest.raises(ArgumentTypeError, match=r"\(3\): expected an int >= 1; got until_weight\(4\)"):
            terms_of(make_options(steps), 3)


def test_window_by_weight_resumes_as_one() -> None:
    by_weight, by_count = make_options(until_weight(8)), make_options(8)
    open_one = State(3, 0, 0, 7.0, False, 1.0, 0)
    assert resumed(open_one, terms_of(by_weight, 0), by_weight) == open_one
    for saved, own in ((by_weight, by_count), (by_count, by_weight), (by_weight, make_options(until_weight(9)))):
        with pytest.raises(CheckpointError, match="steps"):
            resumed(open_one, terms_of(saved, 0), own)


def estimated(reduction: str, windows: int, scale: float = 1.0) -> tuple[float, float]:
    """The noise scale that windows of uneven micro-batches show, and the true one."""
    rng, options = np.random.default_rng(7), make_options(until_weight(40), noise_scale=0.998, reduction=reduction)
    gradient, deviation = scale * rng.standard_normal(50), 2.0 * scale
    noise, state = no_noise(), initial_state(4.0)
    for _ in range(windows):
        total = np.zeros(50)
        while not ends(state, options.steps, select):
            items = int(rng.integers(3, 12))
            own = gradient + deviation / math.sqrt(items) * rng.standard_normal(50)
            total += state.loss_scale * items * own
            state = State(*accumulate(state, float(items), True, select))
            if is_first(noise, state):
                noise = Noise(*first_seen(noise, state, float(np.linalg.norm(total)), select))
        decision = Decision(*decide(state, float(np.linalg.norm(total)), True, options, select))
        noise = Noise(*window_seen(noise, state, decision.grad_norm, options, select))
        state = State(*close(state, decision.apply, decision.overflow, options, select))
    return noise_scale(noise, select), deviation**2 * 50 / float(gradient @ gradient)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_noise_scale_is_the_true_one(reduction: str) -> None:
    """The running means hold some 1000 windows, so the estimate is off by a few percent; a forgotten weight is off by a factor."""
    measured, truth = estimated(reduction, 2000)
    assert measured == pytest.approx(truth, rel=0.1)


def test_noise_scale_does_not_depend_on_the_gradient_scale() -> None:
    assert estimated("mean", 50, 2.0**-20)[0] == pytest.approx(estimated("mean", 50)[0], rel=1e-9)


def test_noise_scale_of_several_workers() -> None:
    """The first micro-batches of four workers, uneven, beside the window of all."""
    rng, options = np.random.default_rng(3), make_options(None, noise_scale=0.998)
    gradient, deviation, noise = rng.standard_normal(50), 2.0, no_noise()
    for _ in range(2000):
        total, weight, first = np.zeros(50), 0.0, []
        for _ in range(4):
            for index, items in enumerate(rng.integers(1, 9, size=int(rng.integers(1, 4)))):
                own = gradient + deviation / math.sqrt(items) * rng.standard_normal(50)
                total, weight = total + items * own, weight + float(items)
                first += [(float(items), float(own @ own))] if index == 0 else []
        small = sum(items for items, _ in first)
        noise = noise._replace(first_weight=small, first_square=sum(items * square for items, square in first) / small)
        state = initial_state()._replace(micro_step=1, weight=weight)
        noise = Noise(*window_seen(noise, state, float(np.linalg.norm(total / weight)), options, select, len(first)))
    assert noise_scale(noise, select) == pytest.approx(deviation**2 * 50 / float(gradient @ gradient), rel=0.1)


def test_windows_that_tell_nothing_move_no_mean() -> None:
    """One micro-batch, a gradient that is not finite or leaves float32's range; and a discard."""
    options, held = make_options(4, noise_scale=True), Noise(2.0, 4.0, 3.0, 1.0)
    state = State(2, 0, 0, 8.0, False, 1.0, 0)
    assert window_seen(held, state, 1.5, options, select)[2:] != (3.0, 1.0)
    for noise, ended, norm in (
        (held, state._replace(weight=2.0), 1.5),
        (held, state, math.inf),
        (held, state, math.nan),
        (held, state, 0.0),
        (held._replace(first_square=math.nan), state, 1.5),
        (held._replace(first_weight=0.0, first_square=0.0), state, 1.5),
    ):
        assert window_seen(noise, ended, norm, options, select) == (0.0, 0.0, 3.0, 1.0)
    assert forget_window(held) == (0.0, 0.0, 3.0, 1.0)


def test_noise_scale_that_is_not_known() -> None:
    assert math.isnan(noise_scale(no_noise(), select))
    assert noise_scale(Noise(0.0, 0.0, 3.0, -1.0), select) == math.inf
    assert noise_scale(Noise(0.0, 0.0, -3.0, 1.0), select) == 0.0


def test_ignoring_measures_nothing_by_itself() -> None:
    assert not measures(IGNORING)
    assert measures(make_options(4))
    for asked in ({"clip_norm": 1.0}, {"skip_norm": 1.0}, {"noise_scale": True}):
        assert measures(make_options(4, on_overflow="ignore", **asked))


@pytest.mark.parametrize("loss_scale", [DynamicLossScale(), DynamicLossScale(growth_factor=2.0, backoff_factor=0.5)])
def test_ignoring_refuses_a_moving_scale(loss_scale: DynamicLossScale) -> None:
    with pytest.raises(ArgumentValueError, match="loss_scale: expected one that does not move"):
        make_options(4, on_overflow="ignore", loss_scale=loss_scale)
    assert make_options(4, on_overflow="ignore", loss_scale=8.0).scale_rule.init_scale == 8.0
    assert gradaccum.StaticLossScale(8.0).rule() == make_options(4, on_overflow="ignore", loss_scale=8.0).scale_rule
