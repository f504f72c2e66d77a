"""A window's statistics in the core's own transitions: its end by weight, its loss and
its noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckpointError,
    DynamicLossScale,
    kit,
    until_weight,
)

REDUCTIONS = ("mean", "sum", "item_mean")
IGNORING = kit.make_options(4, on_overflow="ignore")


def test_weight_of_a_window_has_a_schedule() -> None:
    pairs, function = (
        until_weight([(0, 8), (5, 16)]),
        until_weight(lambda step: 8 + step),
    )
    assert [kit.steps_at(pairs, step, kit.select) for step in (0, 4, 5)] == [
        until_weight(8),
        until_weight(8),
        until_weight(16),
    ]
    assert kit.steps_at(function, 3, kit.select) == until_weight(11)
    assert (
        kit.is_known(pairs),
        kit.is_known(function),
        kit.is_known(until_weight(8)),
    ) == (True, False, True)
    assert kit.terms_of(kit.make_options(function), 3).steps == until_weight(11)
    with pytest.raises(
        ArgumentValueError, match=r"until_weight\(...\)\(3\): expected an int >= 1"
    ):
        kit.require_steps(kit.UntilWeight(0), 3, function)


@pytest.mark.parametrize("weight", [0, -1, 0.5, None, "8", [(1, 8)], until_weight(8)])
def test_bad_weights_of_a_window_raise(weight: Any) -> None:
    with pytest.raises(
        (ArgumentTypeError, ArgumentValueError),
        match=r"^weight: expected .* Write steps=until_weight\(",
    ):
        until_weight(weight)


def test_weights_stand_inside_of_their_schedule() -> None:
    """A backend asks the schedule itself whether windows end by weight, before any
    callable.
    """
    with pytest.raises(
        ArgumentTypeError,
        match=r"got until_weight\(4\).* Write steps=until_weight\(\[\(0, ",
    ):
        kit.make_options([(0, until_weight(4)), (2, until_weight(8))])
    for steps in (lambda _: until_weight(4), until_weight(lambda _: until_weight(4))):
        with pytest.raises(
            ArgumentTypeError,
            match=r"\(3\): expected an int >= 1; got until_weight\(4\)",
        ):
            kit.terms_of(kit.make_options(steps), 3)


def test_window_by_weight_resumes_as_one() -> None:
    by_weight, by_count = kit.make_options(until_weight(8)), kit.make_options(8)
    open_one = kit.State(3, 0, 0, 7.0, False, 1.0, 0)
    assert kit.resumed(open_one, kit.terms_of(by_weight, 0), by_weight) == open_one
    for saved, own in (
        (by_weight, by_count),
        (by_count, by_weight),
        (by_weight, kit.make_options(until_weight(9))),
    ):
        with pytest.raises(CheckpointError, match="steps"):
            kit.resumed(open_one, kit.terms_of(saved, 0), own)


def estimated(reduction: str, windows: int, scale: float = 1.0) -> tuple[float, float]:
    """The noise scale that windows of uneven micro-batches show, and the true one."""
    rng, options = (
        np.random.default_rng(7),
        kit.make_options(until_weight(40), noise_scale=0.998, reduction=reduction),
    )
    gradient, deviation = scale * rng.standard_normal(50), 2.0 * scale
    noise, state = kit.no_noise(), kit.initial_state(4.0)
    for _ in range(windows):
        total = np.zeros(50)
        while not kit.ends(state, options.steps, kit.select):
            items = int(rng.integers(3, 12))
            own = gradient + deviation / math.sqrt(items) * rng.standard_normal(50)
            total += state.loss_scale * items * own
            state = kit.State(*kit.accumulate(state, float(items), True, kit.select))
            if kit.is_first(noise, state):
                noise = kit.Noise(
                    *kit.first_seen(
                        noise, state, float(np.linalg.norm(total)), kit.select
                    )
                )
        decision = kit.Decision(
            *kit.decide(state, float(np.linalg.norm(total)), True, options, kit.select)
        )
        noise = kit.Noise(
            *kit.window_seen(noise, state, decision.grad_norm, options, kit.select)
        )
        state = kit.State(
            *kit.close(state, decision.apply, decision.overflow, options, kit.select)
        )
    return kit.noise_scale(noise, kit.select), deviation**2 * 50 / float(
        gradient @ gradient
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_noise_scale_is_the_true_one(reduction: str) -> None:
    """The running means hold some 1000 windows, so the estimate is off by a few
    percent; a forgotten weight is off by a factor.
    """
    measured, truth = estimated(reduction, 2000)
    assert measured == pytest.approx(truth, rel=0.1)


def test_noise_scale_does_not_depend_on_the_gradient_scale() -> None:
    assert estimated("mean", 50, 2.0**-20)[0] == pytest.approx(
        estimated("mean", 50)[0], rel=1e-9
    )


def test_noise_scale_of_several_workers() -> None:
    """The first micro-batches of four workers, uneven, beside the window of all."""
    rng, options = np.random.default_rng(3), kit.make_options(None, noise_scale=0.998)
    gradient, deviation, noise = rng.standard_normal(50), 2.0, kit.no_noise()
    for _ in range(2000):
        total, weight, first = np.zeros(50), 0.0, []
        for _ in range(4):
            for index, items in enumerate(
                rng.integers(1, 9, size=int(rng.integers(1, 4)))
            ):
                own = gradient + deviation / math.sqrt(items) * rng.standard_normal(50)
                total, weight = total + items * own, weight + float(items)
                first += [(float(items), float(own @ own))] if index == 0 else []
        shares = [
            kit.noise_shares(
                noise._replace(first_weight=items, first_square=square), kit.select
            )
            for items, square in first
        ]
        assert kit.noise_shares(kit.no_noise(), kit.select) == (0.0, 0.0, 0.0), (
            "a worker without a micro-batch has no share"
        )
        small, squares, having = map(sum, zip(*shares, strict=True))
        noise = kit.Noise(*kit.joined_noise(noise, small, squares, kit.select))
        state = kit.initial_state()._replace(micro_step=1, weight=weight)
        noise = kit.Noise(
            *kit.window_seen(
                noise,
                state,
                float(np.linalg.norm(total / weight)),
                options,
                kit.select,
                having,
            )
        )
    assert kit.noise_scale(noise, kit.select) == pytest.approx(
        deviation**2 * 50 / float(gradient @ gradient), rel=0.1
    )


def test_first_micro_batch_has_some_weight() -> None:
    state = kit.initial_state()._replace(micro_step=1)
    assert not kit.is_first(kit.no_noise(), state)
    assert kit.is_first(kit.no_noise(), state._replace(weight=0.5))
    assert not kit.is_first(
        kit.no_noise()._replace(first_weight=0.5), state._replace(weight=0.75)
    )


def test_windows_that_tell_nothing_move_no_mean() -> None:
    """One micro-batch, a gradient that is not finite or leaves float32's range; and a
    discard.
    """
    options, held = kit.make_options(4, noise_scale=True), kit.Noise(2.0, 4.0, 3.0, 1.0)
    state = kit.State(2, 0, 0, 8.0, False, 1.0, 0)
    assert kit.window_seen(held, state, 1.5, options, kit.select)[2:] != (3.0, 1.0)
    for noise, ended, norm in (
        (held, state._replace(weight=2.0), 1.5),
        (held, state._replace(weight=0.0), 0.0),
        (held, state, math.inf),
        (held, state, math.nan),
        (held, state, 0.0),
        (held._replace(first_square=math.nan), state, 1.5),
        (held._replace(first_weight=0.0, first_square=0.0), state, 1.5),
    ):
        assert kit.window_seen(noise, ended, norm, options, kit.select) == (
            0.0,
            0.0,
            3.0,
            1.0,
        )
    assert kit.forget_window(held) == (0.0, 0.0, 3.0, 1.0)
    assert kit.first_seen(held, state, 9.0, kit.select) == held, (
        "the second micro-batch"
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("noise_scale", [True, 0.75])
@pytest.mark.parametrize("workers", [1, 3])
def test_running_means_by_two_equations(
    reduction: str, noise_scale: bool | float, workers: int
) -> None:
    """The squares of n first micro-batches of weight b in all, and of a window of
    weight B: b s + n tr and B s + tr.
    """
    options, keep = (
        kit.make_options(8, noise_scale=noise_scale, reduction=reduction),
        0.99 if noise_scale is True else noise_scale,
    )
    small, first, large, norm, old = 2.0, 5.0, 12.0, 1.5, (3.0, 0.25)
    whole = (norm / large if reduction == "sum" else norm) ** 2
    square, trace = np.linalg.solve(
        [[small, workers], [large, 1]], [small * first, large * whole]
    )
    state = kit.State(4, 0, 0, large, False, 1.0, 0)
    seen = kit.Noise(
        *kit.window_seen(
            kit.Noise(small, first, *old), state, norm, options, kit.select, workers
        )
    )
    assert seen == (
        0,
        0,
        *(
            pytest.approx(keep * a + (1 - keep) * b, rel=1e-12)
            for a, b in zip(old, (trace, square), strict=True)
        ),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_window_without_weight_has_no_loss(reduction: str) -> None:
    options = kit.make_options(4, reduction=reduction)
    assert math.isnan(kit.window_loss(0.0, kit.initial_state(), options, kit.select))
    assert kit.window_loss(
        3.0, kit.initial_state()._replace(weight=0.5), options, kit.select
    ) == (3.0 if reduction == "sum" else 6.0)


def test_noise_scale_that_is_not_known() -> None:
    assert kit.forget_window(kit.no_noise()) == kit.no_noise()
    assert kit.joined_noise(kit.no_noise(), 0.5, 2.0, kit.select) == (
        0.5,
        4.0,
        0.0,
        0.0,
    )
    assert math.isnan(kit.noise_scale(kit.no_noise(), kit.select))
    for trace in (3.0, -1.0):
        assert kit.noise_scale(kit.Noise(0.0, 0.0, trace, -1.0), kit.select) == math.inf
    assert kit.noise_scale(kit.Noise(0.0, 0.0, -3.0, 1.0), kit.select) == 0.0


def test_ignoring_measures_nothing_by_itself() -> None:
    assert not kit.measures(IGNORING)
    assert kit.measures(kit.make_options(4))
    for asked in ({"clip_norm": 1.0}, {"skip_norm": 1.0}, {"noise_scale": True}):
        assert kit.measures(kit.make_options(4, on_overflow="ignore", **asked))


@pytest.mark.parametrize(
    "loss_scale",
    [DynamicLossScale(), DynamicLossScale(growth_factor=2.0, backoff_factor=0.5)],
)
def test_ignoring_refuses_a_moving_scale(loss_scale: DynamicLossScale) -> None:
    with pytest.raises(
        ArgumentValueError, match="loss_scale: expected one that does not move"
    ):
        kit.make_options(4, on_overflow="ignore", loss_scale=loss_scale)
    assert (
        kit.make_options(4, on_overflow="ignore", loss_scale=8.0).scale_rule.init_scale
        == 8.0
    )
    assert (
        gradaccum.StaticLossScale(8.0).rule()
        == kit.make_options(4, on_overflow="ignore", loss_scale=8.0).scale_rule
    )
