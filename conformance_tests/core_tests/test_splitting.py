"""The cuts of a large batch, the nests that it comes in, and the merging of other
outputs.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum import ArgumentValueError, AutoMicroBatchSize, UsageError, kit, splitting
from gradaccum.kit import (
    LargeBatch,
    SmallerSizeError,
    divided,
    leaves_of,
    lists_of_one_kind,
    make_division,
    make_options,
    require_one_size,
    spread,
)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Any
    y: Any
    derived: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), "no micro-batch of one leaf could pass"


@given(items=st.integers(1, 300), steps=st.integers(1, 40))
def test_each_item_once_in_order(items: int, steps: int) -> None:
    made = divided(make_division(steps), items)
    assert [item for cut in made for item in range(cut.start, cut.stop)] == list(
        range(items)
    )
    assert len(made) <= steps
    assert max(cut.items for cut in made) == -(-items // steps)
    assert len({cut.items for cut in made[:-1]}) <= 1


NESTS = [
    (1.0, [""]),
    (
        {"a": np.ones(1), "b": [np.ones(2), {"c": 2}]},
        ["['a']", "['b'][0]", "['b'][1]['c']"],
    ),
    (Pair(np.ones(1), ["x", "y"]), [".left", ".right"]),
    (Sample(np.ones(1), np.zeros(1)), [".x", ".y", ".derived"]),
    (collections.UserDict(z=np.ones(1)), ["['z']"]),
    ([], []),
]


@pytest.mark.parametrize(
    ("nest", "paths"), NESTS, ids=lambda value: type(value).__name__
)
def test_nest_and_its_paths(nest: Any, paths: list[str]) -> None:
    leaves = leaves_of(nest)
    assert [leaf.path for leaf in leaves] == paths
    mapped = kit.mapped(str, nest)
    assert type(mapped) is type(nest) or paths == [""]
    assert leaves_of(mapped) == [(path, str(value)) for path, value in leaves]
    assert [leaf.value for leaf in leaves_of(nest)] == [
        leaf.value for leaf in leaves
    ], "the user's own nest has changed"


def test_prefix_reaches_every_leaf_below() -> None:
    nest = (np.ones(1), {"ids": np.ones(1), "grid": (np.ones(1), np.ones(1))})
    assert spread(0, nest, "axes") == [0, 0, 0, 0]
    assert spread((1, {"ids": 0, "grid": None}), nest, "axes") == [1, 0, None, None]
    assert spread([1, {"ids": 0, "grid": (2, 3)}], nest, "axes") == [1, 0, 2, 3]
    with pytest.raises(
        ArgumentValueError,
        match=(
            r"axes\[1\]: expected one value, or a structure with the same outer levels"
            r" as dict\(\['ids'\], \['grid'\]\)"
        ),
    ):
        spread((1, {"ids": 0}), nest, "axes")


ROWS = np.ones((2, 4))
LISTS = {
    "one kind": ([{"w": 0.5}, {"w": 1.0}], 0, [("batch[1]", 2)]),
    "sizes": (((3, 5), (7, 2)), 0, [("batch[1]", 2)]),
    "some are None": ([ROWS, None, ROWS], 0, [("batch[1]", 3)]),
    "below a dict": ({"meta": [{"w": 0.5}]}, 0, [("batch[1]['meta']", 1)]),
    "whole": ([{"w": 0.5}, {"w": 1.0}], (0, None), []),
    "an axis for each": ([ROWS, ROWS], (0, [0, 1]), []),
    "other dtypes": ([ROWS, ROWS.astype(int)], 0, []),
    "other ranks": ([ROWS, ROWS[0]], 0, []),
    "plain values": ([3, None, "x"], 0, []),
    "named": (Pair(ROWS, ROWS), 0, []),
}


@pytest.mark.parametrize("name", LISTS)
def test_list_whose_elements_may_be_the_items(name: str) -> None:
    nest, axes, expected = LISTS[name]
    assert lists_of_one_kind((ROWS, nest), axes) == expected


X = ("batch[0]", 8)
TARGETS = ("batch[1]", 8)
THREE_CHANNELS = [(f"batch[0][{image}]", 3) for image in range(8)]
OF_PAIR = [("batch[1][0]", 8), ("batch[1][1]", 8)]


@pytest.mark.parametrize(
    ("sizes", "lists", "words"),
    [
        pytest.param([X, *OF_PAIR], [("batch[1]", 2)], None, id="two arrays beside x"),
        pytest.param(
            [X, *OF_PAIR],
            [("batch[1]", 8)],
            r"batch\[1\]: expected a list .* got 8 .* one axis per element",
            id="as long as the batch",
        ),
        pytest.param(
            [*THREE_CHANNELS, TARGETS],
            [("batch[0]", 8)],
            r"batch\[1\]: expected 3 items.* got 8.* \"key\" for .* stack the elements",
            id="images and targets",
        ),
        pytest.param([], [], "batch: expected an array to split", id="nothing"),
    ],
)
def test_number_of_items(
    sizes: list[tuple[str, int]], lists: list[tuple[str, int]], words: str | None
) -> None:
    if words is None:
        assert require_one_size(sizes, lists) == sizes[0][1]
    else:
        with pytest.raises(ArgumentValueError, match=f"^{words}"):
            require_one_size(sizes, lists)


def test_frames_of_a_failed_attempt_are_freed() -> None:
    """Those of the error, of what it was raised from and of what it was raised beside;
    a circle of causes ends.
    """

    class Array:
        """What an attempt holds."""

    alive = []

    def attempt(cause=None):
        held = Array()
        alive.append(weakref.ref(held))
        raise MemoryError from cause

    errors: list[BaseException] = []
    for _ in range(3):
        try:
            attempt(errors[-1] if len(errors) == 1 else None)
        except MemoryError as error:
            errors.append(error)
    errors[2].__context__ = errors[1]
    errors[0].__context__ = errors[2]
    splitting.free_frames(errors[2])
    assert [each() for each in alive] == [None] * 3


class Attempts:
    """Attempts in which up to `most` items fit; `tried` has their sizes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []

    def __call__(self, size: int, smaller_size: int) -> str:
        self.tried.append(size)
        if size > self.most:
            raise SmallerSizeError(smaller_size) from MemoryError()
        return f"by {size}"


