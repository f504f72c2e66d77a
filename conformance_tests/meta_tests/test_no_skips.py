"""With ``--no-skips`` a skipped test fails the run; without it, it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance_tests.framework_tests.preloaded import Preloaded
from gradaccum_conformance.deep import deep_but

SKIPS = {
    "test": (
        "import pytest\n\ndef test_one():\n    pytest.skip('not here')\n\ndef"
        " test_two():\n    pass\n"
    ),
    "module": "import pytest\n\npytest.skip('not here', allow_module_level=True)\n",
}
DISTRIBUTED = ("-p", "xdist.plugin", "-n", "1")
GAP = (
    "@pytest.mark.xfail(reason='declared', strict=True)\ndef test_one():\n    assert"
    " False\n"
)
PLAIN = f"import pytest\n\n{GAP}\ndef test_two():\n    pass\n"


@pytest.fixture
def run(tmp_path: Path, light: Preloaded) -> Callable[..., tuple[int, str]]:
    """Runs the tests in `code` beside one that passes; gives the exit status and what
    pytest said.
    """

    def run(code: str, *options: str) -> tuple[int, str]:
        (tmp_path / "test_some.py").write_text(code, encoding="utf-8")
        (tmp_path / "test_other.py").write_text(
            "def test_other():\n    pass\n", encoding="utf-8"
        )
        arguments = [
            "--backend",
            "numpy",
            "-q",
            "-p",
            "gradaccum_conformance.plugin",
            "-p",
            "no:cacheprovider",
            *options,
        ]
        (tmp_path / "program.py").write_text(
            f"import pytest, sys\n\nsys.exit(pytest.main({arguments!r}))\n",
            encoding="utf-8",
        )
        return light.run(tmp_path / "program.py")

    return run


@pytest.mark.parametrize(
    "workers", deep_but([DISTRIBUTED], [(), DISTRIBUTED]), ids=["alone", "distributed"]
)
@pytest.mark.parametrize("code", deep_but((SKIPS["test"],), SKIPS.values()), ids=SKIPS)
def test_skip_fails_the_run(run, code: str, workers: tuple[str, ...]) -> None:
    assert run(code, *workers)[0] == 0
    status, said = run(code, "--no-skips", *workers)
    assert status == 1, said
    assert "1 skipped" in said


def test_declared_gap_is_no_skip(run) -> None:
    assert run(PLAIN, "--no-skips")[0] == 0


def test_backend_without_workers_has_no_case(tmp_path, run) -> None:
    """Nor a skipped one. (The two files differ in size: Python would take them for one
    if they were written within a second.)
    """
    code = "def test_one(crews):\n    pass\n"
    for kind, passed in (("type('Another', (), {})", 1), ("plugin.WorkersHarness", 2)):
        conftest = (
            "from gradaccum_conformance.workers import plugin\n\nplugin.WorkersHarness"
            f" = {kind}\n"
        )
        (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
        status, said = run(code, "--no-skips")
        assert status == 0, said
        assert f"{passed} passed" in said


def test_missing_backend_fails_the_run(run) -> None:
    status, said = run(PLAIN, "--require-backend", "no-such-backend")
    assert status != 0
    assert "required, but not installed: no-such-backend" in said
