"""Measure how much code there is, and in what style it is written.

Lines are a poor measure of size: whoever makes lines longer has fewer of them. Tokens are what a
reader reads, so size is counted in tokens. A formatter changes tokens per line and nothing else,
so style is counted per statement.

    python -m conformance_tests.measure_tokens              tokens, and style
    python -m conformance_tests.measure_tokens --check      exit with 1 if over a limit

The limits are a test (``meta_tests/test_record.py``). What is counted:

token          what Python's tokenizer finds, without comments, docstrings, newlines and
               indentation; an f-string is one token, whatever the version of Python
code line      a line with at least one such token
parallel       an assignment that gives several names a value each: ``a, b = x, y``
nested         a comprehension in a comprehension or with two ``for``, or an ``if else``
               expression in another one
participle     a name that is a participle alone: ``found``, ``held``, ``joined``; not
               ``padded_batch``
pointing word  a name that only points: ``own``, ``whole``, ``others``, ``there``, ``each``
refusals       ``raise``, what builds its message, and functions that only check or refuse
production     all files of the packages
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "core": ROOT / "gradaccum",
    "torch": ROOT / "backends/gradaccum_torch",
    "jax": ROOT / "backends/gradaccum_jax",
    "mindspore": ROOT / "backends/gradaccum_mindspore",
}
TESTS = ROOT / "conformance_tests"
MAX_TEST_TOKENS = 270_000
"""The limit of ``--check`` for the tests."""

MAX_COLUMNS = 100
LIMITS = {
    "tokens": 120_000,
    "tokens / line": 8.0,
    f"lines > {MAX_COLUMNS} columns, %": 1.0,
    "parallel assignments, %": 1.5,
    "if-else expressions / 1000": 25.0,
    "nested / 1000": 3.0,
    "participle names / 1000": 12.0,
    "pointing words / 1000": 6.0,
    "refusals, %": 6.0,
}
"""The limits of ``--check``. Accelerate, Fabric, optax, einops, equinox, flax, narwhals, torchtune
and opacus are under the last six, but for torchtune's expressions and narwhals' `other`."""

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # Since Python 3.12.
FSTRING_END = getattr(tokenize, "FSTRING_END", None)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IRREGULAR_PARTICIPLES = re.compile(
    "begun|borne|bought|bound|built|caught|chosen|done|drawn|driven|fallen|felt|found|frozen"
    "|given|grown|held|hidden|kept|known|left|lost|made|meant|met|rode|sent|shown|spoken|spoilt"
    "|stood|taken|taught|told|torn|understood|woven|written"
)
REGULAR_PARTICIPLES = re.compile("[a-z]+ed")
NO_PARTICIPLES = {"bed", "embed", "feed", "led", "need", "red", "seed", "shed", "speed"}
POINTING_WORDS = re.compile(
    "above|again|apart|below|each|elsewhere|every|few|here|it|one|other|others|own|rest|several"
    "|there|those|whole"
)
MESSAGE_NAMES = {"expected", "fix", "found", "got", "message", "msg"}
CHECKING_PREFIXES = ("require_", "check_", "refuse_", "validate_")


RATES = {
    "tokens / line": (1, "tokens", "code lines"),
    f"lines > {MAX_COLUMNS} columns, %": (100, "long lines", "code lines"),
    "parallel assignments, %": (100, "parallel", "assignments"),
    "refusals, %": (100, "refusal tokens", "tokens"),
    "if-else expressions / 1000": (1000, "if-else", "statements"),
    "nested / 1000": (1000, "nested", "statements"),
    "participle names / 1000": (1000, "participles", "names"),
    "pointing words / 1000": (1000, "pointing", "names"),
}
"""By figure: a factor, what is counted, and what it is divided by."""


def figures_of(counts: Counter[str]) -> dict[str, float]:
    """Return the figures by name, in the order in which they are printed."""
    figures = {}
    for name in ("tokens", "code lines", "files", "statements", "names"):
        figures[name] = counts[name]
    for name, (factor, part, total) in RATES.items():
        figures[name] = factor * counts[part] / max(counts[total], 1)
    return figures


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """Return the tokens of `source` that count."""
    counted = []
    begins_statement = True
    for token in join_fstrings(tokenize.generate_tokens(io.StringIO(source).readline)):
        if token.type in SKIPPED:
            begins_statement = begins_statement or token.type == tokenize.NEWLINE
            continue
        is_string = token.type == tokenize.STRING and '"""' in token.string[:4]
        begins_statement = begins_statement and is_string
        if not begins_statement:
            counted.append(token)
    return counted


