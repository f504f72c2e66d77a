"""The pages on moving to gradaccum from another loop: what they say of the loop before
and of the loop after holds.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .migrating import Program, programs_of
from .recipes import Recipe, run_recipe

IN_PROCESS = [
    (framework, program)
    for framework in ("torch", "jax")
    for program in programs_of(framework)
    if not program.of_neighbour
]
FROM_FILES = programs_of("mindspore")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "program"),
    IN_PROCESS,
    ids=lambda value: value.title if isinstance(value, Program) else value,
)
def test_program_of_the_page(framework: str, program: Program) -> None:
    pytest.importorskip(framework)
    if program.title == "optax.microbatch" and not hasattr(
        pytest.importorskip("optax"), "microbatch"
    ):
        pytest.skip("this optax has no optax.microbatch to move from")
    program.run_here()


@pytest.mark.slow
@pytest.mark.parametrize("program", FROM_FILES, ids=lambda program: program.title)
def test_program_from_a_file(program: Program, tmp_path: Path) -> None:
    """MindSpore's compiler reads the source of what it compiles from a file."""
    pytest.importorskip("mindspore")
    run_recipe(Recipe(program.title, program.as_file()), tmp_path, GLOG_v="4")


@pytest.mark.parametrize("framework", ["torch", "jax", "mindspore"])
def test_each_loop_after_is_compared(framework: str) -> None:
    for program in programs_of(framework):
        assert re.search(
            r"^assert distance_to_large_batch\(.*\) < 1e-(6|12)$",
            program.blocks[1],
            flags=re.MULTILINE,
        ), program.title
