"""``python -m benchmarks.gpu [--device cpu --small]``: the checks of a GPU user, in nine
minutes at most, and ``--page`` for the page that shows them.

Run it from the checkout's root. Results are appended to a file, a line per check, as
soon as they are there; at the end they are one table.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from benchmarks.gpu.page import PAGE, RESULTS, page_of
from benchmarks.gpu.records import Setting, append, read
from benchmarks.gpu.stages import STAGES, TOTAL_SECONDS, run_all, run_here
from benchmarks.gpu.table import print_table
from benchmarks.machine import machine

HAS_TORCH = "torch is needed: pip install torch"
SECONDS = {"cuda": TOTAL_SECONDS, "cpu": 4 * TOTAL_SECONDS}
"""A busy CPU takes its time, and nobody waits for it on a card that costs money."""
NO_DEVICE = (
    "torch finds no CUDA device here. `--device cpu --small` runs the same code on a"
    " CPU, where the checks that only a GPU has are left out."
)


def main() -> int:
    """Run what the command line asks for, and return the exit status: 1 if a check
    failed, 2 if there is nothing to run on.
    """
    arguments = _arguments()
    if arguments.page is not None:
        return write_page(arguments.page)
    seconds = arguments.seconds or SECONDS[arguments.device]
    setting = Setting(arguments.device, arguments.small, time.monotonic() + seconds)
    if arguments.stage:
        run_here(arguments.stage, setting, arguments.results)
        return 0
    if arguments.device == "cuda" and not has_cuda():
        print(NO_DEVICE)
        return 2
    chosen = arguments.only or [stage.name for stage in STAGES]
    stages = [stage for stage in STAGES if stage.name in chosen]
    size = "small" if arguments.small else "full"
    about = {"device": arguments.device, "size": size, **machine()}
    arguments.results = arguments.results.resolve()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    append(arguments.results, {"machine": about})
    begin = time.monotonic()
    run_all(stages, setting, arguments.results, seconds)
    run = read(arguments.results)
    print_table(run)
    print(f"{time.monotonic() - begin:.0f} s; results: {arguments.results}")
    return int(bool(run.failures()))


def has_cuda() -> bool:
    """True if torch is installed and sees a CUDA device."""
    try:
        import torch
    except ImportError:
        print(HAS_TORCH)
        return False
    return torch.cuda.is_available()


def write_page(results: Path) -> int:
    """Write ``benchmarks/GPU.md`` from a file of results, and keep a copy of the file
    beside the generator; without the file, say that nothing was run.
    """
    if results.exists():
        run = read(results)
        if results.resolve() != RESULTS.resolve():
            shutil.copyfile(results, RESULTS)
    elif results.resolve() == RESULTS.resolve():
        run = None
    else:
        print(f"--page: expected a file of results; there is no {results}.")
        return 2
    PAGE.write_text(page_of(run), encoding="utf-8")
    print(f"Written: {PAGE}")
    return 0


def _arguments() -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, few rounds")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmark-results/gpu.jsonl"),
        help="the file that lines are appended to",
    )
    parser.add_argument("--only", nargs="+", choices=names, help="these stages alone")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"limit of the whole run: {TOTAL_SECONDS:.0f} if it is left out, on a CPU"
        f" {SECONDS['cpu']:.0f}; the stages share it in proportion",
    )
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument(
        "--page",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FILE",
        help="write benchmarks/GPU.md from this file of results, and run nothing",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
