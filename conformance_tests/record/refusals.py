"""The errors that each package raises, read from its sources: the class, and what was
expected. Neither a file nor a function is named, so that a move changes nothing.

A raised call of a function that makes an error is a line of its own, with the
function's name, as is the error that the function makes.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .facts import Facts

ROOT = Path(__file__).parents[2]
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
    yield from _of(ast.parse(code), {})


def _of(node: ast.AST, known: dict[str, ast.expr]) -> Iterator[str]:
    """The errors made in `node`, where `known` are the variables around it that have
    one value.
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        known = known | dict(_assigned(node))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "explain",
        "kit.explain",
    ):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        yield (
            f"{_name(node.args[0])} | {_text(node.args[1], known)}: expected"
            f" {_text(given['expected'], known)}"
        )
    elif (
        isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and _name(node.exc.func) != "explain"
    ):
        message = (
            _text(node.exc.args[0], known)
            if node.exc.args and _name(node.exc.func)[0].isupper()
            else ""
        )
        yield (
            f"{_name(node.exc.func).lstrip('_')} |"
            f" {message.partition(':')[0].partition('.')[0]}".removesuffix(" | ")
        )
    for child in ast.iter_child_nodes(node):
        yield from _of(child, known)


def _assigned(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Name):
                yield target.id, value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from (
                    (each.id, given)
                    for each, given in zip(target.elts, value.elts, strict=True)
                    if isinstance(each, ast.Name)
                )


def _name(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[-1]


def _text(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """The literal text of an expression; ``{}`` where a value goes."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, known) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, known) + _text(right, known)
        case ast.IfExp(body=body, orelse=other):
            return f"{_text(body, known)} or {_text(other, known)}"
        case ast.Name(id=name) if name in known:
            return _text(
                known[name], {key: value for key, value in known.items() if key != name}
            )
    return "{}"
