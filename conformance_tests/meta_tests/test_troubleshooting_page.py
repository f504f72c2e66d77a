"""The page on troubleshooting: its messages are those of the sources."""

from __future__ import annotations

import re
import runpy

from conformance_tests.programs import ROOT


def test_messages_are_those_of_the_sources() -> None:
    errors = runpy.run_path(str(ROOT / ".docs/error_list.py"))
    expected = [
        entry.expected
        for folder in errors["FOLDERS"].values()
        for entry in errors["entries_in"](folder)
    ]
    page = (ROOT / "gradaccum/TROUBLESHOOTING.md").read_text("utf-8")
    messages = re.findall(r"^\| `expected (.+?)` \|", page, flags=re.MULTILINE)
    assert len(messages) >= 5
    for message in messages:
        assert any(text.startswith(message) for text in expected), message
