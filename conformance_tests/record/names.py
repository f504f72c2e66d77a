"""The public names of each package and their signatures. Of a class: what its own code
defines, not what a framework's class gives it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from .facts import Facts

PACKAGES = ("gradaccum", "gradaccum.kit", "gradaccum.watching")
CALLS = ("__init__", "__new__", "__call__")
"""The methods that a user calls without writing their names."""
UNSTABLE = re.compile(r"ForwardRef\(([^()]*)\)| at 0x[0-9a-f]+")


def found(backends: Iterable[str]) -> Facts:
    return {
        package: list(_names_of(import_module(package)))
        for package in (*PACKAGES, *(f"gradaccum_{name}" for name in backends))
    }


def _names_of(module: Any) -> Iterator[str]:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield f"class {name}"
            yield from (f"{name}.{member}" for member in _members(value))
        else:
            yield f"{name}{_signature(value)}"


def _members(kind: type) -> Iterator[str]:
    own = [base for base in kind.__mro__ if base.__module__.startswith("gradaccum")]
    for name in sorted(
        {
            name
            for base in own
            for name in vars(base)
            if name in CALLS or not name.startswith("_")
        }
    ):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, (property, functools.cached_property)):
            yield f"{name}: property"
        elif (
            callable(getattr(kind, name))
            and getattr(value, "__module__", "") != "typing"
        ):
            yield f"{name}{_signature(getattr(kind, name))}"


def _signature(value: Any) -> str:
    """Written alike by every Python: a NamedTuple's annotations would name a class of
    `typing`, and a sentinel its address.
    """
    return (
        UNSTABLE.sub(r"\1", str(inspect.signature(value)))
        if inspect.isroutine(inspect.unwrap(value))
        else ""
    )
