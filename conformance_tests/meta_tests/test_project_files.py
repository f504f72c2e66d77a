"""The files that a team looks for before it depends on a project: they are there, agree
with the package, and the top level holds nothing else.
"""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import gradaccum

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {
    "AGENTS.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "backends",
    "benchmarks",
    "conformance_tests",
    "gradaccum",
    "llms.txt",
    "pyproject.toml",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_top_level_holds_nothing_else() -> None:
    lines = text_of(".gitignore").splitlines()
    ignored = [line.rstrip("/") for line in lines]
    names = {
        path.name
        for path in ROOT.iterdir()
        if not path.name.startswith(".")
        and not any(fnmatch(path.name, pattern) for pattern in ignored)
    }
    assert names <= TOP_LEVEL


def test_licence_is_the_one_that_is_declared() -> None:
    licence = text_of("LICENSE")
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    assert re.search(r"Apache License\n +Version 2\.0, January 2004", licence)
    assert "Copyright 2026 the gradaccum authors" in licence
    assert "[yyyy]" not in licence
    assert "licence is Apache-2.0" in text_of("CHANGELOG.md")


def test_citation_agrees_with_the_package() -> None:
    """`.ci/run --full` compares the file with its schema."""
    pairs = re.findall(r"^([\w-]+): (\S.*)$", text_of("CITATION.cff"), re.MULTILINE)
    citation = dict(pairs)
    assert citation["version"] == gradaccum.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["title"] == PROJECT["name"]
    authors = [author["name"] for author in PROJECT["authors"]]
    assert f"name: {authors[0]}" in text_of("CITATION.cff")


@pytest.mark.parametrize("form", ["bug", "wish"])
def test_issue_form_asks_for_the_versions(form: str) -> None:
    questions = text_of(f".github/ISSUE_TEMPLATE/{form}.yml").split("  - type: ")[1:]
    (versions,) = [each for each in questions if "id: versions" in each]
    assert "`gradaccum versions`" in versions
    assert "required: true" in versions


def test_pull_request_asks_for_the_versions() -> None:
    assert "`gradaccum versions`" in text_of(".github/pull_request_template.md")


def test_reports_are_private() -> None:
    """And no address is made up."""
    for page in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        text = text_of(page)
        assert "*Report a vulnerability*" in text
        assert "@" not in text


def test_workflow_runs_the_script_and_nothing_else() -> None:
    workflow = text_of(".github/workflows/ci.yml")
    assert re.findall(r"run: (.+)", workflow) == [".ci/run", ".ci/run --full"]
    assert re.search(r'schedule:\n +- cron: "\d+ \d+ \* \* \d"', workflow), "weekly"


def test_changelog_has_no_version_that_never_was() -> None:
    """Before the first release nothing can be gone."""
    changelog = text_of("CHANGELOG.md")
    versions = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    if versions == [f"{gradaccum.__version__} (not released yet)"]:
        assert not re.findall(r"\bgone\b", changelog, re.IGNORECASE)
