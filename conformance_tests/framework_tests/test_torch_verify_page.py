"""PyTorch's page on `gradaccum.verify`: each of its programs runs, and each kind of cause has one that meets it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradaccum_torch
from conformance_tests.framework_tests.torch_cases import one_thread  # noqa: F401
from gradaccum.verification.causes import KINDS

PAGE = (Path(gradaccum_torch.__file__).parent / "VERIFY.md").read_text(encoding="utf-8")
PROGRAM = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
PROGRAMS = PROGRAM.findall(PAGE)
_, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_of_the_page(number: int) -> None:
    assert "assert " in PROGRAMS[number]
    exec(compile(PROGRAMS[number], f"VERIFY.md, program {number}", "exec"), {"__name__": "__main__"})


def test_each_kind_has_its_program() -> None:
    """Under its name, with the mistake by its kind and the mended loss."""
    assert tuple(section.split("\n", 1)[0] for section in SECTIONS) == KINDS
    for kind, section in zip(KINDS, SECTIONS, strict=True):
        (program,) = PROGRAM.findall(section)
        assert f'"{kind}"' in program
        assert re.search(r"^assert gradaccum\.verify\(.*\.equivalent", program, flags=re.MULTILINE | re.DOTALL)
