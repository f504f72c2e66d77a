"""The house stays small: files, code lines, the share of imports and the longest chain
of imports have limits.

A code line is no blank, comment or docstring. A chain is a list of modules of one
package, each of which imports the next at run time. A limit goes down when a change
makes room.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Limits(NamedTuple):
    files: int
    lines: int
    chain: int


LIMITS = {
    "gradaccum": Limits(26, 3_120, 9),
    "backends/gradaccum_torch": Limits(49, 7_125, 11),
    "backends/gradaccum_jax": Limits(37, 3_900, 9),
    "backends/gradaccum_mindspore": Limits(40, 4_810, 9),
}
"""The adapters' are without their harnesses, which only the suite imports."""
IMPORTS = 0.1
"""The share of import statements in all code lines of production."""
CHANGED_ATTRIBUTES = 50
"""The attributes in torch that are assigned outside of ``__init__``: more state that
somebody must keep in mind.
"""


def modules(package: str) -> dict[str, Path]:
    """The modules of a package by their dotted names."""
    folder = ROOT / package
    found = {}
    for file in folder.rglob("*.py"):
        if "harness" not in file.parts:
            parts = file.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def spans(nodes: list[ast.stmt]) -> set[int]:
    return {
        line
        for node in nodes
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def lines_of(file: Path) -> tuple[int, int]:
    """How many code lines a file has, and how many of them are imports."""
    source = file.read_text(encoding="utf-8")
    statements = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)
    ]
    texts = spans(
        [
            node
            for node in statements
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ]
    )
    written = {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    } - texts
    return len(written), len(
        written
        & spans(
            [
                node
                for node in statements
                if isinstance(node, ast.Import | ast.ImportFrom)
            ]
        )
    )


def imported(file: Path) -> set[str]:
    """The modules that a file imports at run time, and the names in them, which may be
    modules.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    for_types = {id(node) for block in blocks for node in ast.walk(block)}
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types
    ]
    return {f"{node.module}.{alias.name}" for node in found for alias in node.names} | {
        node.module or "" for node in found
    }


def longest_chain(package: str) -> list[str]:
    """The longest list of modules, each of which imports the next."""
    files = modules(package)

    @cache
    def chain_from(name: str) -> list[str]:
        wanted = imported(files[name])
        # `from package import module` needs the module, and of the package only what
        # every import of a module runs anyway.
        needed = {
            other
            for other in wanted & files.keys()
            if not any(
                more.startswith(f"{other}.") and more in files for more in wanted
            )
        }
        return [
            name,
            *max((chain_from(other) for other in needed - {name}), key=len, default=[]),
        ]

    return max(map(chain_from, files), key=len)


@pytest.mark.parametrize("package", LIMITS)
def test_package_is_within_its_limits(package: str) -> None:
    limits, files = LIMITS[package], modules(package).values()
    assert len(files) <= limits.files
    assert sum(lines_of(file)[0] for file in files) <= limits.lines
    chain = longest_chain(package)
    assert len(chain) <= limits.chain, " -> ".join(chain)


def test_imports_are_few() -> None:
    counted = [
        lines_of(file) for package in LIMITS for file in modules(package).values()
    ]
    assert sum(imports for _, imports in counted) <= IMPORTS * sum(
        lines for lines, _ in counted
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
    for package in LIMITS:
        for file in (ROOT / package).rglob("*.py"):
            names = constants(file)
            assert len(names) == len(set(names)), (
                f"{file}: {sorted({name for name in names if names.count(name) > 1})}"
            )


def changed_attributes(package: str) -> set[tuple[str, str, str]]:
    """The attributes that something assigns outside of ``__init__``: by module, class
    or other object, and name.

    Through another object than ``self`` those count that a class of another module
    assigns too: torch's own do not, and a class is one thing with its neighbours.
    """
    files = modules(package)
    stores = [
        (name, *store)
        for name, file in files.items()
        for store in stores_in(ast.parse(file.read_text(encoding="utf-8")))
    ]
    own = {attribute for _, _, _, of_self, attribute in stores if of_self}
    found = set()
    for module, cls, function, of_self, attribute in stores:
        if function != "__init__" and (of_self or attribute in own):
            found.add((module, cls if of_self else "", attribute))
    changed = {(module, attribute) for module, cls, attribute in found if cls}
    return {each for each in found if each[1] or (each[0], each[2]) not in changed}


def stores_in(
    node: ast.AST, cls: str = "", function: str = ""
) -> Iterator[tuple[str, str, bool, str]]:
    """The assignments to attributes below `node`: class, function, whether the object
    is ``self``, and name.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield (
                cls,
                function,
                isinstance(child.value, ast.Name) and child.value.id == "self",
                child.attr,
            )
        inner = child.name if isinstance(child, ast.ClassDef) else cls
        yield from stores_in(
            child, inner, child.name if isinstance(child, ast.FunctionDef) else function
        )


def test_few_attributes_change() -> None:
    changed = changed_attributes("backends/gradaccum_torch")
    assert len(changed) <= CHANGED_ATTRIBUTES, sorted(changed)
