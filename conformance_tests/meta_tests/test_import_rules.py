"""The import rules: the core imports nothing but the standard library, an adapter the
core's public names and its own framework, the suite no adapter and no framework.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import gradaccum
import gradaccum.kit
from conformance_tests.programs import ROOT, run_python

ADAPTERS = {
    "gradaccum_torch": {"torch"},
    "gradaccum_jax": {"jax", "optax"},
    "gradaccum_mindspore": {"mindspore"},
}
DOORS = {"gradaccum": gradaccum, "gradaccum.kit": gradaccum.kit}
FRAMEWORKS = set().union(*ADAPTERS.values())


def imports(folder: Path) -> Iterator[tuple[Path, str, set[str]]]:
    """(file, module, names) of every import below `folder`."""
    for file in sorted(folder.rglob("*.py")):
        yield from imports_of(file)


def imports_of(file: Path) -> Iterator[tuple[Path, str, set[str]]]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield file, alias.name, set()
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield file, node.module or "", {alias.name for alias in node.names}


def test_the_core_imports_the_standard_library_only() -> None:
    for file, module, _ in imports(ROOT / "gradaccum"):
        top = module.partition(".")[0]
        assert top == "gradaccum" or top in sys.stdlib_module_names, (
            f"{file} imports {module}"
        )


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_imports_the_core_and_its_own_framework(adapter: str) -> None:
    folder = ROOT / "backends" / adapter
    for file, module, names in imports(folder):
        top = module.partition(".")[0]
        allowed = {adapter, "gradaccum", "numpy"} | ADAPTERS[adapter]
        if file.parent.name == "integrations":
            allowed.add(file.stem.partition("_")[0])
        else:
            assert not module.startswith(f"{adapter}.integrations"), file
        assert top in allowed or top in sys.stdlib_module_names, (
            f"{file} imports {module}"
        )
        if module in DOORS:
            private = names - set(DOORS[module].__all__) - {"kit"}
            assert not private, f"{file} imports private names of the core: {private}"
        assert module in DOORS or not module.startswith("gradaccum."), (
            f"{file} imports {module}; the doors are {list(DOORS)}"
        )


def test_the_suite_imports_no_adapter_and_no_framework() -> None:
    for file, module, _ in imports(
        ROOT / "conformance_tests" / "gradaccum_conformance"
    ):
        assert module.partition(".")[0] not in FRAMEWORKS | set(ADAPTERS), (
            f"{file} imports {module}"
        )


def test_importing_the_core_imports_nothing_else() -> None:
    suite = {"numpy", "gradaccum_conformance", "gradaccum_harnesses"}
    heavy = FRAMEWORKS | set(ADAPTERS) | suite
    code = (
        f"import sys, gradaccum; gradaccum.available_backends(); print(sorted({heavy!r}"
        " & set(sys.modules)))"
    )
    done = run_python("-c", code, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "package", ["gradaccum", *(f"backends/{adapter}" for adapter in ADAPTERS)]
)
def test_no_circle_among_modules(package: str) -> None:
    """Imports for the type checker included: what needs each other is one thing."""
    folder = ROOT / package
    files = {module_of(file, folder): file for file in folder.rglob("*.py")}
    needs = {name: set(imported_by(file, files)) for name, file in files.items()}
    while free := {name for name, needed in needs.items() if not needed}:
        needs = {
            name: needed - free for name, needed in needs.items() if name not in free
        }
    assert not needs, f"these import each other: {needs}"


def module_of(file: Path, folder: Path) -> str:
    parts = file.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(file: Path, modules: Collection[str]) -> Iterator[str]:
    """Those of `modules` that `file` imports, by ``from package import module`` too."""
    for _, module, names in imports_of(file):
        inner = {f"{module}.{name}" for name in names} & set(modules)
        yield from inner or {module} & set(modules)
