"""Workers and their sessions from test to test: frameworks take seconds to start, and
seconds to compile each new set of options.
"""

from __future__ import annotations

from typing import NamedTuple

from gradaccum_conformance.harness import Dtype, Option, Setup, WorkersHarness
from gradaccum_conformance.specs import MLP, Model, Optimizer, make_weights
from gradaccum_conformance.workers.crew import Crew
from gradaccum_conformance.workers.messages import Request
from gradaccum_conformance.workers.pool import Pool, WorkerError

TRIALS = 2
"""A free port may be taken by another program before the workers have it."""


class Pools:
    """A pool for each backend and number of workers, and in it a crew for each set of
    options.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], Pool] = {}
        self._crews: dict[tuple[Pool, str], tuple[Crew, int]] = {}
        self._failures: dict[tuple[str, int], list[WorkerError]] = {}

    def close(self) -> None:
        """End every process."""
        for pool in self._pools.values():
            pool.close()

    def pool(self, backend: str, workers: int) -> Pool:
        """The pool; a new one after a failure. Its order of events and its delays begin
        anew, so that a test does not depend on others.

        Raises:
            WorkerError: the workers did not start. They are tried twice, for one test
                each, as each time may cost minutes.
        """
        key = backend, workers
        if key not in self._pools or self._pools[key].closed:
            self._pools[key] = self._started(backend, workers)
        pool = self._pools[key]
        pool.reseed(0)
        return pool

    def _started(self, backend: str, workers: int) -> Pool:
        failures = self._failures.setdefault((backend, workers), [])
        if len(failures) == TRIALS:
            raise failures[-1]
        try:
            return Pool(backend, workers)
        except WorkerError as error:
            failures.append(error)
            raise

    def crew(self, pool: Pool, setup: Setup) -> Crew:
        """The crew with this setup, as it was when it was new."""
        options = dict(sorted((setup.options or {}).items()))
        key = pool, repr(setup._replace(weights={}, options=options))
        if key not in self._crews:
            crew = _start_crew(pool, setup)
            self._crews[key] = crew, crew.snapshot()
        crew, fresh = self._crews[key]
        crew.restore(fresh)
        return crew


def _start_crew(pool: Pool, setup: Setup) -> Crew:
    """A new session on every worker."""
    sessions = pool.ask([Request("start", (setup,))] * pool.workers)
    assert len(set(sessions)) == 1, f"the workers are at different calls: {sessions}"
    return Crew(pool, sessions[0])


class Crews(NamedTuple):
    """The crews of one backend in one mode, for one test. They share one model too, so
    that as little as possible is compiled.
    """

    pools: Pools
    backend: WorkersHarness
    mode: str
    workers: int

    @property
    def pool(self) -> Pool:
        """The workers."""
        return self.pools.pool(self.backend.name, self.workers)

    def __call__(
        self,
        model: Model = MLP,
        optimizer: Optimizer = Optimizer("capture"),  # noqa: B008 - it is immutable
        *,
        dtype: Dtype = "float32",
        **options: Option,
    ) -> Crew:
        """The crew with these options of `gradaccum.wrap`, as new; without ``steps``,
        the caller closes each window.
        """
        return self.pools.crew(
            self.pool,
            Setup(
                model,
                make_weights(model),
                optimizer,
                dtype,
                self.mode,
                {"steps": None, **options},
            ),
        )
