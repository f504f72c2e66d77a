"""The messages between the test and a worker: plain data, pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A call of one method of `gradaccum_conformance.workers.worker.Worker`."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}
    delay: float = 0.0
    """Seconds to wait before the call, so that workers arrive in another order."""


class Answered(NamedTuple):
    """The call returned."""

    value: Any


class Raised(NamedTuple):
    """The call raised."""

    kind: str
    """The name of the exception's class."""
    message: str
    traceback: str


class Lost(NamedTuple):
    """No answer came."""

    why: str


Answer = Answered | Raised | Lost
