"""Find the backend for `gradaccum.wrap` through entry points, without importing any
framework. The options that every backend has are defined here too.

There are two groups of entry points. Within each group, a name belongs to only one
backend:

- ``gradaccum.backends`` maps the backend's name to its `Backend` object;
- ``gradaccum.types`` maps a top-level package with optimizers, such as ``optax``, to
  the `Backend` object that wraps them.

Entry points are part of a package's metadata. This project's three backends are found
even without their metadata, for example if they were copied instead of installed, as
long as they can be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from inspect import isroutine, signature
from typing import Any, Protocol, TypedDict, cast, runtime_checkable

from gradaccum.errors import ArgumentTypeError, BackendNotFoundError
from gradaccum.options import (
    OnOverflow,
    Options,
    Reduction,
    ScalerDriver,
    UntilWeight,
    make_options,
)

BACKENDS = "gradaccum.backends"
TYPES = "gradaccum.types"
COPIED: Mapping[str, Mapping[str, str]] = {
    BACKENDS: {
        "jax": "gradaccum_jax:backend",
        "mindspore": "gradaccum_mindspore:backend",
        "torch": "gradaccum_torch:backend",
    },
    TYPES: {
        "mindspore": "gradaccum_mindspore:backend",
        "optax": "gradaccum_jax:backend",
        "torch": "gradaccum_torch:backend",
    },
}
"""The entry points of this project's own backends, keyed by group and name. They are
used if a backend was copied next to this package, because a package that is not
installed registers no entry points.
"""


class Backend(Protocol):
    """The interface of a backend. The keyword-only arguments of its `wrap` are the
    backend's own options.
    """

    name: str

    def wrap(self, optimizer: Any, options: Options) -> Any:
        """Wrap `optimizer`, or raise `ArgumentTypeError` if it is not an optimizer or
        is already wrapped.
        """
        ...


@runtime_checkable
class GatingBackend(Protocol):
    """A backend whose framework has learning-rate schedulers with a ``step`` method
    that the user calls.
    """

    def is_scheduler(self, candidate: object) -> bool:
        """True if `candidate` is a learning-rate scheduler, whether or not its
        optimizer is wrapped.
        """
        ...

    def gate(self, scheduler: Any) -> Any:
        """Make `scheduler` step only when an update was applied, or raise
        `ArgumentTypeError` if its optimizer is not wrapped.
        """
        ...


def owners(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of `group`, keyed by name. They include the entry points
    of adapters that were copied next to this package but not installed.
    """
    copied_adapters = {
        name: EntryPoint(name, value, group)
        for name, value in COPIED.get(group, {}).items()
        if find_spec(value.partition(":")[0])
    }
    installed = {entry.name: entry for entry in entry_points(group=group)}
    return {**copied_adapters, **installed}


def load(group: str, name: str) -> Any:
    """Load the object that is registered as `name` in `group`, without importing any
    other backend.

    Raises:
        BackendNotFoundError: there is no such entry point, or a package that it needs
            is not installed.
    """
    entries = owners(group)
    if name not in entries:
        raise BackendNotFoundError(
            f"backend: expected one of {sorted(entries)}; got {name!r}. Check the"
            " spelling, or install the backend."
        )
    try:
        return entries[name].load()
    except ModuleNotFoundError as error:
        raise BackendNotFoundError(
            f"backend {name!r} needs the package {error.name!r}, which is not"
            f" installed. Run: pip install 'gradaccum[{name}]'"
        ) from error


def load_backend(name: str) -> Backend:
    """Import the backend called `name`, together with its framework, and return it.

    Raises:
        BackendNotFoundError: there is no such backend, or its framework is not
            installed.
    """
    return cast(Backend, load(BACKENDS, name))


def registered_backends() -> tuple[str, ...]:
    """Return the names of all backends, sorted, whether or not their frameworks are
    installed.
    """
    return tuple(sorted(owners(BACKENDS)))


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends whose framework is installed, sorted, without
    importing any framework.
    """
    types = owners(TYPES)
    names = []
    for name, entry in sorted(owners(BACKENDS).items()):
        packages = [top for top, owner in types.items() if owner.value == entry.value]
        if all(find_spec(package) for package in packages):
            names.append(name)
    return tuple(names)


def backend_of(optimizer: object) -> Backend:
    """Return the backend for an optimizer, a scheduler or a model. It is the backend of
    the framework whose package defines the object's class or one of its base classes.
    If there is no such framework, as for a timm scheduler, the object's attribute
    ``optimizer`` is examined instead.

    Raises:
        ArgumentTypeError: no backend was found.
    """
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        entry = _entry_of(type(candidate).__mro__)
        if entry is not None:
            return cast(Backend, entry.load())
    kind = f"an object of type {type(optimizer).__name__}"
    fix = "Create an optimizer from the parameters, and wrap each optimizer separately."
    if isinstance(optimizer, type) or isroutine(optimizer):
        kind = f"{optimizer.__name__}, which was not called"
        fix = f"Call it: gradaccum.wrap({optimizer.__name__}(...), steps=4)."
    names = ", ".join(map(_describe, registered_backends()))
    raise ArgumentTypeError(
        "optimizer: expected an optimizer for"
        f" {names or 'a backend, but no backend is installed'}; got {kind}. {fix}"
    )


@cache
def _entry_of(bases: tuple[type, ...]) -> EntryPoint | None:
    """Return the entry point of the backend whose package defines one of `bases`. The
    result is cached, because reading entry points takes milliseconds.
    """
    types = owners(TYPES)
    for base in bases:
        package = base.__module__.partition(".")[0]
        if package in types:
            return types[package]
    return None


def _describe(name: str) -> str:
    if name in available_backends():
        return name
    return f"{name} (missing: pip install 'gradaccum[{name}]')"


NOT_GIVEN: Any = object()
_SHARED = signature(make_options).parameters.keys() - {"steps", "driver"}


Steps = int | Sequence[tuple[int, int]] | Callable[[Any], Any] | UntilWeight | None
"""The types that ``steps=`` accepts. See `wrap`."""


class WrapOptions(TypedDict, total=False):
    """The options of `wrap` that every backend has. The class of a backend's own
    options inherits from this class.
    """

    reduction: Reduction
    clip_norm: float | None
    skip_norm: float | None
    accumulate_dtype: Any
    on_overflow: OnOverflow
    master_weights: bool


def wrap_with(
    backend: Backend, optimizer: Any, steps: object = NOT_GIVEN, **options: Any
) -> Any:
    """Wrap `optimizer` as `gradaccum.wrap` does, but with the given `backend`."""
    if isinstance(backend, GatingBackend) and backend.is_scheduler(optimizer):
        if steps is not NOT_GIVEN or options:
            raise ArgumentTypeError(
                "optimizer: expected no options when wrapping a scheduler, because the"
                " scheduler steps when its optimizer applies an update; got"
                f" {options or steps}. Write gradaccum.wrap(scheduler)."
            )
        return backend.gate(optimizer)
    shared = {name: options.pop(name) for name in _SHARED if name in options}
    if steps is NOT_GIVEN:
        raise ArgumentTypeError(
            "steps: expected the number of micro-batches per window; got no steps="
            " argument. Write gradaccum.wrap(optimizer, steps=4)."
        )
    driver = backend if isinstance(backend, ScalerDriver) else None
    return backend.wrap(
        optimizer, make_options(steps, **shared, driver=driver), **options
    )
