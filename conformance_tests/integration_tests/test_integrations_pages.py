"""Every Python block of the pages on the neighbours of torch and JAX runs as a program
of its own, with the packages that it imports, and asserts its result.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformance_tests.framework_tests.recipes import Recipe, run_recipe

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {
    "torch": {"OMP_NUM_THREADS": "1"},
    "jax": {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
}
BESIDE_TORCH = "from conformance_tests.integration_tests import torchvision_ops as _\n"


def programs_of(framework: str) -> Iterator[Recipe]:
    """Each Python block, by its section and its number there; a block of bash says how
    the next one is started.
    """
    page = ROOT / "backends" / f"gradaccum_{framework}" / "INTEGRATIONS.md"
    text = page.read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        command, number = Recipe("", "").command, 0
        for kind, code in re.findall(
            r"^```(\w+)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL
        ):
            if kind == "bash":
                command = code.strip()
            elif kind == "python":
                number += 1
                yield Recipe(f"{section.splitlines()[0]} {number}", code, command)
                command = Recipe("", "").command


def packages_of(code: str) -> set[str]:
    """The packages that a program imports."""
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


PROGRAMS = [
    pytest.param(framework, program, id=f"{framework} {program.title}")
    for framework in ENVIRONMENTS
    for program in programs_of(framework)
]


@pytest.mark.parametrize(("framework", "program"), PROGRAMS)
def test_program(framework: str, program: Recipe, tmp_path: Path) -> None:
    packages = sorted(packages_of(program.code))
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    assert re.search(r"\bassert |assert_\w+\(", program.code)
    code = BESIDE_TORCH * (framework == "torch") + program.code
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**ENVIRONMENTS[framework], "PYTHONPATH": path}
    run_recipe(program._replace(code=code), tmp_path, **environment)
