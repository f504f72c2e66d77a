"""One of the two processes: ``python -m conformance_tests.framework_tests.torch_shards RANK FOLDER``."""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from conformance_tests.framework_tests.torch_shards import CHECKS


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder / 'store'}", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
    report = {}
    for name, run in CHECKS.items():
        try:
            run(rank)
            report[name] = "passed"
        except Exception:
            report[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(report), encoding="utf-8")
        if report[name] != "passed":
            break  # The workers may be at different calls now, and each further check would wait for the other.


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
