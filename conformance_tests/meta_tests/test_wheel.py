"""The wheel holds every package whole, with types, declared gaps and entry points, and
nothing else.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "gradaccum": ROOT / "gradaccum",
    "gradaccum_torch": ROOT / "backends/gradaccum_torch",
    "gradaccum_jax": ROOT / "backends/gradaccum_jax",
    "gradaccum_mindspore": ROOT / "backends/gradaccum_mindspore",
    "gradaccum_conformance": ROOT / "conformance_tests/gradaccum_conformance",
    "gradaccum_harnesses": ROOT / "conformance_tests/gradaccum_harnesses",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip(
        "hatchling", reason="hatchling builds the wheel and is not installed"
    )
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_wheel_holds_every_package_file(wheel) -> None:
    names = set(wheel.namelist())
    for package, folder in PACKAGES.items():
        files = {
            f"{package}/{file.relative_to(folder)}"
            for file in folder.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }
        assert files <= names, f"missing from the wheel: {sorted(files - names)}"
        assert f"{package}/py.typed" in names


def test_wheel_holds_nothing_else(wheel) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not [
        name for name in wheel.namelist() if "mutant" in name or "planted" in name
    ]


def test_front_page_of_the_package_leads_to_the_repository() -> None:
    """Once there is one: pictures as they are, other files as pages."""
    pytest.importorskip(
        "hatchling", reason="hatchling builds the wheel and is not installed"
    )
    spec = importlib.util.spec_from_file_location("package", ROOT / ".docs/package.py")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert package.absolute(page, "") == page
    links = re.findall(
        r"(!?)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)#]+)",
        re.sub(
            r"^```.*?^```", "", package.absolute(page, "https://h/p"), flags=re.M | re.S
        ),
    )
    assert ("!", "https://h/p/raw/HEAD/benchmarks/figures/scoreboard.svg") in links
    assert ("", "https://h/p/blob/HEAD/gradaccum/CONCEPTS.md") in links
    assert not [target for _, target in links if not target.startswith("https://")]
    assert package.addresses("https://h/p")["Issues"] == "https://h/p/issues"
    assert package.addresses("") == {}


def test_wheel_holds_the_declared_gaps(wheel) -> None:
    gaps = {
        f"gradaccum_conformance/xfails/{file.name}"
        for file in (ROOT / "conformance_tests/xfails").glob("*.txt")
    }
    assert gaps
    assert gaps <= set(wheel.namelist())


def test_adapters_have_no_tests(wheel) -> None:
    """What drives an adapter in the suite stands in the suite."""
    tests = {"harness", "harnesses", "suite", "tests"}
    assert not [
        name
        for name in wheel.namelist()
        if not name.startswith(("gradaccum_conformance/", "gradaccum_harnesses/"))
        and tests & set(name.split("/"))
    ]


def test_wheel_has_the_licence(wheel) -> None:
    """Its text, and its name in the metadata."""
    (licence,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    metadata = wheel.read(f"{licence.partition('/')[0]}/METADATA").decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_wheel_has_the_entry_points(wheel) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    for group in ("gradaccum.backends", "gradaccum.types", "console_scripts"):
        assert f"[{group}]" in text
