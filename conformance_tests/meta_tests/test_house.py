"""No module assigns a constant twice."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "gradaccum",
    "backends/gradaccum_torch",
    "backends/gradaccum_jax",
    "backends/gradaccum_mindspore",
)


def constants(file: Path) -> list[str]:
    """The names that a module assigns at its top, as often as it does."""
    targets = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets += (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
    return [
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def test_no_constant_is_assigned_twice() -> None:
    """A function that stands before the second assignment would read the second value,
    and no tool says so.
    """
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            names = constants(file)
            assert len(names) == len(set(names)), (
                f"{file}: {sorted({name for name in names if names.count(name) > 1})}"
            )
