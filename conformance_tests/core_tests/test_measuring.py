"""The partitions that `verify` compares, and the axis on which it finds the items."""

from __future__ import annotations

import pytest

from gradaccum.verification.measuring import item_axis, partitions


def test_partitions_of_seven_and_nine_items() -> None:
    assert [partition.parts for partition in partitions(range(7), 3)] == [
        ((0, 1, 2), (3, 4, 5), (6,)),
        ((0, 3, 6), (1, 4), (2, 5)),
        ((6,), (3, 4, 5), (0, 1, 2)),
        ((0, 1, 2, 3), (4, 5, 6)),
        ((6, 5, 4, 3, 2, 1, 0),),
    ]
    assert partitions(range(9), 3)[3].parts == ((0, 1, 2, 3, 4, 5), (6, 7, 8)), "one of them as long as two"


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
def test_axis_of_the_items(large: tuple[int, ...], small: tuple[int, ...], axis: int | None) -> None:
    assert item_axis(large, small, 8, 2) == axis
