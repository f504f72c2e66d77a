"""Windows and large batches over several devices, in a process of their own, against one
device that has all micro-batches; and the refusals.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance_tests.programs import ROOT, run_python

from .jax_versions import needs_shard_map
from .jax_workers import NAMES, check_of

SECONDS = 900
"""A deadlock would last for ever."""
BATCH_SHARDS = NAMES["batch_shards"].split()
CHECKS = [
    name
    for names in NAMES.values()
    for name in names.split()
    if name not in BATCH_SHARDS
]
NEWEST_ALONE = (
    "scan",
    "checked_state",
    "explicit_axes",
    "varying",
    *NAMES["shards"].split(),
    *NAMES["large_batch"].split(),
)
"""The checks that the oldest JAX leaves out: see this folder's conftest."""

pytestmark = pytest.mark.xdist_group("jax_workers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


def run_checks(devices: int, chosen: list[str], folder: Path) -> dict[str, str]:
    """Return what one process said of each check, which it may have said before."""
    file = folder / f"{devices}.json"
    if not file.exists():
        program = "conformance_tests.framework_tests.jax_workers"
        arguments = [str(file), str(devices), *chosen]
        ran = run_python("-m", program, *arguments, cwd=ROOT, timeout=SECONDS)
        assert file.exists(), f"code {ran.returncode}: {ran.stderr[-3000:]}"
    report: dict[str, str] = json.loads(file.read_text("utf-8"))
    return report


def chosen_for(request: pytest.FixtureRequest) -> list[str]:
    """Return the checks of this session's cases of the same test."""
    return [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and item.originalname == request.node.originalname
    ]


@needs_shard_map
@pytest.mark.every_mode
@pytest.mark.parametrize("name", ["with_workers", "models_of_their_own"])
def test_one_device(name: str) -> None:
    """Of this process."""
    check_of(name)()


@needs_shard_map
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in NEWEST_ALONE
        else pytest.param(name, marks=pytest.mark.every_mode)
        for name in CHECKS
    ],
)
def test_four_devices(name: str, folder: Path, request: pytest.FixtureRequest) -> None:
    said = run_checks(4, chosen_for(request), folder)[name]
    assert said == "passed", said


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCH_SHARDS)
def test_eight_devices(name: str, folder: Path, request: pytest.FixtureRequest) -> None:
    said = run_checks(8, chosen_for(request), folder)[name]
    assert said == "passed", said


@needs_shard_map
def test_sixty_four_devices(tmp_path: Path) -> None:
    """What each sends is what each of four sends, and the window is that of one device
    with all micro-batches.
    """
    report = run_checks(64, ["one_reduction_per_window", "scan"], tmp_path)
    assert set(report.values()) == {"passed"}, report
