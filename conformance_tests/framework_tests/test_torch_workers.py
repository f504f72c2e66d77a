"""Windows over two processes that train one `DistributedDataParallel` module."""

from __future__ import annotations

import math
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from conformance_tests.framework_tests.torch_workers import CHECKS
from conformance_tests.framework_tests.torch_workers.jobs import (
    reports_of,
    require_passed,
    run_workers,
)
from gradaccum.kit import initial_state
from gradaccum_torch.workers.group import LARGE_BYTES, decode, encode, is_exact, riders

pytestmark = pytest.mark.xdist_group("torch_workers")
PACKAGE = "conformance_tests.framework_tests.torch_workers"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """One run for all tests."""
    return reports_of(PACKAGE, tmp_path_factory.mktemp("workers"))


@pytest.mark.parametrize("name", CHECKS)
def test_two_workers(name: str, reports: list[dict[str, str]]) -> None:
    require_passed(name, reports)


def test_numbers_are_exact_in_float32() -> None:
    """Also where a bucket of float32 brings float64 weights of many workers, added up
    in any order.
    """
    weights = [0.1, 1e17, 3.0, 2.0**-184, 2.0**53 - 1, math.pi, -(2.0**-149), 3.4e38]
    states = [
        initial_state(1.0)._replace(weight=weight, overflow=rank == 2, micro_step=rank)
        for rank, weight in enumerate(weights)
    ]
    sent = [
        encode(state, rank > 3, [False, rank == 1], (), (1, rank))
        for rank, state in enumerate(states)
    ]
    for order in (sent, sent[::-1]):
        assert decode(added(order), 0, 2) == (
            math.fsum(weights),
            True,
            True,
            4,
            [0, 1],
            [],
            [8, 28],
        )


@given(st.floats(0, 2.0**135, exclude_max=True))
@example(2.0**-184)
@example(2.0**-185)
@example(math.nextafter(2.0**-132, 0))
def test_a_weight_that_would_be_rounded_is_known(weight: float) -> None:
    assert is_exact(weight) is (
        decode(
            added([encode(initial_state(1.0)._replace(weight=weight), False, [])])
        ).weight
        == weight
    )


def added(sent: list[bytes]) -> Any:
    """What all workers have after a reduction in float32."""
    return sum(torch.tensor(list(numbers)).float() for numbers in sent)


@pytest.mark.parametrize("weight", [0.1, -1 / 3, 3.4e38])
def test_the_most_workers_are_exact(weight: float) -> None:
    """Each has the largest byte somewhere, and the sum of all is still exact in
    float32.
    """
    numbers = (
        torch.tensor(
            list(encode(initial_state(1.0)._replace(weight=weight), False, []))
        ).float()
        * 65_793
    )
    assert decode(numbers).weight == float(65_793 * Fraction(weight))


INF = math.inf


@pytest.mark.parametrize(
    "losses",
    [
        (0.1, 2.0**-149, -3.0),
        (INF, 1.0, 2.0),
        (1e300, 1.0, INF),
        (-1e41, 0.0, -INF),
        (INF, -INF, 1.0),
        (math.nan, 1.0, 2.0),
    ],
)
def test_losses_travel_as_they_are(losses: tuple[float, ...]) -> None:
    """Also those that are not finite, which float32 arithmetic beside the other numbers
    would spread.
    """
    state = initial_state(1.0)._replace(weight=2.0)
    found = decode(
        added(
            [
                encode(state, False, [True], [loss, 7.5 * rank])
                for rank, loss in enumerate(losses)
            ]
        ),
        2,
    )
    assert found[:5] == (6.0, False, False, 0, [3])
    assert found.others[1] == 22.5
    assert repr(found.others[0]) == repr(sum(losses))


def test_riders_are_small_and_alike() -> None:
    """As many of the first dtype as a bucket holds; no large one, none that rounds
    counts, none that nobody has.
    """
    meta = torch.device("meta")
    small, large = (
        torch.empty(2**18, device=meta),
        torch.empty(LARGE_BYTES // 4, device=meta),
    )
    sums = [None, small.bfloat16(), large, small, small.double(), *[small] * 40]
    assert riders(sums, meta) == [3, *range(5, 29)], "25 of a mebibyte"
    assert riders(sums, torch.device("cpu")) == riders([], meta) == []


MOMENTS = (
    "in_mid_window",
    "before_the_reduction",
    "during_the_reduction",
    "before_the_buffers",
    "after_the_reduction",
)
LOST = [
    (when, size)
    for size in ("small", "large", "in_place")
    for when in (*MOMENTS, *["between_two_reductions"] * (size != "small"))
]
USUAL = [("between_two_reductions", "large")]


@pytest.mark.parametrize(
    ("when", "size"),
    [
        case if case in USUAL else pytest.param(*case, marks=pytest.mark.deep)
        for case in LOST
    ],
)
def test_a_lost_worker_s_window_is_taken_over(
    when: str, size: str, tmp_path: Path
) -> None:
    """Two of three are left: each window is the large batch of what arrived."""
    assert run_workers(f"{PACKAGE}.lost", when, size, folder=tmp_path, workers=3) == [
        0,
        0,
        -signal.SIGKILL,
    ]
    assert [(tmp_path / f"{rank}.txt").exists() for rank in range(2)] == [True, True]
