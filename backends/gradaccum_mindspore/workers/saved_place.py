"""Whose window a checkpoint holds: which worker saved it, out of how many."""

from __future__ import annotations

from typing import NamedTuple

from gradaccum import CheckpointError
from gradaccum.kit import explain
from gradaccum_mindspore.state import OWN, SHARED, TORN
from gradaccum_mindspore.types import Saved


class SavedPlace(NamedTuple):
    """`gradaccum_mindspore.state.Storage.shared` as it was saved."""

    held: int
    rank: int
    workers: int


def saved_place(state: Saved, prefix: str) -> SavedPlace:
    """The place of the worker that saved `state`; the only one, if its optimizer had no others.

    Raises:
        CheckpointError: its sum is that of no worker and not of all, because a reduction failed before it was saved.
    """
    entry = state.get(f"{prefix}.{SHARED}")
    place = SavedPlace(OWN, 0, 1) if entry is None else SavedPlace(*entry.asnumpy().tolist())
    if place.held == TORN:
        found, fix = "one whose reduction over the workers failed", "Load an earlier checkpoint, on every worker."
        raise explain(CheckpointError, f"{prefix}.{SHARED}", expected="a whole sum", found=found, fix=fix)
    return place


def require_place(saved: SavedPlace, own: tuple[int, int], prefix: str) -> None:
    """The open window that `saved` belongs to may go on here.

    Raises:
        CheckpointError: another worker saved it, or another number of them.
    """
    if saved[1:] != own:
        expected, found = f"the open window of rank {own[0]} of {own[1]}", f"that of rank {saved.rank} of {saved.workers}"
        fix = (
            "Let each worker load its own file; for another number of workers write gradaccum_mindspore.redistributed(states, workers), or "
            "save between two windows."
        )
        raise explain(CheckpointError, f"{prefix}.{SHARED}", expected=expected, found=found, fix=fix)
