"""The bits of seeded runs are what they were, where they are held; everywhere, a run
gives the same ones twice.
"""

from __future__ import annotations

import pytest

from gradaccum_conformance.bits import RUNS, bits_of, environment, read, section
from gradaccum_conformance.harness import Harness


@pytest.fixture(scope="module")
def places() -> dict[str, str]:
    """The environment of each backend, found once."""
    return {}


@pytest.mark.parametrize("run", RUNS)
def test_bits(backend: Harness, run: str, places: dict[str, str]) -> None:
    """In an environment whose bits nobody has written down, a run is compared with
    itself alone.
    """
    place = places.get(backend.name) or places.setdefault(
        backend.name, environment(backend)
    )
    expected = read().get(section(place, run)) or bits_of(backend, run)
    fix = "Write meant ones: python -m conformance_tests.record --part bits --write"
    assert bits_of(backend, run) == expected, (
        f"other bits than before, inside of the tolerance, in {place}. {fix}"
    )
