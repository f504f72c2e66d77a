"""The mutants that are made by machine: which changes a text is given."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from conformance_tests.mutation.equivalent import EQUIVALENT, why_equivalent
from conformance_tests.mutation.operators import mutations_of
from conformance_tests.mutation.packages import PACKAGES, ROOT
from conformance_tests.mutation.running import (
    mutants_of,
    sample,
    statement_at,
    verdicts,
)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x = a < b", ["x = (a <= b)"]),
        ("x = a + 2", ["x = (a - 2)", "x = a + 3"]),
        ("x = a and not b", ["x = (a or not b)", "x = a and (b)"]),
        ("x = a if b else 0.5", ["x = a if (not (b)) else 0.5", "x = a if b else 1.0"]),
        ("x += a", ["x -= a"]),
        ("a.x = f(b, c)", ["pass", "a.x = f(c, b)"]),
        ("f(b, *c)", ["pass"]),
        ("x = (a, True)", ["x = (True, a)", "x = (a, False)"]),
    ],
)
def test_changes_of_a_line(line: str, changed: list[str]) -> None:
    assert sorted(mutation.apply(line) for mutation in mutations_of(line)) == sorted(
        changed
    )


@pytest.mark.parametrize(
    "line",
    [
        '"""A text."""',
        "x: int",
        "raise E(1)",
        "import a",
        "x = isinstance(a, (B, C))",
        "x = dict[A, B]",
        'x = "a" + f"{b}"',
    ],
)
def test_what_does_not_run_is_left_alone(line: str) -> None:
    assert not mutations_of(line)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_every_mutant_is_python(package) -> None:
    every = mutants_of(package)
    assert len(every) > 500
    assert not [
        test
        for test in package.tests
        if not (ROOT / "conformance_tests" / test.partition("::")[0]).exists()
    ]
    for mutant in every[::29]:
        ast.parse(
            mutant.mutation.apply((ROOT / mutant.file).read_text(encoding="utf-8"))
        )
    drawn = sample(package, 20, 0)
    assert set(sample(package, 10, 0)) < set(drawn) != set(sample(package, 20, 1))
    named = {key for key in EQUIVALENT if key[0].startswith(f"{package.folder}/")}
    assert not named - {
        (str(mutant.file), mutant.mutation.becomes) for mutant in every
    }, "equivalent to code that is no more"


def test_statement_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "def f(\n    a,\n):\n    x = (\n        a,\n    )\n    if x: return a\n"
    )
    assert [statement_at(file, line) for line in (1, 2, 4, 5, 7)] == [
        range(1, 4),
        range(1, 4),
        range(4, 7),
        range(4, 7),
        range(7, 8),
    ]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["core", "torch", "jax", "mindspore"])
def test_small_changes_are_noticed(name: str, tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    pytest.importorskip({"core": "numpy"}.get(name, name))
    tried = [
        mutant
        for mutant in sample(PACKAGES[name], 200, 0)
        if not why_equivalent(mutant)
    ]
    alive = [
        str(mutant)
        for mutant, killer in verdicts(
            PACKAGES[name], tried, tmp_path, most_seconds=120
        )
        if not killer
    ]
    assert len(alive) <= 0.05 * len(tried), alive
