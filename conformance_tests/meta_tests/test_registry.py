"""Backends are found by name or by type. Each name has one owner, and only the
requested backend is imported.
"""

from __future__ import annotations

import os

import pytest

import gradaccum
from conformance_tests.programs import run_python

from .example import EXAMPLE, install, python_path


def test_unknown_name_raises() -> None:
    with pytest.raises(gradaccum.BackendNotFoundError, match="tensorflow"):
        gradaccum.load_backend("tensorflow")


def test_list_of_parameters_is_no_optimizer() -> None:
    expected = r"got an object of type list\. Create an optimizer from the parameters"
    with pytest.raises(gradaccum.ArgumentTypeError, match=expected):
        gradaccum.wrap([1.0, 2.0], steps=4)


def test_only_the_owner_is_imported(tmp_path) -> None:
    install(tmp_path)
    code = """
import sys, gradaccum, numpy, plain
from gradaccum_conformance.reference import Sgd
print(type(gradaccum.wrap(plain.Optimizer(Sgd({"w": numpy.ones(2)}, 0.1)), steps=2)).__module__)
print(sorted({"torch", "jax", "mindspore", "gradaccum_torch", "gradaccum_jax", "gradaccum_mindspore"} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path, EXAMPLE)}
    printed = run_python("-c", code, env=environment, check=True).stdout
    assert printed.split("\n")[:2] == ["plain_backend", "[]"]


# A missing framework is normal: the error shows the pip command, and everything else
# works.


FRAMEWORKS = {
    "torch": "torch",
    "jax": "optax",
    "mindspore": "mindspore",
    "numpy": "numpy",
}


LACKING = """
import sys
name, package = sys.argv[1:]
sys.modules[package] = None  # As if it were not installed.
import gradaccum
assert name not in gradaccum.available_backends()
assert name in gradaccum.registered_backends()
for call in (lambda: gradaccum.load_backend(name), lambda: gradaccum.wrap(object(), steps=4)):
    try:
        call()
    except gradaccum.GradAccumError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("name", "package"), FRAMEWORKS.items())
def test_missing_framework_is_named_with_its_install_command(
    name: str, package: str
) -> None:
    """It stays registered; loading it, and an object of no framework, say how to
    install it.
    """
    done = run_python("-c", LACKING, name, package)
    assert done.returncode == 0, done.stderr
    loaded, wrapped = done.stdout.splitlines()
    assert loaded.startswith("BackendNotFoundError")
    assert f"pip install 'gradaccum[{name}]'" in loaded
    assert wrapped.startswith("ArgumentTypeError")
    assert f"{name} (missing: pip install 'gradaccum[{name}]')" in wrapped
