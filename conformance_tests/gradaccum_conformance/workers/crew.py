"""One session on each worker of a pool, over one model: their windows are shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from gradaccum.watching import ClosedWindow
from gradaccum_conformance.harness import GradientTree, Loss
from gradaccum_conformance.specs import Batch
from gradaccum_conformance.workers.messages import Raised, Request
from gradaccum_conformance.workers.pool import Pool


class Crew:
    """The workers' sessions. Lists are by rank; each method is one event on all
    workers.

    Args:
        pool: the workers.
        session: the number that the session has on each of them.
    """

    def __init__(self, pool: Pool, session: int) -> None:
        self.pool = pool
        self._session = session
        self.workers = pool.workers

    def gradients(
        self,
        trees: Sequence[GradientTree | None],
        weights: Sequence[float | None] | None = None,
    ) -> None:
        """One micro-batch with this gradient on each worker; None: it has none."""
        self._micro_batches("gradients", trees, weights)

    def refusals(
        self, trees: Sequence[GradientTree], weights: Sequence[Any]
    ) -> list[str]:
        """As `gradients`, for micro-batches that every worker may refuse: the errors by
        rank, as ``"class: text"``, or none at all.
        """
        answers = self.pool.exchange(
            [
                self._request("gradients", tree, weight=weight)
                for tree, weight in zip(trees, weights, strict=True)
            ]
        )
        errors = [
            f"{answer.kind}: {answer.message}"
            for answer in answers
            if isinstance(answer, Raised)
        ]
        if errors and len(errors) < self.workers:
            self.pool.close()  # The others may wait for those that raised.
            raise AssertionError(
                f"refused by {len(errors)} of {self.workers} workers: {answers}"
            )
        return errors

    def micro_batch(
        self,
        batches: Sequence[Batch | None],
        weights: Sequence[float | None] | None = None,
        loss: Loss = "mean",
    ) -> None:
        """Forward and backward of one micro-batch on each worker; None: it has none."""
        self._micro_batches("micro_batch", batches, weights, loss=loss)

    def flush(self) -> None:
        """Close the open window."""
        self.ask("flush")

    def discard(self) -> None:
        """Forget the open window."""
        self.ask("discard")

    def ask(self, method: str) -> list[Any]:
        """What this method of each worker's `Session` returns."""
        return self._each(method, [()] * self.workers)

    def heard(self) -> list[list[ClosedWindow]]:
        """The windows that each worker has heard of since the last call; see
        `listen`.
        """
        return cast(
            list[list[ClosedWindow]], self.pool.ask([Request("heard")] * self.workers)
        )

    def listen(self) -> bool:
        """Have each worker's optimizer tell of each window that closes; False if it has
        no listeners.
        """
        return bool(
            self.pool.ask([Request("hear", (self._session,))] * self.workers)[0]
        )

    def snapshot(self) -> int:
        """The number of a copy of each worker's session; the copies stay there."""
        return int(
            self.pool.ask([Request("snapshot", (self._session,))] * self.workers)[0]
        )

    def restore(self, snapshot: int) -> None:
        """Go back to a copy of this crew or of one built alike."""
        self.pool.ask([Request("restore", (self._session, snapshot))] * self.workers)

    def save(self, directory: Path) -> None:
        """Each worker saves into its own folder: ``directory / str(rank)``."""
        folders = self._folders(directory)
        for folder in folders:
            folder.mkdir(parents=True)
        self._each("save", [(folder,) for folder in folders])

    def load(self, directory: Path) -> None:
        """Each worker loads what it saved there."""
        self._each("load", [(folder,) for folder in self._folders(directory)])

    def _folders(self, directory: Path) -> list[Path]:
        return [directory / str(rank) for rank in range(self.workers)]

    def _micro_batches(
        self,
        method: str,
        inputs: Sequence[Any],
        weights: Sequence[float | None] | None,
        **options: Any,
    ) -> None:
        assert len(inputs) == self.workers, (
            f"{len(inputs)} micro-batches for {self.workers} workers"
        )
        weights = [None] * self.workers if weights is None else weights
        self.pool.ask(
            [
                self._request("idle")
                if given is None
                else self._request(method, given, weight=weight, **options)
                for given, weight in zip(inputs, weights, strict=True)
            ]
        )

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.pool.ask([self._request(method, *own) for own in arguments])

    def _request(self, method: str, *arguments: Any, **options: Any) -> Request:
        return Request("call", (self._session, method, *arguments), options)
