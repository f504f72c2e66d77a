"""A third party's backend, found by its entry points, passes the suite; its declared
gaps are held strictly.
"""

from __future__ import annotations

import pytest

from conformance_tests.framework_tests.preloaded import Preloaded

from .example import install, run_suite


@pytest.fixture
def site(tmp_path):
    install(tmp_path)
    return tmp_path


@pytest.mark.deep
def test_example_passes_the_suite(site, light: Preloaded) -> None:
    status, said = run_suite(light, site)
    assert status == 0, said[-3000:]


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        (
            "test_windows::test_inner_optimizer_runs_once*  # declared, but it works",
            ("-k", "once_per_window"),
            "XPASS(strict)",
        ),
        ("test_windows::test_gone  # was removed long ago", (), "stale line"),
        ("test_windows::*", (), "without a reason"),
    ],
    ids=["passing gap", "stale line", "no reason"],
)
def test_bad_declaration_fails_the_run(
    site, light: Preloaded, line: str, options: tuple[str, ...], words: str
) -> None:
    (site / "gaps.txt").write_text(f"{line}\n", "utf-8")
    gaps = ("--xfails-file", str(site / "gaps.txt"))
    status, said = run_suite(light, site, *gaps, *options)
    assert status != 0
    assert words in said
