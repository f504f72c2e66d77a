"""``python -m gradaccum_conformance.demo --backend NAME --results FILE``: one
framework's runs, as JSON lines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TextIO

from gradaccum_conformance.demo.data import load
from gradaccum_conformance.demo.recipes import RECIPES
from gradaccum_conformance.demo.training import EPOCHS, train
from gradaccum_conformance.loading import load_harness


def main() -> None:
    """Train, and write a record of each epoch as soon as it is over."""
    parser = argparse.ArgumentParser(prog="python -m gradaccum_conformance.demo")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--results", required=True, type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parser.parse_args()
    with arguments.results.open("a", encoding="utf-8") as file:
        _train(file, arguments.backend, arguments.epochs)


def _train(file: TextIO, backend: str, epochs: int) -> None:
    _write(file, kind="started", backend=backend, epochs=epochs * len(RECIPES))
    for measured in train(load_harness(backend), load(), epochs):
        _write(file, kind="epoch", backend=backend, **measured._asdict())
    _write(file, kind="finished", backend=backend)


def _write(file: TextIO, **record: object) -> None:
    print(json.dumps(record), file=file, flush=True)


if __name__ == "__main__":
    main()
