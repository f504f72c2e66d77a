"""The examples in the docstrings of the core and of the adapters run, and say what comes
out.
"""

from __future__ import annotations

import doctest
import importlib

import pytest

from conformance_tests.programs import ROOT

WITH_EXAMPLES = sorted(
    path.relative_to(parent)
    .with_suffix("")
    .as_posix()
    .replace("/", ".")
    .removesuffix(".__init__")
    for parent in (ROOT, ROOT / "backends")
    for path in parent.glob("gradaccum*/**/*.py")
    if ">>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples(module: str) -> None:
    framework = module.partition(".")[0].removeprefix("gradaccum_")
    pytest.importorskip(framework)
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_packages_have_examples() -> None:
    assert {module.partition(".")[0] for module in WITH_EXAMPLES} == {
        "gradaccum",
        "gradaccum_torch",
        "gradaccum_jax",
        "gradaccum_mindspore",
    }
