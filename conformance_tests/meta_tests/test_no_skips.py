"""With ``--no-skips`` a skipped test fails the run; without it, it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance_tests.framework_tests.preloaded import Preloaded

SKIPPED_TEST = """
import pytest

def test_one():
    pytest.skip("not here")

def test_two():
    pass
"""
SKIPPED_MODULE = """
import pytest

pytest.skip("not here", allow_module_level=True)
"""
GAP = """
import pytest

@pytest.mark.xfail(reason="declared", strict=True)
def test_one():
    assert False

def test_two():
    pass
"""
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, light: Preloaded) -> Run:
    """Runs tests beside a test that passes; gives the exit status and what pytest
    printed.
    """

    def run(code: str, *options: str) -> tuple[int, str]:
        (tmp_path / "test_some.py").write_text(code, "utf-8")
        (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
        plugins = ("-p", "gradaccum_conformance.plugin", "-p", "no:cacheprovider")
        arguments = ["--backend", "numpy", "-q", *plugins, *options]
        program = tmp_path / "program.py"
        program.write_text(f"import pytest, sys\nsys.exit(pytest.main({arguments!r}))")
        return light.run(program)

    return run


@pytest.mark.parametrize("code", [SKIPPED_TEST, SKIPPED_MODULE], ids=["test", "module"])
def test_skip_fails_the_run(run: Run, code: str) -> None:
    """Where tests are distributed over processes too."""
    distributed = ("-p", "xdist.plugin", "-n", "1")
    assert run(code, *distributed)[0] == 0
    status, output = run(code, "--no-skips", *distributed)
    assert status == 1, output
    assert "1 skipped" in output


def test_declared_gap_is_no_skip(run: Run) -> None:
    assert run(GAP, "--no-skips")[0] == 0


def test_missing_backend_fails_the_run(run: Run) -> None:
    status, output = run(GAP, "--require-backend", "no-such-backend")
    assert status != 0
    assert "required, but not installed: no-such-backend" in output
