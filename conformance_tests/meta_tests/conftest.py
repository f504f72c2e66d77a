"""Processes that have imported what most programs of these tests need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from conformance_tests.framework_tests.preloaded import Preloaded


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    """Processes that start fast: no plugins of other packages, and compiled test
    modules kept from process to process.

    Where Python may not write bytecode, each process would otherwise compile the whole
    suite again.
    """
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        environment |= {
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode")),
        }
    with Preloaded("pytest", "gradaccum_conformance", **environment) as imported:
        yield imported
