"""Chooses the backends that a command runs: the requested ones, or every installed one.
It imports none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from gradaccum import BackendNotFoundError, available_backends, registered_backends


class Selection(NamedTuple):
    """Names of backends."""

    chosen: tuple[str, ...]
    """The backends to run."""
    missing: tuple[str, ...]
    """The backends left out, because they are not installed."""
    asked: bool
    """Whether the user named the backends. Then a missing one is a failure."""

    @property
    def failed(self) -> bool:
        """Whether a requested backend is missing, or none is left to run."""
        return not self.chosen or (self.asked and bool(self.missing))


def select_backends(
    asked: Sequence[str], *, leave_out: Collection[str] = ()
) -> Selection:
    """The requested backends, in that order. If none is requested: every known one
    except `leave_out`.

    Raises:
        BackendNotFoundError: a name that no backend has.
    """
    known = registered_backends()
    available = available_backends()
    if unknown := [name for name in asked if name not in known]:
        raise BackendNotFoundError(
            f"--backend: expected one of {', '.join(known)}; got {', '.join(unknown)}."
            " Check the spelling."
        )
    names = tuple(dict.fromkeys(asked)) or tuple(
        name for name in known if name not in leave_out
    )
    chosen = tuple(name for name in names if name in available)
    return Selection(
        chosen, tuple(name for name in names if name not in available), bool(asked)
    )


def install_command(backend: str) -> str:
    """The command that installs the framework of `backend`."""
    return f"pip install 'gradaccum[{backend}]'"
