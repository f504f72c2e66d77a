"""``python -m gradaccum_conformance.demo --backend NAME --results FILE``: one
framework's runs, as JSON lines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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

        def write(kind: str, **record: object) -> None:
            line = {"kind": kind, "backend": arguments.backend, **record}
            print(json.dumps(line), file=file, flush=True)

        write("started", epochs=arguments.epochs * len(RECIPES))
        harness = load_harness(arguments.backend)
        for measurement in train(harness, load(), arguments.epochs):
            write("epoch", **measurement._asdict())
        write("finished")


if __name__ == "__main__":
    main()
