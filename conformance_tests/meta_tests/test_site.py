"""The site's pages come from where they stand, with links that hold, and say what the
sources say. mkdocs itself builds it in `.ci/run`.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import gradaccum
import gradaccum.kit

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """A module of the hidden folder, which no import finds."""
    spec = importlib.util.spec_from_file_location(
        f"site_{name}", ROOT / ".docs" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages, api, errors = load("pages"), load("api"), load("error_list")
found = load("found")


def test_every_page_is_on_the_site() -> None:
    standing = {
        path.relative_to(ROOT).as_posix()
        for folder in (".", ".github", "gradaccum", "backends", "backends/*")
        for path in ROOT.glob(f"{folder}/*.md")
    }
    of_the_repository = {"AGENTS.md", ".github/pull_request_template.md"}
    assert (standing - of_the_repository) | {
        "LICENSE",
        "benchmarks/README.md",
        "benchmarks/SCOREBOARD.md",
        "benchmarks/GPU.md",
    } == set(pages.all_pages())
    assert len(pages.all_pages()) == len(set(pages.all_pages()))


@pytest.mark.parametrize("page", pages.all_pages())
def test_links_lead_to_pages_and_pictures_of_the_site(page: str) -> None:
    """Also where a page has another place there."""
    there = {pages.place_on_site(one) for one in pages.all_pages()} | set(
        pages.pictures_of(page)
    )
    prose = re.sub(
        r"^ *```.*?^ *```",
        "",
        pages.text_for_site(page),
        flags=re.MULTILINE | re.DOTALL,
    )
    folder = Path("/", pages.place_on_site(page)).parent
    targets = re.findall(r"\]\(([^)#:\s]+)[^):\s]*\)", prose)
    assert {
        str((folder / target).resolve()).removeprefix("/") for target in targets
    } <= there


@pytest.mark.parametrize("phrase", found.PHRASES)
def test_what_people_type_is_a_heading(phrase: str) -> None:
    """All of its words stand in one; `found.py` asks the index of the built site."""
    place = found.PHRASES[phrase].rstrip("/")
    (page,) = [
        page
        for page in pages.all_pages()
        if pages.place_on_site(page).removesuffix(".md") == place
    ]
    text = pages.text_for_site(page)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    words = set(re.findall(r"\w+", phrase.lower()))
    assert any(
        words <= set(re.findall(r"\w+", heading.lower())) for heading in headings
    )


def test_link_to_a_source() -> None:
    """It is text where nobody says where the sources are."""
    assert "`transitions.py`" in pages.text_for_site("gradaccum/LOSS_SCALING.md")
    assert "(https://host/p/gradaccum/transitions.py)" in pages.text_for_site(
        "gradaccum/LOSS_SCALING.md", "https://host/p"
    )


def test_code_stays_as_it_is() -> None:
    fences = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
    for page in set(pages.all_pages()) - {"LICENSE"}:
        assert fences.findall(pages.text_for_site(page)) == fences.findall(
            (ROOT / page).read_text(encoding="utf-8")
        )


def test_licence_is_a_page() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert pages.text_for_site("LICENSE") == f"# License\n\n```text\n{text}```\n"
    assert "[Apache-2.0](LICENSE.md)" in pages.text_for_site("README.md")


def test_public_names_are_in_the_api() -> None:
    for package, module in {
        "gradaccum": gradaccum,
        "gradaccum.kit": gradaccum.kit,
    }.items():
        assert api.public_names(package) == list(module.__all__)
        assert all(
            f"::: {package}.{name}\n" in api.api_page(package)
            for name in module.__all__
        )


def test_integrations_are_in_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its public classes; a file of helpers has none."""
    folder = tmp_path / "backends" / "gradaccum_x" / "integrations"
    folder.mkdir(parents=True)
    (folder / "trainer.py").write_text(
        '"""A trainer."""\n\n\nclass Callback: ...\n\n\nclass _Own: ...\n',
        encoding="utf-8",
    )
    (folder / "trainer_checks.py").write_text(
        "def require() -> None: ...\n", encoding="utf-8"
    )
    monkeypatch.setattr(api, "ROOT", tmp_path)
    assert list(api.packages()) == ["gradaccum_x.integrations.trainer"]
    page = api.api_page("gradaccum_x.integrations.trainer")
    assert (
        page == "# `gradaccum_x.integrations.trainer`\n\nA trainer.\n\n:::"
        " gradaccum_x.integrations.trainer.Callback\n"
    )


def test_errors_are_listed_in_their_words() -> None:
    entries = [
        entry
        for folder in errors.FOLDERS.values()
        for entry in errors.entries_in(folder)
    ]
    calls = sum(
        path.read_text(encoding="utf-8").count("explain(")
        for folder in errors.FOLDERS.values()
        for path in (ROOT / folder).rglob("*.py")
    )
    assert len(entries) > 0.9 * calls
    own = next(
        entry for entry in entries if entry.expected == "one that is not wrapped"
    )
    assert own == (
        "ArgumentTypeError",
        "optimizer",
        *own[2:4],
        (
            "Wrap it once: steps multiply, so that one wrap with their product does the"
            " same."
        ),
    )


def test_messages_in_troubleshooting_are_those_of_the_sources() -> None:
    page = (ROOT / "gradaccum/TROUBLESHOOTING.md").read_text(encoding="utf-8")
    expected = [
        entry.expected
        for folder in errors.FOLDERS.values()
        for entry in errors.entries_in(folder)
    ]
    messages = re.findall(r"^\| `expected (.+?)` \|", page, flags=re.MULTILINE)
    assert len(messages) >= 5
    assert not [
        message
        for message in messages
        if not any(text.startswith(message) for text in expected)
    ]
