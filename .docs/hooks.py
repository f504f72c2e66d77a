"""What mkdocs asks while it builds the site: which pages there are, and in which
order.
"""

from __future__ import annotations

from typing import Any

from api import INTERNALS, api_page, packages
from error_list import error_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pages import (
    ROOT,
    SECTIONS,
    all_pages,
    pages_of,
    pictures_of,
    place_on_site,
    text_for_site,
    weighed,
)

ERRORS = "api/errors.md"
GUIDE, CAUSE, API = 4.0, 1.2, 0.001
"""Weights in search, where a word in a title counts 1000 times, as each name of the API
is: guides stand first. Titles of one word, as those of `verify`'s causes, would stand
before a sentence that has all the words. Internals are not found.
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay out the navigation by the pages that are there."""
    sections: dict[str, list[Any]] = {
        section: [place_on_site(page) for page in pages_of(section)]
        for section in SECTIONS
    }
    sections["API"] = [
        *(
            {package: f"api/{package}.md"}
            for package in packages()
            if package not in INTERNALS
        ),
        {"Every error": ERRORS},
    ]
    sections["Project"] += [{package: f"api/{package}.md"} for package in INTERNALS]
    config.nav = [{section: pages} for section, pages in sections.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Bring in the pages, the pictures that they show, and the pages that are made from
    the sources.
    """
    repository = f"{config.repo_url.rstrip('/')}/blob/HEAD" if config.repo_url else None
    guides = {
        page
        for section in SECTIONS
        if section != "Project"
        for page in pages_of(section)
    }
    weights = {page: CAUSE if page.endswith("/VERIFY.md") else GUIDE for page in guides}
    made = {
        place_on_site(page): weighed(
            text_for_site(page, repository), weights.get(page, 1)
        )
        for page in all_pages()
    }
    made |= {
        f"api/{package}.md": weighed(
            api_page(package), API * (package not in INTERNALS)
        )
        for package in packages()
    }
    made[ERRORS] = weighed(error_page(), API)
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    for picture in sorted(
        {picture for page in all_pages() for picture in pictures_of(page)}
    ):
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files
