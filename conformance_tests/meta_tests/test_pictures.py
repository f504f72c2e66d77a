"""The pages' pictures show what was measured and what runs today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")

from benchmarks.pictures import state_machine, usual_loop
from benchmarks.pictures.__main__ import PICTURES
from benchmarks.pictures.drawing import ROOT, description_of
from conformance_tests.programs import run_python


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pictures, as the command draws them."""
    folder = tmp_path_factory.mktemp("pictures")
    command = ("-m", "benchmarks.pictures", "--out", str(folder))
    run_python(*command, cwd=ROOT, check=True)
    return folder


@pytest.mark.deep
@pytest.mark.parametrize("file", PICTURES)
def test_picture_is_of_today(file: str, drawn: Path) -> None:
    """Draw it anew by ``python -m benchmarks.pictures`` if it is not."""
    assert description_of(ROOT / file) == description_of(drawn / file)


def test_wrapped_loop_makes_the_large_batches_updates() -> None:
    """And the usual loop makes others where micro-batches are unequal or missing."""
    sizes = usual_loop.sizes()
    assert sizes.ours == pytest.approx(sizes.large, rel=1e-12)
    pairs = zip(sizes.usual, sizes.large, strict=True)
    ratios = [usual / large for usual, large in pairs]
    assert ratios[0] == pytest.approx(1, rel=1e-12), "equal micro-batches"
    assert all(abs(ratio - 1) > 0.2 for ratio in ratios[1:])
    shown = "{}, {}, {} and {} times".format(*(f"{each:.2g}" for each in ratios))
    assert shown in (ROOT / "gradaccum/CONCEPTS.md").read_text("utf-8")


def test_steps_are_those_of_the_page() -> None:
    page = (ROOT / "gradaccum/CONCEPTS.md").read_text("utf-8")
    section = page.split("## What happens at the end of a window")[1]
    words = re.findall(r"^\d\. \*\*(\w+)", section, re.MULTILINE)
    assert [name for name, _ in state_machine.STEPS] == words