def test_automatic_size_halves_and_remembers() -> None:
    sizes = AutoMicroBatchSize(memory_limit=100)
    attempts = Attempts(0)
    retries = []
    with pytest.raises(
        UsageError,
        match=(
            "micro-batch of one item to fit in memory; got an item that does not fit"
            " into 100 bytes"
        ),
    ) as raised:
        sizes.search("step", 13, attempts, lambda: retries.append(1))
    assert isinstance(raised.value.__cause__, MemoryError)
    assert (attempts.tried, len(retries), sizes.size) == ([13, 7, 4, 2, 1], 4, None)
    attempts = Attempts(4)
    assert sizes.search("step", 13, attempts) == "by 4"
    assert attempts.tried == [13, 7, 4]
    assert sizes.size == 4
    for key, items, tried in (
        ("step", 13, [4]),
        ("step", 3, [3]),
        ("step", 13, [4]),
        ("other", 3, [3]),
        ("other", 8, [8, 4]),
    ):
        attempts = Attempts(4)
        sizes.search(key, items, attempts)
        assert attempts.tried == tried
    sizes.forget()
    assert sizes.size is None
    attempts = Attempts(13)
    sizes.search("step", 13, attempts)
    assert attempts.tried == [13]


def test_another_worker_chooses_the_size() -> None:
    """The size that an error names is tried next, even if it is not half."""
    sizes = AutoMicroBatchSize()
    tried = []

    def attempt(size, smaller_size):
        tried.append((size, smaller_size))
        if size > 3:
            raise SmallerSizeError(3)
        return size

    assert sizes.search("step", 16, attempt) == 3
    assert tried == [(16, 8), (3, 2)]


def test_agreed_size_is_remembered_after_a_short_batch() -> None:
    """Another worker with a full batch has found 32, which is more than the 4 items."""
    sizes = AutoMicroBatchSize()
    tried = []

    def attempt(size, _):
        tried.append(size)
        if size in (4, 64):
            raise SmallerSizeError(32)

    sizes.search("step", 4, attempt)
    sizes.search("step", 64, attempt)
    assert tried == [4, 32, 32]


class Unread:
    """An array that counts how often it is sliced."""

    shape = (6,)
    reads = 0

    def __getitem__(self, items: slice) -> list[int]:
        self.reads += 1
        return list(range(6))[items]


def test_array_is_sliced_when_a_micro_batch_needs_it() -> None:
    array = Unread()
    batch = LargeBatch((array,), 0)
    micro_batches = batch.micro_batches(make_division(3), make_options(3))
    assert next(micro_batches).arguments == ([0, 1],)
    assert array.reads == 1
