"""Checks on devices that the CPU stands for: ``python -m
conformance_tests.framework_tests.jax_workers FILE DEVICES NAME...``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[2]}"
os.environ["JAX_PLATFORMS"] = "cpu"


def main(file: Path, names: list[str]) -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    from conformance_tests.framework_tests.jax_workers import check_of

    report = {}
    for name in names:
        begin = time.perf_counter()
        try:
            check_of(name)()
            report[name] = "passed"
        except Exception:
            report[name] = traceback.format_exc()
        print(f"{time.perf_counter() - begin:5.1f} s  {name}", file=sys.stderr)
    file.write_text(json.dumps(report), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3:])
