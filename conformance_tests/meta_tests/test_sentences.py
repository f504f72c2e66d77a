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
    *(f"backends/gradaccum_{n}" for n in ("torch", "jax", "mindspore")),
)
QUESTION = re.compile(
    r"(What|Which|How|Whether|Where|When|Who|Why|Is|Are|Does|Do|Has|Have|Can)\b"
)
NO_VERB = re.compile(
    r"(A|An|The|This|That|Those|These|It|They|One|Each|Every|All|Any|No|None|Not"
    r"|Nothing|Some|Both|Only|Also|Same|Bool|Of|In|On|At|By|For|From|To|With|Without"
    r"|Under|Beside|Between|Before|After|Inside|As|If|Else|While|Until|And|Or)\b"
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def docstrings(folder: str) -> Iterator[tuple[str, Documented, str]]:
    """Yield the place of each docstring below a folder, its owner and its text."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                place = f"{file.relative_to(ROOT)}: {text.splitlines()[0]}"
                yield place, node, text


def is_summary(name: str, text: str) -> bool:
    """True if the summary begins with a command, such as "Return", or with "True if" or
    "True while".
    """
    if name.startswith("require_"):
        return text.startswith("Raise unless ")
    if text.startswith("True"):
        return text.startswith(("True if ", "True while "))
    first = text.split()[0].rstrip(",:;.")
    if first.endswith("s") and not first.endswith("ss"):
        return False
    if first.endswith("ing") and first != "Bring":
        return False
    if QUESTION.match(text) or NO_VERB.match(text):
        return False
    return first.isalpha() and first[0].isupper()


def is_function(node: Documented) -> bool:
    """True unless the function is read as an attribute, which a noun phrase describes."""
    return isinstance(node, ast.FunctionDef) and not any(
        "property" in ast.unparse(decorator) for decorator in node.decorator_list
    )


@pytest.mark.parametrize("folder", [*PACKAGES, "conformance_tests", "benchmarks"])
def test_titles_are_noun_phrases(folder: str) -> None:
    for place, node, text in docstrings(folder):
        assert not (isinstance(node, ast.Module) and QUESTION.match(text)), place


@pytest.mark.parametrize("package", PACKAGES)
def test_summaries_are_commands(package: str) -> None:
    """Classes and attributes are no questions."""
    faults = []
    for place, node, text in docstrings(package):
        if is_function(node):
            if not is_summary(node.name, text):  # type: ignore[union-attr]
                faults.append(place)
        elif QUESTION.match(text):
            faults.append(place)
    assert faults == []


@pytest.mark.parametrize(
    ("summary", "accepted"),
    [
        ("Return it.", True),
        ("True if it fits.", True),
        ("True while a window is open.", True),
        ("Pass it on.", True),
        ("Whether it fits.", False),
        ("The sum.", False),
        ("`value` as a float.", False),
        ("Returns it.", False),
        ("Names of all.", False),
        ("True of a layer.", False),
        ("bool: it ends.", False),
    ],
)
def test_rule_of_a_summary(summary: str, accepted: bool) -> None:
    assert is_summary("name", summary) is accepted
    assert not is_summary("require_name", summary)
