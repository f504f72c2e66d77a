"""Two processes under msrun: windows over both of them, and a loss whose classes they
share.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance_tests.framework_tests import mindspore_workers
from conformance_tests.framework_tests.mindspore_msrun import run_workers
from conformance_tests.framework_tests.mindspore_workers.common import WORLD

pytestmark = pytest.mark.xdist_group("mindspore_workers")
FOLDER = Path(mindspore_workers.__file__).parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process says of each check; one run for all tests."""
    folder = tmp_path_factory.mktemp("workers")
    run_workers(FOLDER / "__main__.py", folder, str(folder), seconds=400)
    return [read(folder / f"{rank}.json") for rank in range(WORLD)]


def read(report: Path) -> dict[str, str]:
    return json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}


@pytest.mark.parametrize("name", mindspore_workers.CHECKS)
def test_two_workers(name: str, reports: list[dict[str, str]]) -> None:
    for rank, report in enumerate(reports):
        assert (
            report.get(name, "not run: a check before it failed, or took too long")
            == "passed"
        ), f"rank {rank}:\n{report.get(name)}"


def said(folder: Path) -> str:
    return "\n".join(log.read_text() for log in sorted(folder.glob("worker_*.log")))[
        -3000:
    ]


@pytest.mark.deep
def test_four_workers_send_what_the_law_says(tmp_path: Path) -> None:
    assert run_workers(FOLDER / "law.py", tmp_path, seconds=200, workers=4) == 0, said(
        tmp_path
    )
