"""Backends are found by name or by type. Each name has one owner, and only the requested backend is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gradaccum

from .example import EXAMPLE, install, python_path


def test_unknown_name_raises() -> None:
    with pytest.raises(gradaccum.BackendNotFoundError, match="tensorflow"):
        gradaccum.load_backend("tensorflow")


def test_two_owners_of_one_name_raise(tmp_path) -> None:
    install(tmp_path)
    other = tmp_path / "rival-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n", encoding="utf-8")
    (other / "entry_points.txt").write_text("[gradaccum.backends]\nplain = rival:backend\n", encoding="utf-8")
    code = "import gradaccum\ntry:\n    gradaccum.load_backend('plain')\nexcept gradaccum.GradAccumError as error:\n    print(error)"
    output = python(code, tmp_path)
    assert "two owners" in output
    assert "rival:backend" in output


def test_only_the_owner_is_imported(tmp_path) -> None:
    install(tmp_path)
    code = """
import sys, gradaccum, numpy, plain
from gradaccum_conformance.reference import Sgd
print(type(gradaccum.wrap(plain.Optimizer(Sgd({"w": numpy.ones(2)}, 0.1)), steps=2)).__module__)
print(sorted({"torch", "jax", "mindspore", "gradaccum_torch", "gradaccum_jax", "gradaccum_mindspore"} & set(sys.modules)))
"""
    assert python(code, tmp_path).split("\n")[:2] == ["plain_backend", "[]"]


def python(code: str, site) -> str:
    environment = {**os.environ, "PYTHONPATH": python_path(site, EXAMPLE)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout


# A missing framework is normal: the error shows the pip command, and everything else works.


FRAMEWORKS = {"torch": "torch", "jax": "optax", "mindspore": "mindspore", "numpy": "numpy"}


def run(hidden: str, code: str) -> str:
    """The output of `code` in a process where importing the package `hidden` fails as if it were not installed."""
    hide = f"import sys; sys.modules[{hidden!r}] = None\n"
    done = subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "package"), FRAMEWORKS.items())
def test_missing_framework_stays_registered(name: str, package: str) -> None:
    code = "import gradaccum; print(gradaccum.available_backends(), gradaccum.registered_backends())"
    available, registered = run(package, code).split(") (")
    assert repr(name) not in available
    assert repr(name) in registered


@pytest.mark.parametrize(("name", "package"), FRAMEWORKS.items())
def test_loading_names_the_install_command(name: str, package: str) -> None:
    code = f"""
import gradaccum
try:
    gradaccum.load_backend({name!r})
except gradaccum.BackendNotFoundError as error:
    print(error)
"""
    assert f"pip install 'gradaccum[{name}]'" in run(package, code)


@pytest.mark.parametrize(("name", "package"), FRAMEWORKS.items())
def test_foreign_object_lists_the_backends(name: str, package: str) -> None:
    code = """
import gradaccum
try:
    gradaccum.wrap(object(), steps=4)
except gradaccum.ArgumentTypeError as error:
    print(error)
"""
    assert f"{name} (missing: pip install 'gradaccum[{name}]')" in run(package, code)
