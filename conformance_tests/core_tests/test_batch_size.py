"""The effective batch size and the learning rate that goes with it."""

from __future__ import annotations

import math

import pytest

from gradaccum import ArgumentValueError, effective_batch_size, scaled_learning_rate


def test_items_in_one_update() -> None:
    assert effective_batch_size(8, 4) == 32
    assert effective_batch_size(8, 4, world_size=16) == 512


def test_linear_rule_of_the_paper() -> None:
    """Goyal et al. train ResNet-50 with 0.1 at 256 images and with 3.2 at 8192."""
    assert scaled_learning_rate(0.1, 256) == scaled_learning_rate(0.1, 1, 1) == 0.1
    assert scaled_learning_rate(0.1, 8192) == pytest.approx(3.2, rel=1e-15)


def test_square_root_rule() -> None:
    assert scaled_learning_rate(
        1e-3, 1024, reference=512, rule="sqrt"
    ) == 1e-3 * math.sqrt(2)


@pytest.mark.parametrize("number", [0, -1])
def test_numbers_are_above_zero(number: int) -> None:
    for place in range(3):
        sizes = [4, 4, 4]
        sizes[place] = number
        with pytest.raises(ArgumentValueError, match="expected an int >= 1"):
            effective_batch_size(*sizes)
        with pytest.raises(ArgumentValueError, match="a finite number > 0"):
            scaled_learning_rate(*sizes)
