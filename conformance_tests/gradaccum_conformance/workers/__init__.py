"""Several workers for the suite: one process each, driven in lockstep from the test.

A `Pool` starts the processes and has each `join` the others through the backend's
harness. A `Crew` is one session on each of them, whose windows are shared. `Pools`
keeps both from test to test, because frameworks take seconds to start and to compile.
"""

from gradaccum_conformance.workers.crew import Crew
from gradaccum_conformance.workers.messages import Raised
from gradaccum_conformance.workers.pool import Pool, WorkerError
from gradaccum_conformance.workers.pools import Crews, Pools

__all__ = ["Crew", "Crews", "Pool", "Pools", "Raised", "WorkerError"]
