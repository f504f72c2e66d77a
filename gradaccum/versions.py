"""The ``gradaccum versions`` command, which prints the versions that belong in a bug
report. It imports no framework.
"""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from gradaccum.registry import available_backends, registered_backends

PACKAGES = ("numpy", "torch", "jax", "jaxlib", "optax", "mindspore")


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report() -> str:
    """Return the versions of gradaccum, Python, the operating system and the packages
    in `PACKAGES`, and the names of the registered backends, one on each line.
    """
    lines = [
        f"gradaccum {import_module('gradaccum').__version__}",
        f"Python {platform.python_version()} ({sys.executable})",
        platform.platform(),
    ]
    for package in PACKAGES:
        lines.append(f"{package} {installed_version(package) or 'not installed'}")
    available = available_backends()
    for name in registered_backends():
        state = "" if name in available else ", whose framework is not installed"
        lines.append(f"backend {name}{state}")
    return "\n".join(lines)
