"""The loops that people have: how far each ends from the large batch, in float64, and
what the user was told.

Two jobs, each of `EPOCHS` epochs of ten micro-batches of scikit-learn's digits in
windows of four, with AdamW, a cosine schedule and a clipped norm: so an epoch's last
window is open. In one job the last batch is short. In the other the micro-batches count
different numbers of labels too, as language models count tokens. Nothing is timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import gradaccum
from benchmarks.case import Distances
from benchmarks.contestants.runs import LARGE

FRAMEWORKS = {
    "torch": "benchmarks.contestants.everyday_torch",
    "JAX": "benchmarks.contestants.everyday_jax",
}
ITEMS, LAST, BATCHES = 30, 20, 10
IGNORED = -100
"""The label of an item that does not count."""

Batch = tuple[NDArray[np.float64], NDArray[np.int64]]
Arrays = list[NDArray[np.float64]]
Loop = Callable[[list[Batch], Arrays], Arrays]
"""From the micro-batches of an epoch and the first parameters, the parameters after the
last epoch.
"""


def cases(quick: bool) -> Iterator[Distances]:
    """Every loop of every framework that is installed; there is no size to make
    small.
    """
    for framework, module in FRAMEWORKS.items():
        if find_spec(framework.lower()):
            yield from distances(framework, import_module(module).loops())


def distances(framework: str, loops: Mapping[str, Loop]) -> Iterator[Distances]:
    """A row for each loop but the first, the large batch, from which the others'
    distances are measured.
    """
    truths = {
        job: loops[LARGE](batches, first_parameters())
        for job, batches in jobs().items()
    }
    for name, loop in loops.items():
        if name != LARGE:
            ends = {
                job: end_of(loop, batches, truths[job])
                for job, batches in jobs().items()
            }
            told = ", ".join(dict.fromkeys(told for _, told in ends.values()))
            yield Distances(
                framework,
                name,
                {job: distance for job, (distance, _) in ends.items()},
                told,
            )


def end_of(loop: Loop, batches: list[Batch], truth: Arrays) -> tuple[float | None, str]:
    """The largest distance of any parameter, None if the loop was refused; and what the
    user was told.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            end = loop(batches, first_parameters())
        except gradaccum.GradAccumError:
            return None, "refused"
    distance = max(float(np.abs(a - b).max()) for a, b in zip(end, truth, strict=True))
    return distance, "warned" if any(
        issubclass(each.category, UserWarning) for each in caught
    ) else "silent"


def jobs() -> dict[str, list[Batch]]:
    """The micro-batches of an epoch, by job."""
    pixels, labels = load_digits(return_X_y=True)
    cuts = [*range(0, ITEMS * BATCHES, ITEMS), ITEMS * (BATCHES - 1) + LAST]
    parts = [slice(start, stop) for start, stop in pairwise(cuts)]
    counting = [slice(None, None, 1 + index % 3) for index in range(BATCHES)]
    masked = np.full(len(labels), IGNORED)
    for part, kept in zip(parts, counting, strict=True):
        masked[part][kept] = labels[part][kept]
    return {
        "short last batch": [(pixels[part] / 16, labels[part]) for part in parts],
        "unequal token counts": [(pixels[part] / 16, masked[part]) for part in parts],
    }


def first_parameters(hidden: int = 16) -> Arrays:
    """Weights and biases by turns: (64, hidden), (hidden,), (hidden, 10), (10,)."""
    random = np.random.default_rng(0)
    return [
        random.standard_normal(shape) / 8
        for shape in ((64, hidden), (hidden,), (hidden, 10), (10,))
    ]
