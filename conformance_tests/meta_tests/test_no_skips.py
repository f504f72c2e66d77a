"""With ``--no-skips`` a skipped test fails the run; without it, it does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradaccum_conformance.deep import deep_but

SKIPS = {
    "test": "import pytest\n\ndef test_one():\n    pytest.skip('not here')\n\ndef test_two():\n    pass\n",
    "module": "import pytest\n\npytest.skip('not here', allow_module_level=True)\n",
}
GAP = "@pytest.mark.xfail(reason='declared', strict=True)\ndef test_one():\n    assert False\n"
PLAIN = f"import pytest\n\n{GAP}\ndef test_two():\n    pass\n"


def run(folder, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(code, encoding="utf-8")
    (folder / "test_other.py").write_text("def test_other():\n    pass\n", encoding="utf-8")
    plugin = ["-p", "gradaccum_conformance.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "--backend", "numpy", "-q", *plugin, *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("workers", deep_but([("-n", "1")], [(), ("-n", "1")]), ids=["alone", "distributed"])
@pytest.mark.parametrize("code", deep_but((SKIPS["test"],), SKIPS.values()), ids=SKIPS)
def test_skip_fails_the_run(tmp_path, code: str, workers: tuple[str, ...]) -> None:
    assert run(tmp_path, code, *workers).returncode == 0
    forbidden = run(tmp_path, code, "--no-skips", *workers)
    assert forbidden.returncode == 1, forbidden.stdout
    assert "1 skipped" in forbidden.stdout


def test_declared_gap_is_no_skip(tmp_path) -> None:
    assert run(tmp_path, PLAIN, "--no-skips").returncode == 0


def test_backend_without_workers_has_no_case(tmp_path) -> None:
    """Nor a skipped one."""
    code = "def test_one(crews):\n    pass\n"
    for kind, passed in (("type('Other', (), {})", 1), ("plugin.WorkersHarness", 2)):
        conftest = f"from gradaccum_conformance.workers import plugin\n\nplugin.WorkersHarness = {kind}\n"
        (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
        done = run(tmp_path, code, "--no-skips")
        assert done.returncode == 0, done.stdout
        assert f"{passed} passed" in done.stdout


def test_missing_backend_fails_the_run(tmp_path) -> None:
    done = run(tmp_path, PLAIN, "--require-backend", "no-such-backend")
    assert done.returncode != 0
    assert "required, but not installed: no-such-backend" in done.stdout + done.stderr
