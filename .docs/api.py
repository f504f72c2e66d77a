"""The pages on the API: the names in ``__all__`` of each package, whose docstrings mkdocstrings reads from the sources."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES: Mapping[str, str] = {
    "gradaccum": "gradaccum/__init__.py",
    "gradaccum_torch": "backends/gradaccum_torch/__init__.py",
    "gradaccum_jax": "backends/gradaccum_jax/__init__.py",
    "gradaccum_mindspore": "backends/gradaccum_mindspore/__init__.py",
    "gradaccum.kit": "gradaccum/kit.py",
    "gradaccum_conformance": "conformance_tests/gradaccum_conformance/__init__.py",
}


def public_names(package: str) -> list[str]:
    """The names in the package's ``__all__``, as its source lists them."""
    for node in _tree(package).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{PACKAGES[package]} has no __all__")


def api_page(package: str) -> str:
    """The Markdown of the package's page, with a directive of mkdocstrings for each public name."""
    directives = [f"::: {package}.{name}\n" for name in public_names(package)]
    return "\n".join([f"# `{package}`\n", f"{_docstring(package)}\n", *directives])


def _docstring(package: str) -> str:
    """That of the module, without the examples: Markdown would take their lines for prose."""
    told = (ast.get_docstring(_tree(package)) or "").split("\n\n")
    return "\n\n".join(part for part in told if " = " not in part)


def _tree(package: str) -> ast.Module:
    return ast.parse((ROOT / PACKAGES[package]).read_text(encoding="utf-8"))
