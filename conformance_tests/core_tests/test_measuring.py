"""The partitions that `verify` compares, the axis on which it finds the items, and the
floor of a unit.
"""

from __future__ import annotations

import math

import pytest

from gradaccum.kit import Conditions, Precision
from gradaccum.verification.measuring import Bench, Way, item_axis, partitions

from .plain_subject import PlainSubject


def test_partitions_of_seven_and_nine_items() -> None:
    assert [partition.parts for partition in partitions(range(7), 3)] == [
        ((0, 1, 2), (3, 4, 5), (6,)),
        ((0, 3, 6), (1, 4), (2, 5)),
        ((6,), (3, 4, 5), (0, 1, 2)),
        ((0, 1, 2, 3), (4, 5, 6)),
        ((6, 5, 4, 3, 2, 1, 0),),
    ]
    assert partitions(range(9), 3)[3].parts == ((0, 1, 2, 3, 4, 5), (6, 7, 8)), (
        "one of them as long as two"
    )


@pytest.mark.parametrize(
    ("large", "small", "axis"),
    [
        ((8, 3), (2, 3), 0),
        ((3, 8), (3, 2), 1),
        ((16, 3), (4, 3), 0),
        ((8, 8), (2, 2), None),
        ((12, 3), (2, 3), None),
        ((8, 3), (8, 3), None),
        ((8, 3), (3, 3), None),
        ((8,), (), None),
    ],
)
def test_axis_of_the_items(
    large: tuple[int, ...], small: tuple[int, ...], axis: int | None
) -> None:
    assert item_axis(large, small, 8, 2) == axis


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 0.5), ("sum", 1.0)])
@pytest.mark.parametrize(("terms", "additions"), [(1, 1), (2, 1), (16, 4)])
def test_floor_of_a_unit(
    reduction: str, factor: float, terms: int, additions: int
) -> None:
    """Each of two gradients (3, 6) is rounded once, and its sum as often as it is added
    up in pairs, in float32 at the coarsest.
    """

    class Coarse(PlainSubject):
        def precision(self, name: str) -> Precision:
            return Precision(2.0**-8, 1e-3, 4, terms)

    bench = Bench(
        Coarse(lambda x, n, world: {"w": 3.0}, names=["w"]), 2, Way(reduction)
    )
    floor = (2.0**-8 + additions * 2.0**-23) * 2 * factor * math.hypot(
        3, 6
    ) + 2 * 1e-3 * 2
    assert bench.floor(Conditions()) == {"w": pytest.approx(floor, rel=1e-12)}


def test_unit_is_what_roundings_of_the_inputs_make_of_a_gradient() -> None:
    """The next numbers beside 1.5 times a rounding are two steps away."""
    bench = Bench(
        PlainSubject(lambda x, n, world: {"w": 1 + 1e6 * (world.w - 1.5)}, names=["w"]),
        2,
        Way("mean"),
    )
    assert bench.units(Conditions()) == {
        "w": pytest.approx(2e6 * 2.0**-52 * math.hypot(1, 2), rel=1e-3)
    }
