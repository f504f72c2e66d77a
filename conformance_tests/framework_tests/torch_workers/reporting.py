"""The report of one process: of each check that it passed, or how it failed."""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from conformance_tests.framework_tests.torch_workers.checks import Check
from conformance_tests.framework_tests.torch_workers.common import WORLD


def run_checks(checks: Mapping[str, Check], rank: int, folder: Path) -> None:
    """Run all of them as worker `rank`; the report goes to ``folder / f"{rank}.json"``."""
    torch.set_num_threads(1)
    store, timeout = f"file://{folder / 'store'}", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timeout)
    report = {}
    for name, run in checks.items():
        try:
            run(rank)
            report[name] = "passed"
        except Exception:
            report[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(report), encoding="utf-8")
        if report[name] != "passed":
            break  # The workers may be at different calls now, and each further check would wait for the other.
