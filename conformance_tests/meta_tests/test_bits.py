"""A change far inside of every tolerance changes the bits that are held, and bits that
nobody holds are not made up.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradaccum_conformance import bits
from gradaccum_conformance.harness import Setup
from gradaccum_conformance.reference.harness import NumpyHarness, NumpySession, harness
from gradaccum_conformance.suite import test_bits as suite

RUN = next(iter(bits.RUNS))


class Altered(NumpyHarness):
    """Each gradient of its sessions is altered before it is added."""

    def __init__(self, factors: Any) -> None:
        self.factors = factors

    def start(self, setup: Setup) -> NumpySession:
        session = super().start(setup)
        step = session.accumulation.step

        def altered(gradient: Any, *arguments: Any) -> None:
            factor = np.float32(next(self.factors))
            step({name: g * factor for name, g in gradient.items()}, *arguments)

        session.accumulation.step = altered  # type: ignore[method-assign]
        return session


def check(backend: NumpyHarness) -> None:
    suite.test_bits(backend, RUN, {})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of one's own in the place of the one that is held."""
    file = tmp_path / "bits.txt"
    bits.write({}, file)
    monkeypatch.setattr(suite, "read", lambda: bits.read(file))
    return file


def test_one_unit_in_the_last_place_is_seen(file: Path) -> None:
    """In one micro-batch of the second window, and in each window after it."""
    held = bits.bits_of(harness, RUN)
    bits.write({(bits.environment(harness), RUN): held}, file)
    check(harness)
    factors = [1.0] * 5 + [1 + 2.0**-23] + [1.0] * 20
    altered = bits.bits_of(Altered(iter(factors)), RUN)
    assert [one == other for one, other in zip(held, altered, strict=True)] == [
        True,
        False,
        False,
        False,
        False,
    ]
    with pytest.raises(AssertionError, match="other bits than before"):
        check(Altered(iter(factors)))


def test_unknown_environment_compares_a_run_with_itself(file: Path) -> None:
    check(harness)
    with pytest.raises(AssertionError, match="other bits"):
        check(Altered(1 + 2.0**-23 * (index > 20) for index in itertools.count()))


def test_written_bits_are_read_again(tmp_path: Path) -> None:
    held = {
        ("numpy: numpy 1; probe 0", "a"): ["0f", "1e"],
        ("jax: jax 2; probe 1", "a"): ["22"],
    }
    bits.write(held, tmp_path / "bits.txt")
    assert bits.read(tmp_path / "bits.txt") == held
    assert {run for _, run in bits.read()} == set(bits.RUNS), (
        "of each run, and of none that is gone"
    )


@pytest.mark.parametrize("write", [False, True])
def test_command_tells_what_changed(
    file: Path,
    write: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = bits.environment(harness)
    bits.write({(place, RUN): ["another"]}, file)
    monkeypatch.setattr(bits, "read", lambda given=file, read=bits.read: read(given))
    monkeypatch.setattr(
        bits, "write", lambda held, given=file, write=bits.write: write(held, given)
    )
    monkeypatch.setattr(
        "sys.argv", ["bits", "--backend", "numpy", *["--write"] * write]
    )
    assert bits.main() == (0 if write else 1)
    said = capsys.readouterr().out
    assert (f"CHANGED: {place} | {RUN}" in said, said.count("not held")) == (
        True,
        len(bits.RUNS) - 1,
    )
    assert (bits.read()[place, RUN] == ["another"]) is not write
