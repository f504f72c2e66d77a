"""One row of the scoreboard, measured in the environment of its package: ``python -m
benchmarks.scoreboard.measuring MODULE FUNCTION``.

A row is a function ``row(micro, even)`` that trains a tiny model for one update with a
package's own loop and SGD of a known rate, and returns the gradient of each parameter,
read from how far it moved. With `micro` the package accumulates micro-batches;
otherwise it takes all items as one batch. The items are unequal: ragged, or the last
micro-batch is short, or the last window is. With `even` they are equal, or another
thing that is known to add up takes the place of the loss; these must agree, or the row
tells nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import gradaccum

Gradients = Mapping[str, NDArray[np.float64]]
SMALL = 1e-3
"""A parameter whose gradient is less than this share of the whole is measured by the
share.
"""


class Row(Protocol):
    def __call__(self, *, micro: bool, even: bool) -> Gradients: ...


def compared(row: Row, *, even: bool) -> dict[str, Any]:
    """How far the accumulated gradient is from the large batch's, and how long it is
    along it.
    """
    large, small = row(micro=False, even=even), row(micro=True, even=even)
    assert large.keys() == small.keys(), "two models"
    whole = norm(large.values())
    assert np.isfinite(whole), "not finite"
    assert whole > 0, "the large batch did not move the parameters"
    off = {
        name: norm([small[name] - large[name]])
        / max(norm([large[name]]), SMALL * whole)
        for name in large
    }
    along = sum(float((small[name] * large[name]).sum()) for name in large) / whole**2
    worst = max(off, key=lambda name: off[name])
    distance = norm(small[name] - large[name] for name in large) / whole
    return {
        "distance": distance,
        "length": along,
        "worst": worst,
        "worst_distance": off[worst],
    }


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum(float(np.square(array).sum()) for array in arrays)))


def told(verify: Callable[[], gradaccum.VerificationReport] | None) -> str:
    """What `gradaccum.verify` says of the loss by itself; "" where the row has none
    that it could look at.
    """
    return (
        ""
        if verify is None
        else ", ".join(dict.fromkeys(cause.kind for cause in verify().causes))
        or "right"
    )


def loop_check_of(check: Callable[[], gradaccum.LoopReport] | None) -> str:
    """What the loop check says of the package's loop on the row's unequal items, and
    the coefficients of its last update beside the right ones; "" where the row has no
    check.
    """
    if check is None:
        return ""
    report = check()
    if report.uncertain:
        return "cannot tell"
    kinds = dict.fromkeys(problem.kind for problem in report.problems)
    words = ", ".join(kinds) or "right"
    if report.updates:
        words += f": {row_of(report.updates[-1].coefficients)}"
        if report.problems:
            words += f" for {row_of(report.expected[-1])}"
    return words


def row_of(coefficients: Sequence[float]) -> str:
    """The coefficients that are not 0, as ``.29 .14``."""
    return " ".join(
        f"{value:.2g}".replace("0.", ".", 1)
        for value in coefficients
        if abs(value) > 1e-4
    )


def main(module: str, function: str, result: str, *packages: str) -> None:
    if find_spec("torchvision") is not None:
        # a CPU build of torch has none of its operators
        import_module("conformance_tests.integration_tests.torchvision_ops")
    rows = import_module(f"benchmarks.scoreboard.{module}")
    row = getattr(rows, function)
    found = {"unequal": compared(row, even=False), "equal": compared(row, even=True)}
    loss = told(getattr(rows, "VERIFIED", {}).get(function))
    loop = loop_check_of(getattr(rows, "CHECKED", {}).get(function))
    versions = {name: metadata.version(name) for name in packages}
    Path(result).write_text(
        json.dumps({**found, "verify": loss, "loop_check": loop, "versions": versions}),
        encoding="utf-8",
    )


if __name__ == "__main__":
    os.environ.update(
        HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false"
    )
    main(*sys.argv[1:])
