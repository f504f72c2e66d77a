"""The front page's code runs, the pages quote files word for word, and their links lead
to files that exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = (".", ".github", "gradaccum", "backends", "backends/*", "benchmarks")
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for page in ROOT.glob(f"{folder}/*.md")
)
EXAMPLES = {
    name: code
    for code in re.findall(r"(?<!-->\n)```python\n(.*?)```", README, re.DOTALL)
    for name in ("torch", "jax", "mindspore")
    if code.startswith(f"import {name}")
}


def quoted(page: str) -> list[tuple[str, str]]:
    return re.findall(
        r"<!-- file: (\S+) -->\n```python\n(.*?)```",
        (ROOT / page).read_text(encoding="utf-8"),
        re.DOTALL,
    )


@pytest.mark.parametrize("name", ["torch", "jax", "mindspore"])
def test_readme_example_runs(name: str, tmp_path) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    script = tmp_path / f"example_{name}.py"
    script.write_text(EXAMPLES[name], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def test_quotations_equal_their_files() -> None:
    found = [(page, file, text) for page in PAGES for file, text in quoted(page)]
    assert found
    for page, file, text in found:
        assert text == (ROOT / file).read_text(encoding="utf-8"), (
            f"{page} quotes an older {file}"
        )


def prose_of(path: Path) -> str:
    return re.sub(
        r"^```.*?^```",
        "",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )


def anchors_of(path: Path) -> set[str]:
    """The addresses of a page's headings; "" is its beginning."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), flags=re.MULTILINE)
    return {
        "",
        *(
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in headings
        ),
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """The links to files of this repository, and to headings in its pages. No page is
    read from the network.
    """
    path = ROOT / page
    links = re.findall(r"\]\(([^):#]*)#?([^):]*)\)", prose_of(path))
    missing = [link for link, _ in links if not (path.parent / link).exists()]
    assert not missing
    assert not [
        (link, to)
        for link, to in links
        if to and to not in anchors_of(path.parent / link if link else path)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_code_needs_no_scrolling(page: str) -> None:
    """Lines of at most 88 columns in every block of every page; a block that nobody
    closed would hide the next heading in it.
    """
    blocks = re.findall(
        r"^( *)```\w*\n(.*?)^\1```$",
        (ROOT / page).read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert not [block for _, block in blocks if "```" in block]
    assert not [
        line for _, block in blocks for line in block.splitlines() if len(line) > 88
    ]


def test_pages_are_short() -> None:
    """The words of the front page; and of all pages without their code: 550 of them are
    the scoreboard's.
    """
    words = {
        page: len(
            re.sub(
                r"```.*?```",
                "",
                (ROOT / page).read_text(encoding="utf-8"),
                flags=re.DOTALL,
            ).split()
        )
        for page in PAGES
    }
    assert sum(words.values()) <= 16_680, words
    assert len(README.split()) <= 1_500


def test_front_page_links_every_page() -> None:
    assert {page for page in PAGES if page != "README.md"} <= set(
        re.findall(r"\]\(([^)#:]+)\)", README)
    )


def test_front_page_has_both_commands() -> None:
    assert (
        len(re.findall(r"<!-- command: (demo|test) -->\n```bash\n(?:.+\n)+```", README))
        == 2
    )
