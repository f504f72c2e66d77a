"""The files of a project: the top level holds nothing else, and they agree with the
package.
"""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import gradaccum

ROOT = Path(__file__).parents[2]
TOP_LEVEL = """
AGENTS.md CHANGELOG.md CITATION.cff CODE_OF_CONDUCT.md LICENSE README.md SECURITY.md
backends benchmarks conformance_tests gradaccum llms.txt pyproject.toml
"""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_top_level_holds_nothing_else() -> None:
    ignored = [".*", *(line.rstrip("/") for line in text_of(".gitignore").splitlines())]
    names = {
        path.name
        for path in ROOT.iterdir()
        if not any(fnmatch(path.name, pattern) for pattern in ignored)
    }
    assert names <= set(TOP_LEVEL.split())


def test_licence_and_citation_agree_with_the_package() -> None:
    """`.ci/run --full` compares the citation with its schema."""
    assert PROJECT["license"] == "Apache-2.0"
    assert re.search(
        r"Apache License\n +Version 2\.0, January 2004", text_of("LICENSE")
    )
    pairs = re.findall(r"^([\w-]+): (\S.*)$", text_of("CITATION.cff"), re.MULTILINE)
    citation = dict(pairs)
    assert citation["version"] == gradaccum.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["title"] == PROJECT["name"]


def test_reports_are_private() -> None:
    """And no address is made up."""
    for page in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        assert "*Report a vulnerability*" in text_of(page)
        assert "@" not in text_of(page)


def test_workflow_runs_the_script_and_nothing_else() -> None:
    workflow = text_of(".github/workflows/ci.yml")
    assert re.findall(r"run: (.+)", workflow) == [".ci/run", ".ci/run --full"]
