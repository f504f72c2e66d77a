"""The page that specifies gradient accumulation has the code's names; its vectors are
those of the reference, and fit their schema.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gradaccum.kit import State
from gradaccum.options import ON_OVERFLOW, REDUCTIONS
from gradaccum_conformance.vectors import make
from gradaccum_conformance.vectors.run import FOLDER, KINDS, read

ROOT = Path(__file__).parents[2]
SPECIFICATION = (ROOT / "gradaccum/SPECIFICATION.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> list[str]:
    """The names in the first column of the table below a heading, its own included."""
    section = SPECIFICATION.split(f"## {heading}")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)`", section, re.MULTILINE)


def test_tables_have_the_names_of_the_code() -> None:
    assert first_cells("The state") == list(State._fields)
    assert first_cells("Three reductions")[1:] == list(REDUCTIONS)
    assert first_cells("Three overflow policies")[1:] == list(ON_OVERFLOW)


def test_page_is_one_page() -> None:
    assert len(SPECIFICATION.split()) <= 1500


def test_vectors_are_the_reference_s() -> None:
    for kind, text in make.file_texts().items():
        assert (FOLDER / f"{kind}.json").read_text(encoding="utf-8") == text, (
            "write them anew: python -m gradaccum_conformance.vectors.make"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_fit_their_schema(kind: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schema = json.loads((FOLDER / "schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    page = json.loads((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))
    assert list(validator.iter_errors(page)) == []
    del page["vectors"][0]["dtype"]
    assert list(validator.iter_errors(page)) != []


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_unique(kind: str) -> None:
    names = [vector["name"] for vector in read(kind)]
    assert len(set(names)) == len(names)


def test_number_of_vectors() -> None:
    number = sum(len(read(kind)) for kind in KINDS)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"with {number} vectors in JSON" in " ".join(changelog.split())
