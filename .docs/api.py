"""The pages on the API: the public names of each package, whose docstrings mkdocstrings
reads from the sources.

The names are those in ``__all__``. A file for a neighbouring package, in an adapter's
folder ``integrations``, has its public classes.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOORS: Mapping[str, str] = {
    "gradaccum": "gradaccum/__init__.py",
    "gradaccum.watching": "gradaccum/watching.py",
    "gradaccum_torch": "backends/gradaccum_torch/__init__.py",
    "gradaccum_jax": "backends/gradaccum_jax/__init__.py",
    "gradaccum_mindspore": "backends/gradaccum_mindspore/__init__.py",
    "gradaccum.kit": "gradaccum/kit.py",
    "gradaccum_conformance": "conformance_tests/gradaccum_conformance/__init__.py",
}
INTERNALS = ("gradaccum.kit", "gradaccum_conformance")
"""Packages for those who write a backend, apart from what users call."""


def packages() -> dict[str, str]:
    """The packages that have a page, in the order of the site, and the file of each."""
    doors = {name: file for name, file in DOORS.items() if (ROOT / file).exists()}
    beside = {
        ".".join(file.parts[1:]).removesuffix(".py"): file.as_posix()
        for file in _integrations()
    }
    return doors | {
        name: file for name, file in beside.items() if _public_classes(file)
    }


def public_names(package: str) -> list[str]:
    """The names in the package's ``__all__``, as its source lists them, or its public
    classes.
    """
    file = packages()[package]
    written = [
        node
        for node in _tree(file).body
        if isinstance(node, ast.Assign | ast.AugAssign)
    ]
    lists = [node.value for node in written if ast.unparse(node).startswith("__all__ ")]
    return [
        name for names in lists for name in ast.literal_eval(names)
    ] or _public_classes(file)


def api_page(package: str) -> str:
    """The Markdown of the package's page, with a directive of mkdocstrings for each
    public name, `wrap` first.
    """
    names = sorted(public_names(package), key=lambda name: name != "wrap")
    directives = [f"::: {package}.{name}\n" for name in names]
    return "\n".join(
        [f"# `{package}`\n", f"{_docstring(packages()[package])}\n", *directives]
    )


def _integrations() -> list[Path]:
    return sorted(
        file.relative_to(ROOT) for file in ROOT.glob("backends/*/integrations/*.py")
    )


def _public_classes(file: str | Path) -> list[str]:
    return [
        node.name
        for node in _tree(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def _docstring(file: str) -> str:
    """That of the module, without the examples: Markdown would take their lines for
    prose.
    """
    told = (ast.get_docstring(_tree(file)) or "").split("\n\n")
    return "\n\n".join(part for part in told if " = " not in part)


def _tree(file: str | Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))
