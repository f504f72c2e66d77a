"""The page on troubleshooting: its messages are those of the sources."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_messages_are_those_of_the_sources() -> None:
    file = ROOT / ".docs/error_list.py"
    spec = importlib.util.spec_from_file_location("error_list", file)
    assert spec is not None
    assert spec.loader is not None
    errors = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(errors)
    expected = [
        entry.expected
        for folder in errors.FOLDERS.values()
        for entry in errors.entries_in(folder)
    ]
    page = (ROOT / "gradaccum/TROUBLESHOOTING.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `expected (.+?)` \|", page, flags=re.MULTILINE)
    assert len(messages) >= 5
    for message in messages:
        assert any(text.startswith(message) for text in expected), message
