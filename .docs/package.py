"""The front page as the package index shows it: its links lead to the repository, once
the owner has said where that is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?![a-z]+:|#)")


class Metadata(MetadataHookInterface):
    """Adds the readme and the addresses to the package's metadata; `repository` in
    pyproject.toml is their one source.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`, and `urls` if there is a repository."""
        repository = self.config["repository"].rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, repository),
        }
        metadata["urls"] = addresses(repository)


def absolute(text: str, repository: str) -> str:
    """Return the page with its links to files, and to pictures, in `repository`; as it
    is if that is empty.
    """
    if not repository:
        return text
    return _LINK.sub(
        lambda link: (
            f"{link[1]}{repository}/{'raw' if link[1][0] == '!' else 'blob'}/HEAD/"
        ),
        text,
    )


def addresses(repository: str) -> dict[str, str]:
    """Return the project's addresses by their names; none without a repository."""
    places = {"Source": "", "Issues": "/issues", "Changelog": "/blob/HEAD/CHANGELOG.md"}
    return {name: repository + place for name, place in places.items() if repository}
