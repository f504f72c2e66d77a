"""Windows over two processes: copies of a model (`torch_workers`), and parameters that
are split over both (`torch_shards`).
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from . import torch_shards, torch_workers
from .torch_fsdp import NEEDS_FSDP2_ON_CPU
from .torch_workers.jobs import Reports, reports_of, require_passed

CASES = [("torch_workers", name) for name in torch_workers.CHECKS]
CASES += [("torch_shards", name) for name in torch_shards.CHECKS]


def marks_of(job: str, name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.xdist_group(job)]
    if job == "torch_shards" and name not in torch_shards.EARLY:
        marks.append(NEEDS_FSDP2_ON_CPU)
    return marks


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """One run of each job for all tests."""
    return cache(lambda job: reports_of(job, tmp_path_factory.mktemp(job)))


@pytest.mark.parametrize(
    ("job", "name"),
    [
        pytest.param(job, name, id=f"{job}-{name}", marks=marks_of(job, name))
        for job, name in CASES
    ],
)
def test_two_workers(job: str, name: str, reports: Reports) -> None:
    require_passed(name, reports(job))
