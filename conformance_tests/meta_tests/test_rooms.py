"""The adapters' floor plan: one concept has one name, of a file or of a folder, in
every adapter that has the concept.
"""

from __future__ import annotations

from pathlib import Path

BACKENDS = Path(__file__).parents[2] / "backends"
TORCH, JAX, MINDSPORE = "torch", "jax", "mindspore"
ALL = {TORCH, JAX, MINDSPORE}

ROOMS = {
    "backend": ("what the core finds by name", ALL),
    "checks": ("what is refused, at the call that is wrong", ALL),
    "grad_scaler": (
        "the framework's loss scaler, driven once per window",
        {TORCH},
    ),
    "loss_scale": ("the readers of the loss scale", {MINDSPORE}),
    "optimizer": ("the wrapped optimizer", ALL),
    "extensions": ("what observes a window", ALL),
    "gradient_sum": ("the sum of a window and its arithmetic", ALL),
    "master_weights": ("the parameters' float32 master weights", ALL),
    "mindspore_private": ("the framework's private names", {MINDSPORE}),
    "recording": ("what an optimizer is handed, for the loop check", ALL),
    "saving": ("saving and loading", ALL),
    "scheduler": ("a scheduler that moves once per update", {TORCH, MINDSPORE}),
    "state": ("where the seven fields live", {JAX, MINDSPORE}),
    "update": ("the inner optimizer's call", ALL),
    "window": ("the open window: add, close, discard", ALL),
    "layered": ("a window that runs layer by layer", {TORCH, JAX}),
    "large_batch/auto": ("the largest micro-batch that fits", {TORCH, JAX}),
    "large_batch/batch": ("the large batch and its micro-batches", ALL),
    "large_batch/coupled": (
        "losses that couple the items of a batch, in two passes",
        ALL,
    ),
    "large_batch/gradients": ("the sum of gradients over one call", ALL),
    "large_batch/replay": (
        "random numbers and statistics of the first pass, in the second",
        {TORCH, MINDSPORE},
    ),
    "large_batch/value_and_grad": ("the split call", {JAX, MINDSPORE}),
    "large_batch/value_and_update": (
        "a whole window of a wrapped optimizer in one call",
        {MINDSPORE},
    ),
    "verification/check": ("verify: the public call", ALL),
    "verification/subject": ("a model and its loss, run in parts", ALL),
    "workers/group": ("the end of a window over all workers", ALL),
    "workers/layout": (
        "an open window for another number of workers",
        {JAX, MINDSPORE},
    ),
}


def rooms_of(adapter: str) -> set[str]:
    folder = BACKENDS / f"gradaccum_{adapter}"
    files = {
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    }
    return files | {
        name for name in ROOMS if any(file.startswith(f"{name}/") for file in files)
    }


def test_each_concept_has_its_file() -> None:
    for name, (concept, adapters) in ROOMS.items():
        assert {adapter for adapter in ALL if name in rooms_of(adapter)} == adapters, (
            f"{name}: {concept}"
        )


def test_no_shared_name_without_a_concept() -> None:
    """A name that two adapters have by accident would mean two things."""
    shared = {
        name for a in ALL for b in ALL - {a} for name in rooms_of(a) & rooms_of(b)
    }
    assert shared <= set(ROOMS)
