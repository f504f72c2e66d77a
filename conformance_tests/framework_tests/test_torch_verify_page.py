"""The page on `gradaccum.verify`: each of its programs runs, and each kind of cause has its section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch

import gradaccum

PAGE = (Path(gradaccum.__file__).parent / "VERIFY.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_program_of_the_page(number: int) -> None:
    assert "assert " in BLOCKS[number]
    exec(compile(BLOCKS[number], f"VERIFY.md, program {number}", "exec"), {"__name__": "__main__"})
