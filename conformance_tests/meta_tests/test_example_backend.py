"""A third party's backend, found by its entry points, passes the suite; its declared gaps are held strictly."""

from __future__ import annotations

import pytest

from .example import install, run_suite


@pytest.fixture
def site(tmp_path):
    install(tmp_path)
    return tmp_path


def test_example_passes_the_suite(site) -> None:
    done = run_suite(site)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_passing_gap_fails_the_run(site) -> None:
    gaps = site / "gaps.txt"
    gaps.write_text("test_windows::test_steps_one*  # declared, but it works\n", encoding="utf-8")
    done = run_suite(site, "--xfails-file", str(gaps), "-k", "steps_one")
    assert done.returncode == 1
    assert "XPASS(strict)" in done.stdout


def test_stale_line_fails_the_run(site) -> None:
    gaps = site / "gaps.txt"
    gaps.write_text("test_windows::test_gone  # was removed long ago\n", encoding="utf-8")
    done = run_suite(site, "--xfails-file", str(gaps))
    assert done.returncode != 0
    assert "stale line" in done.stdout + done.stderr


def test_gap_without_reason_fails_the_run(site) -> None:
    gaps = site / "gaps.txt"
    gaps.write_text("test_windows::*\n", encoding="utf-8")
    done = run_suite(site, "--xfails-file", str(gaps))
    assert done.returncode != 0
    assert "without a reason" in done.stdout + done.stderr
