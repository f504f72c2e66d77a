"""The operators of mutation: every small change of a source text that a tool can make
without knowing what the code is for.

Another operator, another constant, a negated condition, a dropped statement, swapped
arguments: tests that notice such small changes notice most others (R. DeMillo, R.
Lipton and F. Sayward, "Hints on test data selection", 1978).
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

PAIRS = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
}
OPERATORS = {
    **PAIRS,
    **{second: first for first, second in PAIRS.items()},
    **dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult),
}
"""Each operator, and the operator that takes its place."""
SILENT = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
"""Statements that are left alone: the text of an error is another test's concern."""
SYMMETRIC = (
    "max",
    "min",
    "math.hypot",
    "jnp.maximum",
    "jnp.minimum",
    "jnp.promote_types",
    "wider",
)
"""Functions whose arguments have no order."""


class Mutation(NamedTuple):
    """One change of a source text."""

    line: int
    """Counted from 1."""
    start: int
    """Offset in bytes; the old text ends at `stop`."""
    stop: int
    old: str
    new: str
    becomes: str
    """The whole line with the change in it; what is dropped stands in a comment."""

    def apply(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.stop :]).decode()

    def __str__(self) -> str:
        return f"{' '.join(self.old.split())} -> {' '.join(self.new.split())}"


def mutations_of(source: str) -> list[Mutation]:
    """Return every mutation of a module's code, in the order of its lines; none changes
    an annotation, a docstring or an error.
    """
    text = source.encode()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for node in _code(ast.parse(source)):
        for target, new in _changes(node):
            first = starts[target.lineno - 1]
            start = first + target.col_offset
            stop = starts[target.end_lineno - 1] + target.end_col_offset
            old = text[start:stop].decode()
            becomes = f"pass  # {' '.join(old.split())}"
            if new != "pass":
                rest = text[stop : starts[target.end_lineno]]
                becomes = f"{text[first:start].decode()}{new}{rest.decode()}".strip()
            found[start, stop, new] = Mutation(
                target.lineno, start, stop, old, new, becomes
            )
    return sorted(found.values())


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk through what runs: no annotation, no docstring, nothing that only a type
    checker reads, no type.
    """
    if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Tuple):
        return
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if (
                isinstance(child, ast.AST)
                and not isinstance(child, SILENT)
                and not _is_for_types(child)
            ):
                yield child
                yield from _code(child)


def _is_for_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base) == "Protocol" for base in node.bases)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name in ("isinstance", "cast", "TypeVar") or name.endswith("Error")
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The changes of one node: what is replaced, and its new text."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield (
            node,
            _with(
                node,
                lambda copy: copy.ops.__setitem__(0, OPERATORS[type(copy.ops[0])]()),
            ),
        )
    elif (
        isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign))
        and type(node.op) in OPERATORS
        and not _is_text(node)
    ):
        yield (
            node,
            _with(node, lambda copy: setattr(copy, "op", OPERATORS[type(copy.op)]())),
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node.value, (int, float)):
            is_float = isinstance(node.value, float) and node.value
            yield node, repr(node.value * 2 if is_float else node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.Expr) or (
        isinstance(node, (ast.Assign, ast.AugAssign)) and _is_stored(node)
    ):
        yield node, "pass"
    if isinstance(node, ast.Call) and ast.unparse(node.func) not in SYMMETRIC:
        yield from _swapped(node, node.args)
    elif (
        isinstance(node, ast.Tuple)
        and isinstance(node.ctx, ast.Load)
        and not all(isinstance(entry, ast.Constant) for entry in node.elts)
    ):
        yield from _swapped(node, node.elts)


def _swapped(node: ast.expr, entries: list[ast.expr]) -> Iterator[tuple[ast.expr, str]]:
    for place, (first, second) in enumerate(itertools.pairwise(entries)):
        if (
            isinstance(first, ast.Starred)
            or isinstance(second, ast.Starred)
            or ast.dump(first) == ast.dump(second)
        ):
            continue

        def swap(copy: ast.AST, place: int = place) -> None:
            swapped = copy.args if isinstance(copy, ast.Call) else copy.elts  # type: ignore[attr-defined]
            swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]

        yield node, _with(node, swap)


def _is_stored(node: ast.Assign | ast.AugAssign) -> bool:
    """True if dropping the statement leaves every name bound: it stores into an
    object.
    """
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)


def _is_text(node: ast.AST) -> bool:
    """True if the node puts texts together."""
    sides = (
        (node.left, node.right)
        if isinstance(node, ast.BinOp)
        else (node.value,)
        if isinstance(node, ast.AugAssign)
        else ()
    )
    return any(
        isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str)
        for side in sides
    )


def _with(node: ast.AST, change: Callable[[ast.AST], object]) -> str:
    copy = ast.parse(ast.unparse(node)).body[0]
    copy = copy.value if isinstance(copy, ast.Expr) else copy
    change(copy)
    text = ast.unparse(copy)
    return (
        f"({text})"
        if isinstance(node, ast.expr) and not isinstance(node, (ast.Call, ast.Tuple))
        else text
    )
