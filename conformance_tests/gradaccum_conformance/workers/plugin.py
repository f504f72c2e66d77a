"""Tests over several workers: a test that asks for ``crews`` runs in each of a
backend's `worker_modes`, with two workers; deep, with four.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from gradaccum_conformance.harness import WorkersHarness
from gradaccum_conformance.workers.pools import Crews, Pools

WORKERS = 2
DEEP_WORKERS = 4


def cases_of(harnesses: Sequence[WorkersHarness]) -> list[Any]:
    """A case for each backend and mode, and one with more workers."""
    cases = [
        _case(harness, mode, WORKERS)
        for harness in harnesses
        for mode in harness.worker_modes
    ]
    return cases + [
        _case(harness, harness.worker_modes[0], DEEP_WORKERS, pytest.mark.deep)
        for harness in harnesses
    ]


def _case(harness: WorkersHarness, mode: str, workers: int, *marks: Any) -> Any:
    # Apart from the backend's other tests: these run in processes of their own, and the
    # longest group decides how long all take.
    left_out = mode in (*harness.deep_modes, *harness.brief_modes)
    marks = (
        pytest.mark.xdist_group(f"{harness.name}_workers"),
        *marks,
        *([pytest.mark.deep] if left_out else []),
    )
    return pytest.param(
        harness, mode, workers, id=f"{harness.name}-{mode}-{workers}", marks=marks
    )


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """The workers of this run; none is left when it ends."""
    with closing(Pools()) as pools:
        yield pools


@pytest.fixture
def crews(
    pools: Pools, backend: WorkersHarness, worker_mode: str, workers: int
) -> Crews:
    """Starts crews: sessions on several workers that share their windows."""
    return Crews(pools, backend, worker_mode, workers)
