"""Folders that were copied into another tree work there without the metadata that an
installer writes.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

import gradaccum
from conformance_tests.matrix import front_page
from conformance_tests.programs import ROOT, run_python

PLACES = ("purelib", "platlib")
NOT_INSTALLED = """
from importlib.metadata import PackageNotFoundError, version

import gradaccum

try:
    raise AssertionError(version("gradaccum"))
except PackageNotFoundError:
    assert gradaccum.__version__ == {version!r}
assert gradaccum.__file__.startswith({tree!r})
assert gradaccum.registered_backends() == {backends!r}
assert gradaccum.available_backends() == {backends!r}
"""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed packages without gradaccum."""
    folder = tmp_path_factory.mktemp("others")
    for place in dict.fromkeys(sysconfig.get_paths()[key] for key in PLACES):
        for path in Path(place).iterdir():
            link = folder / path.name
            if "gradaccum" not in path.name and not link.exists():
                link.symlink_to(path)
    return folder


@pytest.mark.parametrize("name", ["torch", "jax", "mindspore"])
def test_front_page_s_program_runs(name: str, tmp_path: Path, others: Path) -> None:
    """Without any site's packages but the `others` and the copy. The program comes from
    a file: MindSpore's compiler reads it.
    """
    pytest.importorskip(name)
    tree = tmp_path / "tree"
    for folder in (ROOT / "gradaccum", ROOT / f"backends/gradaccum_{name}"):
        shutil.copytree(folder, tree / folder.name)
    facts = {"version": gradaccum.__version__, "tree": str(tree), "backends": (name,)}
    program = tmp_path / "program.py"
    program.write_text(NOT_INSTALLED.format(**facts) + front_page(name), "utf-8")
    path = os.pathsep.join(map(str, (tree, others)))
    environment = {**os.environ, "PYTHONPATH": path}
    done = run_python("-S", program.name, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
