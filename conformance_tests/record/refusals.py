"""The errors that each package raises, read from its sources: the class, and what was
expected. Neither a file nor a function is named, so that a move changes nothing.

A raised call of another class, or of a function that makes an error, is a line with
that name alone.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from conformance_tests.programs import ROOT

from .facts import Facts

FOLDERS = [
    ROOT / "gradaccum",
    *(
        ROOT / "backends" / f"gradaccum_{name}"
        for name in ("torch", "jax", "mindspore")
    ),
]


def found() -> Facts:
    return {
        folder.name: _counted(
            [
                line
                for file in sorted(folder.rglob("*.py"))
                for line in refusals(file.read_text("utf-8"))
            ]
        )
        for folder in FOLDERS
    }


def _counted(found: list[str]) -> list[str]:
    return [
        line if count == 1 else f"{line} ({count} places)"
        for line, count in Counter(found).items()
    ]


def refusals(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and _requirement(node):
            yield f"{_name(node.func)} | {_requirement(node)}"
        elif (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and not _requirement(node.exc)
        ):
            yield _name(node.exc.func).lstrip("_")


def _requirement(call: ast.Call) -> str:
    """Return what an error's message says before "; got"; "" for other calls."""
    text = _text(call.args[0]) if len(call.args) == 1 else ""
    requirement, got, _ = text.partition("; got ")
    return requirement if got and ": expected " in requirement else ""


def _name(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[-1]


def _text(node: ast.expr) -> str:
    """The literal text of an expression; ``{}`` where a value goes."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
    return "{}"
