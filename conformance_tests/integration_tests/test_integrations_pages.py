"""Every Python block of the pages on the neighbours of torch and JAX runs as a program
of its own, with the packages that it imports, and asserts its result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conformance_tests.framework_tests.recipes import ALONE, Recipe, run_recipe
from conformance_tests.programs import ROOT

ENVIRONMENTS = {
    "torch": {"OMP_NUM_THREADS": "1"},
    "jax": {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
}
BESIDE_TORCH = "from conformance_tests.integration_tests import torchvision_ops as _\n"
PART = re.compile(r"^## (.*?)$|^```bash\n(.*?)^```|^```python\n(.*?)^```", re.M | re.S)


def programs() -> Iterator[Any]:
    """Each Python block; a block of bash says how the next one is started."""
    for framework in ENVIRONMENTS:
        page = ROOT / "backends" / f"gradaccum_{framework}" / "INTEGRATIONS.md"
        command = ALONE
        title = ""
        for number, part in enumerate(PART.finditer(page.read_text("utf-8"))):
            heading, bash, code = part.groups()
            if heading:
                title = heading
            elif bash:
                command = bash.strip()
            else:
                recipe = Recipe(title, code, command)
                yield pytest.param(
                    framework, recipe, id=f"{framework} {title} {number}"
                )
                command = ALONE


@pytest.mark.parametrize(("framework", "program"), list(programs()))
def test_program(framework: str, program: Recipe, tmp_path: Path) -> None:
    packages = set(re.findall(r"^(?:from|import) (\w+)", program.code, re.M))
    missing = sorted(name for name in packages if find_spec(name) is None)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    assert re.search(r"\bassert |assert_\w+\(", program.code)
    code = BESIDE_TORCH * (framework == "torch") + program.code
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**ENVIRONMENTS[framework], "PYTHONPATH": path}
    run_recipe(program._replace(code=code), tmp_path, **environment)
