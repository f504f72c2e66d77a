"""The golden bits: a change far inside of every tolerance is seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from conformance_tests.record.__main__ import main
from gradaccum_conformance import bits
from gradaccum_conformance.harness import Setup
from gradaccum_conformance.reference.harness import NumpyHarness, NumpySession, harness
from gradaccum_conformance.suite import test_bits as suite

RUN = next(iter(bits.RUNS))
ONE_UNIT_MORE = 1 + 2.0**-23


class Altered(NumpyHarness):
    """Each gradient is multiplied by a factor before it is added."""

    def __init__(self, factors: Iterator[float]) -> None:
        self.factors = factors

    def start(self, setup: Setup) -> NumpySession:
        session = super().start(setup)
        step = session.accumulation.step

        def altered(gradient: Any, *arguments: Any) -> None:
            factor = np.float32(next(self.factors))
            step({name: g * factor for name, g in gradient.items()}, *arguments)

        session.accumulation.step = altered  # type: ignore[method-assign]
        return session


def sixth_micro_batch() -> Altered:
    return Altered(iter([*[1.0] * 5, ONE_UNIT_MORE, *[1.0] * 20]))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file in the place of the recorded one."""
    file = tmp_path / "bits.txt"
    file.touch()
    monkeypatch.setattr(suite, "read", lambda: bits.read(file))
    return file


def test_one_unit_in_the_last_place_is_seen(file: Path) -> None:
    """In one micro-batch of the second window, and in each window after it."""
    recorded = bits.bits_of(harness, RUN)
    section = bits.section(bits.environment(harness), RUN)
    file.write_text(f"{section} | {' '.join(recorded)}\n", "utf-8")
    suite.test_bits(harness, RUN, {})
    altered = bits.bits_of(sixth_micro_batch(), RUN)
    same = [a == b for a, b in zip(recorded, altered, strict=True)]
    assert same == [True, False, False, False, False]
    with pytest.raises(AssertionError, match="other bits than before"):
        suite.test_bits(sixth_micro_batch(), RUN, {})


def test_unknown_environment_compares_a_run_with_itself(file: Path) -> None:
    suite.test_bits(harness, RUN, {})
    factors = (ONE_UNIT_MORE if n > 20 else 1.0 for n in itertools.count())
    with pytest.raises(AssertionError, match="other bits"):
        suite.test_bits(Altered(factors), RUN, {})


def test_record_ignores_the_run_that_an_environment_does_not_hold(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another processor may hold the first run of an environment only."""
    monkeypatch.setattr(bits, "FILE", file)
    file.write_text("here; one | a\n", "utf-8")
    found = {"here; one": ["a"], "here; two": ["b"]}
    monkeypatch.setattr(bits, "found", lambda names: found.items())
    with pytest.raises(typer.Exit) as end:
        main(["bits"], ["numpy"])
    assert end.value.exit_code == 0
