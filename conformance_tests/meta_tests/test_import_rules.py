"""Who may import whom: the core nothing but the standard library, an adapter the core's public names and its own framework,
the suite no adapter and no framework.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradaccum

ROOT = Path(__file__).parents[2]
ADAPTERS = {
    "gradaccum_torch": {"torch"},
    "gradaccum_jax": {"jax", "optax"},
    "gradaccum_mindspore": {"mindspore"},
}
FRAMEWORKS = set().union(*ADAPTERS.values())


def imports(folder: Path) -> Iterator[tuple[Path, str, set[str]]]:
    """(file, module, names) of every import below `folder`."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield file, alias.name, set()
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: a relative import"
                yield file, node.module or "", {alias.name for alias in node.names}


def test_the_core_imports_the_standard_library_only() -> None:
    for file, module, _ in imports(ROOT / "gradaccum"):
        top = module.partition(".")[0]
        assert top == "gradaccum" or top in sys.stdlib_module_names, f"{file} imports {module}"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_imports_the_core_and_its_own_framework(adapter: str) -> None:
    folder = ROOT / "backends" / adapter
    for file, module, names in imports(folder):
        top = module.partition(".")[0]
        allowed = {adapter, "gradaccum", "numpy"} | ADAPTERS[adapter]
        if file.parent.name == "harness":
            allowed |= {"gradaccum_conformance", "flax"}
        assert top in allowed or top in sys.stdlib_module_names, f"{file} imports {module}"
        if module == "gradaccum":
            assert names <= set(gradaccum.__all__), f"{file} imports private names of the core: {names - set(gradaccum.__all__)}"
        assert not module.startswith("gradaccum."), f"{file} imports {module}; the public names are in gradaccum"


@pytest.mark.parametrize("wing", ["harness", "linearity"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_accumulation_imports_no_wing(adapter: str, wing: str) -> None:
    """The package's own ``__init__`` offers the linearity check; nothing else knows of it."""
    for file, module, _ in imports(ROOT / "backends" / adapter):
        door = wing == "linearity" and file == ROOT / "backends" / adapter / "__init__.py"
        if file.parent.name != wing and not door:
            assert not module.startswith(f"{adapter}.{wing}"), f"{file} imports {module}"


def test_the_suite_imports_no_adapter_and_no_framework() -> None:
    for file, module, _ in imports(ROOT / "conformance_tests" / "gradaccum_conformance"):
        assert module.partition(".")[0] not in FRAMEWORKS | set(ADAPTERS), f"{file} imports {module}"


def test_importing_the_core_imports_nothing_else() -> None:
    heavy = FRAMEWORKS | set(ADAPTERS) | {"numpy", "gradaccum_conformance"}
    code = f"import sys, gradaccum; gradaccum.available_backends(); print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
