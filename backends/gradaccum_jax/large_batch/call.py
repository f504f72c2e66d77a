"""What every call does that takes a large batch: compile itself, for the sizes of micro-batch that are asked for, and run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax

from gradaccum_jax.jitted import call_jitted
from gradaccum_jax.large_batch.auto import Fitting, fitting
from gradaccum_jax.large_batch.splitting import Source, Splitting
from gradaccum_jax.types import Tree


class Call(ABC):
    """A function of what it is given beside its batch, and of the batch."""

    splitting: Splitting

    @abstractmethod
    def _run(self, given: Any, source: Source) -> Any:
        """What the call returns of a batch that is cut."""

    def _of_batch(self, given: Any, batch: tuple[Tree, ...]) -> Any:
        """The same of a batch, cut as its splitting says, or into the largest micro-batches that fit."""
        if self._fitting:
            return self._fitting(given, batch)
        return call_jitted(self._jitted, self._run, given, self.splitting.source(batch))

    @cached_property
    def _fitting(self) -> Fitting | None:
        return fitting(self._jitted, self.splitting)

    @cached_property
    def _jitted(self) -> Callable[..., Any]:
        return jax.jit(self._run)