def join_fstrings(tokens: Iterator[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Make one token of the parts of an f-string, as Python before 3.12 does."""
    depth = 0
    for token in tokens:
        if token.type == FSTRING_START:
            if depth == 0:
                start = token
            depth += 1
        elif token.type == FSTRING_END:
            depth -= 1
            if depth == 0:
                yield start._replace(type=tokenize.STRING, end=token.end)
        elif depth == 0:
            yield token


class FileMeasure:
    """The measurement of one file."""

    def __init__(self, path: Path, counts: Counter[str]) -> None:
        self.path = path
        self.counts = counts
        self.source = path.read_text("utf-8")
        self.tokens = code_tokens(self.source)
        self.starts = [token.start for token in self.tokens]
        self.lines: set[int] = set()
        for token in self.tokens:
            self.lines.update(range(token.start[0], token.end[0] + 1))
        self.refusals: set[int] = set()
        """The indices of tokens in refusals, so that none counts twice."""

    def run(self) -> None:
        text = self.source.split("\n")
        counts = self.counts
        counts["files"] += 1
        counts["tokens"] += len(self.tokens)
        counts["code lines"] += len(self.lines)
        counts["long lines"] += sum(
            len(text[line - 1]) > MAX_COLUMNS for line in self.lines
        )
        for node in ast.walk(ast.parse(self.source)):
            self.count_statement(node)
            self.count_expression(node)
            self.count_name(node)
        counts["refusal tokens"] += len(self.refusals)

    def count_statement(self, node: ast.AST) -> None:
        counts = self.counts
        if not isinstance(node, ast.stmt) or is_docstring(node):
            return
        counts["statements"] += 1
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            counts["assignments"] += 1
            counts["parallel"] += is_parallel(node)
        if is_refusal(node):
            self.refusals.update(self.tokens_of(node))

    def count_expression(self, node: ast.AST) -> None:
        counts = self.counts
        if isinstance(node, COMPREHENSIONS):
            has_two = len(node.generators) > 1 or has_inside(node, COMPREHENSIONS)
            counts["nested"] += has_two
        elif isinstance(node, ast.IfExp):
            counts["if-else"] += 1
            counts["nested"] += has_inside(node, (ast.IfExp,))

    def count_name(self, node: ast.AST) -> None:
        name = name_of(node)
        if name is None:
            return
        name = name.strip("_").lower()
        counts = self.counts
        counts["names"] += 1
        counts["participles"] += is_participle(name)
        counts["pointing"] += bool(POINTING_WORDS.fullmatch(name))

    def tokens_of(self, node: ast.stmt) -> range:
        """Return the indices of the statement's tokens."""
        first = (node.lineno, node.col_offset)
        last = (node.end_lineno or 0, node.end_col_offset or 0)
        return range(bisect_left(self.starts, first), bisect_left(self.starts, last))


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_parallel(node: ast.stmt) -> bool:
    """True for ``a, b = x, y`` and ``a = b = x``, not for ``a, b = function()``."""
    if not isinstance(node, ast.Assign):
        return False
    if len(node.targets) > 1:
        return True
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_refusal(node: ast.stmt) -> bool:
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, FUNCTIONS):
        name = node.name.lstrip("_")
        return name.startswith(CHECKING_PREFIXES) or name.endswith("_error")
    if isinstance(node, ast.Assign):
        targets = set()
        for target in node.targets:
            targets.update(
                name.id for name in ast.walk(target) if isinstance(name, ast.Name)
            )
        return bool(targets) and targets <= MESSAGE_NAMES
    return False


def is_participle(name: str) -> bool:
    if IRREGULAR_PARTICIPLES.fullmatch(name):
        return True
    return bool(REGULAR_PARTICIPLES.fullmatch(name)) and name not in NO_PARTICIPLES


def has_inside(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(
        isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node
    )


def name_of(node: ast.AST) -> str | None:
    """Return the identifier that a node brings in or uses."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return node.name
    return None


def measure(*packages: Path) -> Counter[str]:
    """Count what is in the files in `packages`."""
    counts = Counter()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            FileMeasure(path, counts).run()
    return counts


def tokens_of_tests() -> int:
    return sum(
        len(code_tokens(path.read_text("utf-8"))) for path in TESTS.rglob("*.py")
    )


def print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [
            cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        print("  ".join(cells).rstrip())


def print_styles(styles: dict[str, Counter[str]]) -> None:
    columns = [*map(figures_of, styles.values())]
    rows = []
    for name in columns[0]:
        rows.append([name, *(shown(column[name]) for column in columns)])
    print_table(["style", *styles], rows)


def shown(figure: float) -> str:
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.1f}"


def over_limit(counts: Counter[str]) -> list[str]:
    figures = figures_of(counts)
    return [
        f"{name}: {shown(figures[name])}, at most {limit:,} allowed"
        for name, limit in LIMITS.items()
        if figures[name] > limit
    ]


def tests_over_limit() -> list[str]:
    tokens = tokens_of_tests()
    if tokens <= MAX_TEST_TOKENS:
        return []
    return [f"tests: {tokens:,} tokens, at most {MAX_TEST_TOKENS:,} allowed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if over a limit"
    )
    arguments = parser.parse_args()

    everything = measure(*PACKAGES.values())
    print(f"tests: {tokens_of_tests():,} tokens\n")
    print_styles(
        {name: measure(package) for name, package in PACKAGES.items()}
        | {"all": everything}
    )
    problems = over_limit(everything) + tests_over_limit() if arguments.check else []
    for problem in problems:
        print(f"over the limit: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
