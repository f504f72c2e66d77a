"""A window's statistics in the core's own transitions: its end by weight, and its loss."""

import math
from typing import Any

import pytest

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    DynamicLossScale,
    kit,
    until_weight,
)

REDUCTIONS = ("mean", "sum", "sum_per_item")


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
        kit.is_known(4),
    ) == (True, False, True, True)
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
        ArgumentTypeError, match=r"steps: expected an int >= 1; got until_weight\(4\)"
    ):
        kit.make_options([(0, until_weight(4)), (2, until_weight(8))])
    for steps in (lambda _: until_weight(4), until_weight(lambda _: until_weight(4))):
        with pytest.raises(
            ArgumentTypeError,
            match=r"\(3\): expected an int >= 1; got until_weight\(4\)",
        ):
            kit.terms_of(kit.make_options(steps), 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_window_without_weight_has_no_loss(reduction: str) -> None:
    options = kit.make_options(4, reduction=reduction)
    assert math.isnan(kit.window_loss(0.0, kit.initial_state(), options, kit.select))
    assert kit.window_loss(
        3.0, kit.initial_state()._replace(weight=0.5), options, kit.select
    ) == (3.0 if reduction == "sum" else 6.0)


def test_ignoring_refuses_a_moving_scale() -> None:
    with pytest.raises(ArgumentValueError, match="loss_scale: expected a static scale"):
        kit.make_options(4, on_overflow="ignore", loss_scale=DynamicLossScale())
    assert (
        kit.make_options(4, on_overflow="ignore", loss_scale=8.0).scale_rule.init_scale
        == 8.0
    )
