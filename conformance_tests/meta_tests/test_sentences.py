"""Rules for docstrings: a module's title is a noun phrase, a function's summary a
command or "True if", a class's title no question.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "gradaccum",
    "backends/gradaccum_torch",
    "backends/gradaccum_jax",
    "backends/gradaccum_mindspore",
)
TITLED = (*PACKAGES, "conformance_tests", "benchmarks")

QUESTIONS = frozenset(
    [
        "What",
        "Which",
        "How",
        "Whether",
        "Where",
        "When",
        "Who",
        "Why",
        "Is",
        "Are",
        "Does",
        "Do",
        "Has",
        "Have",
        "Can",
    ]
)
NOT_VERBS = QUESTIONS | {
    *(
        "A",
        "An",
        "The",
        "This",
        "That",
        "Those",
        "These",
        "It",
        "They",
        "One",
        "Each",
        "Every",
        "All",
        "Any",
        "No",
        "None",
    ),
    *(
        "Nothing",
        "Some",
        "Both",
        "Only",
        "Also",
        "Same",
        "Bool",
        "Of",
        "In",
        "On",
        "At",
        "By",
        "For",
        "From",
        "To",
        "With",
    ),
    *(
        "Without",
        "Under",
        "Beside",
        "Between",
        "Before",
        "After",
        "Inside",
        "As",
        "If",
        "Else",
        "While",
        "Until",
        "And",
        "Or",
    ),
    *"Not",
}
BANNED = re.compile(
    r"\bby half\b|\b(?:is|are|was|were) told\b|\bha(?:s|ve) it that\b", re.IGNORECASE
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def docstrings(folder: str) -> Iterator[tuple[str, Documented, str]]:
    """Yield each docstring below a folder: its place, its owner and its text."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield (
                    (
                        f"{file.relative_to(ROOT)}:"
                        f" {getattr(node, 'name', 'the module')}:"
                        f" {text.splitlines()[0]}"
                    ),
                    node,
                    text,
                )


def fault_of_title(text: str) -> bool:
    return text.split()[0].rstrip(",:") in QUESTIONS


def fault_of_summary(name: str, text: str) -> bool:
    """True unless the summary begins with a command, such as "Return", or with "True
    if" or "True while".
    """
    if name.startswith("require_"):
        return not text.startswith("Raise unless ")
    if text.startswith("True"):
        return not text.startswith(("True if ", "True while "))
    first = text.split()[0].rstrip(",:;.")
    other_form = (first.endswith("s") and not first.endswith("ss")) or (
        first.endswith("ing") and first != "Bring"
    )
    return (
        not first.isalpha()
        or not first[0].isupper()
        or other_form
        or first in NOT_VERBS
    )


def is_attribute(node: Documented) -> bool:
    """True if a function is read as an attribute, which a noun phrase describes."""
    return isinstance(node, ast.FunctionDef) and any(
        "property" in ast.unparse(each) for each in node.decorator_list
    )


@pytest.mark.parametrize("folder", TITLED)
def test_titles_are_noun_phrases(folder: str) -> None:
    assert [
        place
        for place, node, text in docstrings(folder)
        if isinstance(node, ast.Module) and fault_of_title(text)
    ] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_summaries_are_commands(package: str) -> None:
    functions = [
        each
        for each in docstrings(package)
        if isinstance(each[1], ast.FunctionDef) and not is_attribute(each[1])
    ]
    assert [
        place
        for place, node, text in functions
        if fault_of_summary(getattr(node, "name", ""), text)
    ] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_classes_and_attributes_are_no_questions(package: str) -> None:
    things = [
        each
        for each in docstrings(package)
        if isinstance(each[1], ast.ClassDef) or is_attribute(each[1])
    ]
    assert [place for place, _, text in things if fault_of_title(text)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_phrase_is_banned(package: str) -> None:
    assert [
        f"{place} ... {found[0]}"
        for place, _, text in docstrings(package)
        if (found := BANNED.search(text))
    ] == []


@pytest.mark.parametrize(
    "summary",
    [
        "Return it.",
        "True if it fits.",
        "True while a window is open.",
        "Pass it on.",
        "Raise the first error.",
    ],
)
def test_a_command_is_accepted(summary: str) -> None:
    assert not fault_of_summary("name", summary)


@pytest.mark.parametrize(
    "summary",
    [
        "Whether it fits.",
        "The sum.",
        "`value` as a float.",
        "Returns it.",
        "Names of all.",
        "True of a layer.",
        "bool: it ends.",
    ],
)
def test_another_form_is_a_fault(summary: str) -> None:
    assert fault_of_summary("name", summary)


def test_a_check_says_what_it_requires() -> None:
    assert fault_of_summary("require_int", "Refuse another type.")
    assert not fault_of_summary("require_int", "Raise unless it is an int.")
