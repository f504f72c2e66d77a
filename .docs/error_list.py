"""The page that lists every error message in the sources, so that a user who searches
for a message finds the remedy.

The sources are parsed, but not run. ``…`` stands for a value from the call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS: Mapping[str, str] = {
    "In every framework": "gradaccum",
    "PyTorch": "backends/gradaccum_torch",
    "JAX": "backends/gradaccum_jax",
    "MindSpore": "backends/gradaccum_mindspore",
}
UNKNOWN = "…"
MESSAGE = re.compile(r"(.+?): expected (.+?); got (.+?)(?:\. (.+))?", re.DOTALL)
_HEADER = """# Every error

Each message has the form `argument: expected ...; got .... What to write instead.` This
page is generated from the sources, and `…` stands for a value from your call.
[Troubleshooting](../gradaccum/TROUBLESHOOTING.md) lists the most common problems by
symptom.
"""


class Entry(NamedTuple):
    """One error, in the words of the source."""

    kind: str
    argument: str
    expected: str
    found: str
    fix: str


def entries_in(folder: str) -> list[Entry]:
    """The errors of a folder, each once, by what they are about."""
    files = sorted((ROOT / folder).rglob("*.py"))
    entries = {
        entry
        for file in files
        for entry in _entries_of(ast.parse(file.read_text(encoding="utf-8")))
    }
    return sorted(
        (entry for entry in entries if entry.expected != UNKNOWN),
        key=lambda entry: (entry.argument == UNKNOWN, entry),
    )


def error_page() -> str:
    """The Markdown of the page."""
    sections = [
        f"## {title}\n\n{''.join(_shown(entry) for entry in entries_in(folder))}"
        for title, folder in FOLDERS.items()
    ]
    return "\n".join([_HEADER, *sections])


def _shown(entry: Entry) -> str:
    got = "" if entry.found == UNKNOWN else f"; got {entry.found}"
    fix = "" if entry.fix == UNKNOWN else f"<br>{_escaped(entry.fix)}"
    return (
        f"- **{_escaped(entry.argument)}**: expected {_escaped(entry.expected + got)}."
        f" *({entry.kind})*{fix}\n"
    )


def _escaped(text: str) -> str:
    for mark in ("\\", "`", "*", "_", "<", "[", "{"):
        text = text.replace(mark, f"&#{ord(mark)};")
    return text


def _entries_of(tree: ast.Module) -> Iterator[Entry]:
    outer = _assigned(tree.body)
    for scope in (
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ):
        names = outer | _assigned(list(ast.walk(scope)))
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and len(node.args) == 1:
                message = MESSAGE.fullmatch(_words(node.args[0], names))
                kind = ast.unparse(node.func)
                if message and (kind == "kind" or kind.endswith("Error")):
                    yield Entry(
                        kind.replace("kind", "GradAccumError"), *_parts(message)
                    )


def _parts(message: re.Match[str]) -> list[str]:
    return [part or UNKNOWN for part in message.groups()]


def _words(node: ast.expr, names: Mapping[str, ast.expr]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                _words(
                    part.value if isinstance(part, ast.FormattedValue) else part, names
                )
                for part in parts
            )
        case ast.Name(id=name) if name in names:
            return _words(
                names[name], {key: value for key, value in names.items() if key != name}
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _words(left, names) + _words(right, names)
        case ast.IfExp(body=first, orelse=second):
            return " / ".join(_words(one, names) for one in (first, second))
    return UNKNOWN


def _assigned(nodes: list[ast.stmt] | list[ast.AST]) -> dict[str, ast.expr]:
    """The names that are assigned once, and what to."""
    found = [
        (node.targets[0].id, node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
    ]
    names = [name for name, _ in found]
    return {name: value for name, value in found if names.count(name) == 1}
