"""The wheel holds every package with its types, declared gaps, licence and entry
points, and nothing else.
"""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path

import pytest

import gradaccum
from conformance_tests.programs import ROOT, run_python

pytest.importorskip("hatchling", reason="hatchling builds the wheel")

PACKAGES = {
    "gradaccum": ROOT / "gradaccum",
    "gradaccum_torch": ROOT / "backends/gradaccum_torch",
    "gradaccum_jax": ROOT / "backends/gradaccum_jax",
    "gradaccum_mindspore": ROOT / "backends/gradaccum_mindspore",
    "gradaccum_conformance": ROOT / "conformance_tests/gradaccum_conformance",
    "gradaccum_harnesses": ROOT / "conformance_tests/gradaccum_harnesses",
}


def test_wheel(tmp_path: Path) -> None:
    options = ("-t", "wheel", "-d", str(tmp_path))
    run_python("-m", "hatchling", "build", *options, cwd=ROOT, check=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = set(wheel.namelist())
    metadata = next(name for name in names if name.endswith("/METADATA"))
    info = metadata.removesuffix("/METADATA")
    expected = {
        f"{package}/{file.relative_to(folder)}"
        for package, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    gaps = ROOT / "conformance_tests/xfails"
    expected |= {f"gradaccum_conformance/xfails/{file.name}" for file in gaps.iterdir()}
    assert expected <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, info}
    assert not [name for name in names if "mutant" in name or "planted" in name]
    (licence,) = [name for name in names if name.endswith("/LICENSE")]
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert "\nLicense-Expression: Apache-2.0\n" in wheel.read(metadata).decode()
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    for group in ("gradaccum.backends", "gradaccum.types", "console_scripts"):
        assert f"[{group}]" in entry_points


def test_citation_names_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {gradaccum.__version__}\n" in citation
    assert "\nlicense: Apache-2.0\n" in citation


def test_front_page_of_the_package_leads_to_the_repository() -> None:
    """Once there is one: pictures as they are, other files as pages."""
    absolute = runpy.run_path(str(ROOT / ".docs/package.py"))["absolute"]
    page = (ROOT / "README.md").read_text("utf-8")
    assert absolute(page, "") == page
    linked = absolute(page, "https://h/p")
    assert "(https://h/p/raw/HEAD/benchmarks/figures/scoreboard.svg)" in linked
    assert "(https://h/p/blob/HEAD/gradaccum/CONCEPTS.md)" in linked
