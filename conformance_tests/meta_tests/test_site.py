"""The site: its links lead to pages of the site, and the errors that a page explains
are those of the sources. mkdocs itself builds it in `.ci/run --full`.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import gradaccum
import gradaccum.kit

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """A module of the hidden folder, which no import finds."""
    file = ROOT / ".docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages, api, errors = load("pages"), load("api"), load("error_list")


def test_links_lead_to_pages_and_pictures_of_the_site() -> None:
    """Also where a page has another place on the site; code is no link."""
    places = {pages.place_on_site(page) for page in pages.all_pages()}
    for page in pages.all_pages():
        text = pages.text_for_site(page)
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
        folder = Path("/", pages.place_on_site(page)).parent
        for target in re.findall(r"\]\(([^)#:\s]+)[^):\s]*\)", prose):
            place = str((folder / target).resolve()).removeprefix("/")
            assert place in places | set(pages.pictures_of(page)), (page, target)


def test_link_to_a_source() -> None:
    """It is text where nobody says where the sources are."""
    page = "gradaccum/LOSS_SCALING.md"
    linked = pages.text_for_site(page, "https://host/p")
    assert "`transitions.py`" in pages.text_for_site(page)
    assert "(https://host/p/gradaccum/transitions.py)" in linked


def test_public_names_are_in_the_api() -> None:
    for module in (gradaccum, gradaccum.kit):
        assert api.public_names(module.__name__) == list(module.__all__)
        page = api.api_page(module.__name__)
        for name in module.__all__:
            assert f"::: {module.__name__}.{name}\n" in page


def test_messages_in_troubleshooting_are_those_of_the_sources() -> None:
    page = (ROOT / "gradaccum/TROUBLESHOOTING.md").read_text(encoding="utf-8")
    expected = [
        entry.expected
        for folder in errors.FOLDERS.values()
        for entry in errors.entries_in(folder)
    ]
    messages = re.findall(r"^\| `expected (.+?)` \|", page, flags=re.MULTILINE)
    assert len(messages) >= 5
    for message in messages:
        assert any(text.startswith(message) for text in expected), message
