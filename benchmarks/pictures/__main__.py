"""``python -m benchmarks.pictures [--out FOLDER]``: draw the pages' pictures anew, in
seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pictures import (
    scoreboard,
    state_machine,
    two_workers,
    usual_loop,
    window,
)
from benchmarks.pictures.drawing import ROOT, write

PICTURES = {
    module.FILE: module.picture
    for module in (scoreboard, state_machine, two_workers, usual_loop, window)
}
"""By file, the function that makes the picture and its description."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures")
    parser.add_argument(
        "--out", type=Path, default=ROOT, help="Folder in place of the repository."
    )
    out = parser.parse_args().out
    for file, picture in PICTURES.items():
        figure, description = picture()
        write(figure, out / file, description)
        print(f"{file}: {description}")


if __name__ == "__main__":
    main()
