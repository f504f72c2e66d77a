"""The pages of the site: where they stand in the repository, what they are called
there, and where their links lead.

A page keeps its place: ``backends/gradaccum_torch/RECIPES.md`` is that on the site too,
so that a link from page to page stays as it is. A new page beside what it describes
appears by itself. Nothing of mkdocs is imported here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Guide": ("README.md", "gradaccum/*.md"),
    "PyTorch": ("backends/gradaccum_torch/*.md",),
    "JAX": ("backends/gradaccum_jax/*.md",),
    "MindSpore": ("backends/gradaccum_mindspore/*.md",),
    "Project": (
        "benchmarks/README.md",
        "benchmarks/SCOREBOARD.md",
        "benchmarks/GPU.md",
        "backends/README.md",
        ".github/CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        "LICENSE",
    ),
}
"""The tabs of the site, and the pages of each as patterns in the repository."""
ORDER = (
    "README",
    "README.zh",
    "CONCEPTS",
    "SPECIFICATION",
    "TROUBLESHOOTING",
    "MIGRATING",
    "RECIPES",
    "INTEGRATIONS",
    "DISTRIBUTED",
    "VERIFY",
    "LOSS_SCALING",
    "VERSIONS",
)
"""Pages by the order in which a newcomer reads them. Others follow by name."""

_FENCE = re.compile(r"^( *)```.*?^\1```", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def pages_of(section: str) -> list[str]:
    """The pages of a tab, as paths in the repository, in the order of reading."""
    found = [
        path
        for pattern in SECTIONS[section]
        for path in sorted(ROOT.glob(pattern), key=_place)
    ]
    return [path.relative_to(ROOT).as_posix() for path in found]


def all_pages() -> list[str]:
    """Every page, as a path in the repository."""
    return [page for section in SECTIONS for page in pages_of(section)]


def weighed(text: str, boost: float) -> str:
    """Return `text` with its weight in the site's search; 0 leaves it out."""
    return (
        "---\nsearch:\n "
        f" {f'boost: {boost}' if boost else 'exclude: true'}\n---\n\n{text}"
    )


def place_on_site(page: str) -> str:
    """Where a page or a picture of the repository is on the site, which has no hidden
    folder.
    """
    return "LICENSE.md" if page == "LICENSE" else page.removeprefix(".github/")


def pictures_of(page: str) -> list[str]:
    """The pictures that a page shows, as paths in the repository."""
    shown = [
        target
        for mark, _, target in _LINK.findall(_FENCE.sub("", _text(page)))
        if mark and _is_local(target)
    ]
    return [_resolved(page, target) for target in shown]


def text_for_site(page: str, repository: str | None = None) -> str:
    """The text of a page with its links as the site needs them.

    A link to another page or to a picture leads to its place on the site, one to
    another file to `repository`, which is the address of the project's files, or
    nowhere if there is none: the text stays.
    """
    text, links = _text(page), (lambda link: _link_for_site(page, link, repository))
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(links, text[end : fence.start()]), fence.group()]
        end = fence.end()
    return _folded("".join([*parts, _LINK.sub(links, text[end:])]))


def _link_for_site(page: str, link: re.Match[str], repository: str | None) -> str:
    mark, shown, target = link.groups()
    if not _is_local(target):
        return link.group()
    path, hash_mark, anchor = target.partition("#")
    file = _resolved(page, path)
    # mkdocs names a link that leads nowhere
    if mark or file in all_pages() or not (ROOT / file).exists():
        relative = posixpath.relpath(
            place_on_site(file), posixpath.dirname(place_on_site(page)) or "."
        )
        return f"{mark}[{shown}]({relative}{hash_mark}{anchor})"
    return f"[{shown}]({repository}/{file})" if repository else shown


def _folded(text: str) -> str:
    """Python-Markdown reads what is inside of HTML only where it is told to."""
    return text.replace("<details>", '<details markdown="1">')


def _is_local(target: str) -> bool:
    return not target.startswith("#") and ":" not in target


def _resolved(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _text(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return f"# License\n\n```text\n{text}```\n" if page == "LICENSE" else text


def _place(path: Path) -> tuple[int, str]:
    return (ORDER.index(path.stem) if path.stem in ORDER else len(ORDER)), path.name
