"""Finds backends through entry points, so that importing gradaccum imports no framework.

There are two groups of entry points. A name has one owner in each:

- ``gradaccum.backends``: the backend's name, pointing at its `Backend` object;
- ``gradaccum.types``: the top-level package that defines the optimizers it wraps (``optax`` for ``jax``), pointing at the same object.

By the second group `wrap` recognises an optimizer's framework, and tells whether it is installed, without importing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Protocol, cast, runtime_checkable

from gradaccum.errors import ArgumentTypeError, BackendNotFoundError, GradAccumError, explain
from gradaccum.options import Options

BACKENDS = "gradaccum.backends"
TYPES = "gradaccum.types"


class Backend(Protocol):
    """An adapter, as the core sees it. The keyword-only arguments of its `wrap` are its own options."""

    name: str

    def wrap(self, optimizer: Any, options: Options) -> Any:
        """Wrap `optimizer`, or raise `ArgumentTypeError` if it is not one, or is wrapped already."""
        ...


@runtime_checkable
class GatingBackend(Protocol):
    """A backend whose framework has learning-rate schedulers that step beside the optimizer."""

    def is_scheduler(self, candidate: object) -> bool:
        """Whether `candidate` is a scheduler, whatever optimizer it was built on."""
        ...

    def gate(self, scheduler: Any) -> Any:
        """Make `scheduler` move only when an update was applied, or raise `ArgumentTypeError` if its optimizer is not wrapped."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A backend that names the devices which its framework sees, for ``gradaccum doctor``."""

    def devices(self) -> Iterable[str]:
        """One text per device, the processor with ``cpu`` in its name."""
        ...


def owners(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of `group` by name.

    Raises:
        GradAccumError: two different objects are registered under one name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise GradAccumError(
                f"entry point {entry.name!r} of group {group!r} has two owners: {other.value} and {entry.value}. Uninstall one of them."
            )
    return found


def load(group: str, name: str) -> Any:
    """The object registered as `name` in `group`; nothing else is imported.

    Raises:
        BackendNotFoundError: there is none, or what it needs is not installed.
    """
    entries = owners(group)
    if name not in entries:
        raise BackendNotFoundError(f"backend: expected one of {sorted(entries)}; got {name!r}. Check the spelling, or install it.")
    try:
        return entries[name].load()
    except ModuleNotFoundError as error:
        raise BackendNotFoundError(
            f"backend {name!r} needs the package {error.name!r}, which is not installed. Run: pip install 'gradaccum[{name}]'"
        ) from error


def load_backend(name: str) -> Backend:
    """The backend called `name`: imports its adapter, and so its framework.

    Raises:
        BackendNotFoundError: no such backend, or its framework is not installed.
    """
    return cast(Backend, load(BACKENDS, name))


def registered_backends() -> tuple[str, ...]:
    """The names of all backends known here, sorted, whether or not their frameworks are installed."""
    return tuple(sorted(owners(BACKENDS)))


def available_backends() -> tuple[str, ...]:
    """The names of the backends whose framework is installed here, sorted. Imports none of them."""
    types = owners(TYPES)
    return tuple(
        sorted(
            name
            for name, entry in owners(BACKENDS).items()
            if all(find_spec(package) for package, owner in types.items() if owner.value == entry.value)
        )
    )


def backend_of(optimizer: object) -> Backend:
    """The backend whose package defines the type of `optimizer`, a base of it, or the optimizer that it holds.

    A scheduler of a library such as timm is recognised by the optimizer that it holds.

    Raises:
        ArgumentTypeError: no backend's package does.
    """
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        try:
            entry = _entry_of(type(candidate).__mro__)
        except LookupError:
            continue
        return cast(Backend, _load_entry(entry))
    raise explain(
        ArgumentTypeError,
        "optimizer",
        expected=f"an object of one of the packages {sorted(owners(TYPES))}",
        got=optimizer,
        fix=f"Backends here: {', '.join(map(_describe, registered_backends())) or 'none; reinstall gradaccum'}.",
    )


@cache
def _entry_of(bases: tuple[type, ...]) -> EntryPoint:
    """The backend whose package defines one of `bases`. Found once: reading entry points takes milliseconds. A failure is not remembered.

    Raises:
        LookupError: there is none.
    """
    types = owners(TYPES)
    for base in bases:
        package = base.__module__.partition(".")[0]
        if package in types:
            return types[package]
    raise LookupError(bases)


def _load_entry(entry: EntryPoint) -> Any:
    module, _, attribute = entry.value.partition(":")
    return getattr(import_module(module), attribute)


def _describe(name: str) -> str:
    return name if name in available_backends() else f"{name} (missing: pip install 'gradaccum[{name}]')"
