"""The command's arguments and exit code. `argparse`, since the package that the other commands use may not be installed."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from gradaccum.doctor.diagnosis import LIMIT, diagnose
from gradaccum.registry import BACKENDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. On SIGTERM it first ends the processes that it started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = _parser().parse_args(arguments)
    diagnosis = diagnose(options.backend, options.limit)
    print(diagnosis.to_json() if options.json else diagnosis)
    return 0 if diagnosis.healthy else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradaccum doctor", description="Is this environment one in which gradaccum works?")
    parser.add_argument("--backend", action="append", type=_known, help="Import this backend only; repeat it for several. Default: all.")
    parser.add_argument("--limit", type=_seconds, default=LIMIT, help="Seconds for the import of one backend (default: %(default)g).")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def _known(name: str) -> str:
    known = sorted({entry.name for entry in entry_points(group=BACKENDS)})
    if name not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known) or 'none: no backend is registered'}; got {name!r}")
    return name


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0; got {text!r}")
    return seconds
