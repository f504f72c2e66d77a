"""A check of the built site's search index: what people look for is in a guide, which
stands before the API. Internals are left out.

Run it as ``python .docs/found.py SITE``. The weights are those of the site's search: a
word in a title counts 1000 times.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

WORDS = (
    "DataParallel",
    "TPU",
    "drop_last",
    "install",
    "flush",
    "gradient_accumulation_steps",
    "MultiSteps",
)
"""What any guide may answer."""
SYMPTOMS, CONCEPTS = "gradaccum/TROUBLESHOOTING/", "gradaccum/CONCEPTS/"
PHRASES = {
    "batch norm accumulation": CONCEPTS,
    "ddp no_sync slow": SYMPTOMS,
    "different results with gradient accumulation": SYMPTOMS,
    "effective batch size": CONCEPTS,
    "grad norm differs": SYMPTOMS,
    "grad norm differs with gradient accumulation": SYMPTOMS,
    "gradient accumulation last batch": SYMPTOMS,
    "gradient accumulation slow": SYMPTOMS,
    "gradient checkpoint resume accumulation": SYMPTOMS,
    "gradient clipping": SYMPTOMS,
    "gradient clipping accumulation": SYMPTOMS,
    "last batch smaller": SYMPTOMS,
    "learning rate gradient accumulation": CONCEPTS,
    "license": "LICENSE/",
    "loss 4x larger with accumulation": SYMPTOMS,
    "loss nan accumulation": SYMPTOMS,
    "loss not divided by accumulation steps": SYMPTOMS,
    "mixed precision accumulation": "gradaccum/LOSS_SCALING/",
    "notebook": SYMPTOMS,
    "out of memory": SYMPTOMS,
    "padding tokens": SYMPTOMS,
    "resume training": CONCEPTS,
    "scheduler steps too fast": SYMPTOMS,
    "scheduler steps too often": SYMPTOMS,
    "variable length sequences": SYMPTOMS,
    "verify": "gradaccum/VERIFY/",
    "workers hang": SYMPTOMS,
}
"""What people type, and the page that answers it."""
GUIDES = ("gradaccum/", "backends/gradaccum_")
INTERNALS = ("api/gradaccum.kit", "api/gradaccum_conformance")


def best_page(word: str, docs: list[dict[str, Any]], separator: str) -> str | None:
    """Return the address of the section that the search shows first for `word`, or None
    if no section has it.
    """
    wanted = _parts(word, separator) - {""}
    weights = {
        doc["location"]: doc.get("boost", 1) * _matches(wanted, doc, separator)
        for doc in docs
    }
    best = max(weights, key=weights.__getitem__)
    return best if weights[best] else None


def _matches(wanted: set[str], doc: dict[str, Any], separator: str) -> int:
    title, text = (
        _parts(re.sub(r"<[^>]*>", " ", doc[part]), separator)
        for part in ("title", "text")
    )
    return 1000 * (wanted <= title) + (wanted <= text)


def _parts(text: str, separator: str) -> set[str]:
    """The words of `text`, which the search knows in small letters."""
    return {part.lower() for part in re.split(separator, text)}


def main() -> None:
    """Exit with a line for each word that leads elsewhere, and for each internal page
    that is found.
    """
    index = json.loads(
        (Path(sys.argv[1]) / "search/search_index.json").read_text(encoding="utf-8")
    )
    docs, separator = index["docs"], index["config"]["separator"]
    found = {word: best_page(word, docs, separator) for word in WORDS}
    wrong = [
        f"{word}: {page}"
        for word, page in found.items()
        if page is None or not _is_guide(page)
    ]
    wrong += [
        f"{phrase}: {page}"
        for phrase, wanted in PHRASES.items()
        if not (page := best_page(phrase, docs, separator) or "").startswith(wanted)
    ]
    wrong += sorted(
        {doc["location"] for doc in docs if doc["location"].startswith(INTERNALS)}
    )
    sys.exit("\n".join(wrong) or None)


def _is_guide(page: str) -> bool:
    return page.partition("#")[0].startswith(GUIDES) or page.partition("#")[0] == ""


if __name__ == "__main__":
    main()
