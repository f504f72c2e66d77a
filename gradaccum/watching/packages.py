"""A package that a ready-made listener needs, imported as the listener is made, so that the core needs none of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gradaccum.errors import explain
from gradaccum.verification.report import MissingPackageError


def imported(listener: str, *modules: str, install: str) -> Any:
    """The first of `modules` that is installed.

    Raises:
        MissingPackageError: none is; the error names what to `install`.
    """
    missing: list[ModuleNotFoundError] = []
    for module in modules:
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            missing.append(error)
    expected, fix = " or ".join(map(repr, modules)), f"Run: pip install {install}; or pass any function of one ClosedWindow."
    raise explain(MissingPackageError, listener, expected=expected, found="none installed", fix=fix) from missing[-1]
