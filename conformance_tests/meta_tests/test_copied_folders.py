"""Folders that were copied into another tree work there without the metadata that an
installer writes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gradaccum
from conformance_tests.meta_tests.test_readme import EXAMPLES
from gradaccum_conformance.deep import deep_but

ROOT = Path(__file__).parents[2]
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
    folder: Path = tmp_path_factory.mktemp("others")
    for place in dict.fromkeys(sysconfig.get_paths()[key] for key in PLACES):
        for path in Path(place).iterdir():
            link = folder / path.name
            if "gradaccum" not in path.name and not link.exists():
                link.symlink_to(path)
    return folder


def copy_of(tmp_path: Path, *folders: str) -> Path:
    tree = tmp_path / "tree"
    for folder in folders:
        shutil.copytree(ROOT / folder, tree / Path(folder).name)
    return tree


def run(program: str, tree: Path, others: Path) -> subprocess.CompletedProcess[str]:
    """Run a program without any site's packages but the `others` and the `tree`. It
    comes from a file: MindSpore's compiler reads it.
    """
    file = tree.parent / "program.py"
    file.write_text(program, encoding="utf-8")
    path = os.pathsep.join(map(str, (tree, others)))
    return subprocess.run(
        [sys.executable, "-S", file.name],
        cwd=tree.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", deep_but(("torch",), ["torch", "jax", "mindspore"]))
def test_front_page_s_program_runs(name: str, tmp_path: Path, others: Path) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    tree = copy_of(tmp_path, "gradaccum", f"backends/gradaccum_{name}")
    facts = {"version": gradaccum.__version__, "tree": str(tree), "backends": (name,)}
    done = run(NOT_INSTALLED.format(**facts) + EXAMPLES[name], tree, others)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
