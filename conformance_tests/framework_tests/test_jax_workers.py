"""Windows over four devices, in a process of their own, against one device that has
all micro-batches; and the refusals.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance_tests.framework_tests.jax_versions import needs_shard_map
from conformance_tests.framework_tests.jax_workers import NAMES

SECONDS = 900
"""A deadlock would last for ever."""
ROOT = Path(__file__).parents[2]
CHECKS = [name for names in NAMES.values() for name in names.split()]
NEWEST_ALONE = (
    "scan",
    "benchmark",
    "checked_state",
    "explicit_axes",
    "varying",
    "layered_shards",
    "refused_types",
    *NAMES["shards"].split(),
    *NAMES["large_batch"].split(),
)
"""The checks that the oldest JAX leaves out: see this folder's conftest."""

pytestmark = [pytest.mark.xdist_group("jax_workers"), needs_shard_map]


@pytest.fixture(scope="module")
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What the process said of each check that was chosen."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and item.originalname == "test_four_devices"
    ]
    return run_checks(4, chosen, tmp_path_factory.mktemp("workers"))


def run_checks(devices: int, chosen: list[str], folder: Path) -> dict[str, str]:
    file = folder / "report.json"
    program = "conformance_tests.framework_tests.jax_workers"
    command = [sys.executable, "-m", program, str(file), str(devices), *chosen]
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        said = f"the process ended with code {ran.returncode}: {ran.stderr[-3000:]}"
    except subprocess.TimeoutExpired as late:
        said = f"the process hung: {str(late.stderr)[-3000:]}"
    made: dict[str, str] = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    )
    return {name: made.get(name, said) for name in chosen}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in NEWEST_ALONE
        else pytest.param(name, marks=pytest.mark.every_mode)
        for name in CHECKS
    ],
)
def test_four_devices(report: dict[str, str], name: str) -> None:
    assert report[name] == "passed", report[name]


def test_sixty_four_devices(tmp_path: Path) -> None:
    """What each sends is what each of four sends, and the window is that of one device
    with all micro-batches.
    """
    report = run_checks(64, ["one_reduction_per_window", "scan"], tmp_path)
    assert set(report.values()) == {"passed"}, report
