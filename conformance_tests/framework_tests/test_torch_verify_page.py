"""The page on `gradaccum.verify`: each of its programs runs, and each kind of cause has its section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import gradaccum
from conformance_tests.framework_tests.torch_cases import one_thread  # noqa: F401

PAGE = (Path(gradaccum.__file__).parent / "VERIFY.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_program_of_the_page(number: int) -> None:
    assert "assert " in BLOCKS[number]
    exec(compile(BLOCKS[number], f"VERIFY.md, program {number}", "exec"), {"__name__": "__main__"})
