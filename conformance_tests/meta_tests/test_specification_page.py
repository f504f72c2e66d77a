"""The pages that specify gradient accumulation have the code's names; the vectors are
those of the reference, and fit their schema.
"""

from __future__ import annotations

import json
import re

import pytest

from conformance_tests.programs import ROOT
from gradaccum.kit import State
from gradaccum.options import ON_OVERFLOW, REDUCTIONS
from gradaccum_conformance.vectors import make
from gradaccum_conformance.vectors.run import FOLDER, KINDS, read


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        ("CONCEPTS", "The state machine", State._fields),
        ("SPECIFICATION", "The state", State._fields),
        ("SPECIFICATION", "Three reductions", ("reduction", *REDUCTIONS)),
        ("SPECIFICATION", "Three overflow policies", ("on_overflow", *ON_OVERFLOW)),
    ],
)
def test_tables_have_the_names_of_the_code(
    page: str, heading: str, names: tuple[str, ...]
) -> None:
    text = (ROOT / f"gradaccum/{page}.md").read_text("utf-8")
    section = text.split(f"## {heading}")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == names


def test_vectors_are_the_reference_s() -> None:
    for kind, text in make.file_texts().items():
        assert (FOLDER / f"{kind}.json").read_text("utf-8") == text, (
            "write them anew: python -m gradaccum_conformance.vectors.make"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_fit_their_schema(kind: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((FOLDER / "schema.json").read_text("utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    page = json.loads((FOLDER / f"{kind}.json").read_text("utf-8"))
    assert list(validator.iter_errors(page)) == []
    names = [vector["name"] for vector in page["vectors"]]
    assert len(set(names)) == len(names)
    del page["vectors"][0]["dtype"]
    assert list(validator.iter_errors(page)) != []


def test_number_of_vectors() -> None:
    number = sum(len(read(kind)) for kind in KINDS)
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"with {number} test vectors in JSON" in " ".join(changelog.split())
