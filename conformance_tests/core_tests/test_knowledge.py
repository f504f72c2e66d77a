"""A window's statistics in the core's own transitions: its end by weight, and its loss."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    DynamicLossScale,
    until_weight,
)
from gradaccum.kit import (
    UntilWeight,
    initial_state,
    is_known,
    make_options,
    require_steps,
    select,
    steps_at,
    terms_of,
    window_loss,
)

REDUCTIONS = ("mean", "sum", "sum_per_item")


def test_weight_of_a_window_has_a_schedule() -> None:
    pairs = until_weight([(0, 8), (5, 16)])
    function = until_weight(lambda step: 8 + step)
    assert [steps_at(pairs, step, select) for step in (0, 4, 5)] == [
        until_weight(8),
        until_weight(8),
        until_weight(16),
    ]
    assert steps_at(function, 3, select) == until_weight(11)
    assert (
        is_known(pairs),
        is_known(function),
        is_known(until_weight(8)),
        is_known(4),
    ) == (True, False, True, True)
    assert terms_of(make_options(function), 3).steps == until_weight(11)
    with pytest.raises(
        ArgumentValueError, match=r"until_weight\(...\)\(3\): expected an int >= 1"
    ):
        require_steps(UntilWeight(0), 3, function)


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
        make_options([(0, until_weight(4)), (2, until_weight(8))])
    for steps in (lambda _: until_weight(4), until_weight(lambda _: until_weight(4))):
        with pytest.raises(
            ArgumentTypeError,
            match=r"\(3\): expected an int >= 1; got until_weight\(4\)",
        ):
            terms_of(make_options(steps), 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_window_without_weight_has_no_loss(reduction: str) -> None:
    options = make_options(4, reduction=reduction)
    assert math.isnan(window_loss(0.0, initial_state(), options, select))
    assert window_loss(3.0, initial_state()._replace(weight=0.5), options, select) == (
        3.0 if reduction == "sum" else 6.0
    )


def test_ignoring_refuses_a_moving_scale() -> None:
    with pytest.raises(ArgumentValueError, match="loss_scale: expected a static scale"):
        make_options(4, on_overflow="ignore", loss_scale=DynamicLossScale())
    assert (
        make_options(4, on_overflow="ignore", loss_scale=8.0).scale_rule.init_scale
        == 8.0
    )
