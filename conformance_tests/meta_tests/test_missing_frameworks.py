"""A missing framework is normal: the error shows the pip command, and everything else works."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
