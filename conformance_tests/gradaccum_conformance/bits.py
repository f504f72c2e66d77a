"""The bits of seeded runs, held in a file, so that a change inside of every tolerance
is seen too.

``python -m conformance_tests.record --part bits`` compares them with the file, and
writes the file anew with ``--write``. Other versions of a framework and other
processors round in another order, so bits are held for an environment: the versions,
the kind of machine, and a probe, the framework's own gradient of a micro-batch without
gradaccum. Where the probe has other bits, nothing can be said of ours.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradaccum import DynamicLossScale
from gradaccum.versions import installed_version
from gradaccum_conformance.demo.batches import LARGE_BATCH, MICRO_BATCH, cut
from gradaccum_conformance.harness import Harness, Option, Setup
from gradaccum_conformance.loading import load_harness
from gradaccum_conformance.scenarios import micro_loss
from gradaccum_conformance.specs import (
    Arrays,
    Batch,
    Dense,
    Flatten,
    Model,
    Optimizer,
    Tanh,
    make_weights,
)

FILE = Path(__file__).parent / "bits.txt"
MODEL = Model("digits", (1, 8, 8), (Flatten(), Dense(64, 16), Tanh(), Dense(16, 10)))
OPTIMIZER = Optimizer("momentum", learning_rate=0.2)
ITEMS = 4 * LARGE_BATCH + 2 * MICRO_BATCH
"""Four whole windows and a short one. All micro-batches have one shape, as each shape
is compiled anew.
"""
WEIGHTS = (16, 5, 11)
"""In turn."""
RUNS: dict[str, dict[str, Option]] = {
    "weighted means": {"steps": 4},
    "sums, scaled and clipped": {
        "steps": 4,
        "reduction": "sum_per_item",
        "loss_scale": DynamicLossScale(64.0),
        "clip_norm": 0.5,
    },
}
PACKAGES = {"torch": ("torch",), "jax": ("jax", "optax"), "mindspore": ("mindspore",)}
"""By backend: the packages whose versions the bits depend on."""
Held = dict[str, list[str]]
"""The hashes by environment and run, as `section` joins them."""


def micro_batches() -> list[Batch]:
    """Of the digits' training items, those that come first."""
    # scikit-learn takes a second, in each process that collects the suite.
    from gradaccum_conformance.demo.data import load

    return list(cut(load().train.rows(0, ITEMS), MICRO_BATCH))


def bits_of(harness: Harness, run: str) -> list[str]:
    """A hash of the parameters after each window."""
    options = RUNS[run]
    session = harness.start(
        Setup(MODEL, make_weights(MODEL), OPTIMIZER, options=options)
    )
    hashes = []
    for piece, weight in zip(micro_batches(), itertools.cycle(WEIGHTS), strict=False):
        session.micro_batch(
            piece, weight=weight, loss=micro_loss(str(options.get("reduction", "mean")))
        )
        if session.state().micro_step == 0:
            hashes.append(hash_of(session.parameters()))
    session.flush()
    return [*hashes, hash_of(session.parameters())]


def section(place: str, run: str) -> str:
    """An environment and a run, as they stand in the file."""
    return f"{place}; {run}"


def environment(harness: Harness) -> str:
    """What the bits depend on besides gradaccum, on one line."""
    probe = hash_of(
        harness.gradient(
            MODEL, make_weights(MODEL), micro_batches()[0], dtype="float32"
        )
    )
    return f"{versions(harness.name)}; probe {probe}"


def versions(backend: str) -> str:
    """The backend, the versions of its framework and the kind of machine, on one
    line.
    """
    packages = PACKAGES.get(backend, ("numpy",))
    installed = [f"{package} {installed_version(package)}" for package in packages]
    return f"{backend}: {', '.join(installed)}; {platform.machine()}"


def hash_of(arrays: Arrays) -> str:
    """Twelve hexadecimal digits, by name and bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(
            f"{name} {arrays[name].dtype} {arrays[name].shape}".encode()
            + arrays[name].tobytes()
        )
    return digest.hexdigest()[:12]


def read(file: Path = FILE) -> Held:
    lines = [
        line
        for line in file.read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    return {
        name: hashes.split() for name, hashes in (line.split(" | ") for line in lines)
    }


def found(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """What the bits of these backends are here and now."""
    for name in names:
        harness = load_harness(name)
        place = environment(harness)
        for run in RUNS:
            yield section(place, run), bits_of(harness, run)
