"""The cases that wait for ``--deep``, as the frameworks compile for most of the time.

MindSpore compiles a graph from the same source as under ``jit``, and takes longest.
Where a test runs under ``jit`` too, its graphs wait.

The oldest JAX that is supported runs one case of most tests of this folder: the newest
one runs all of them.

Tests that are marked ``every_mode`` run all of their cases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

# MindSpore reads it when it is imported, and warns of nothing.
os.environ.setdefault("GLOG_v", "4")
GRAPHS = {"graph", "cell"}
NEWEST_JAX = (0, 10)
_TOPICS = ("auto_size", "coupled")
NEWEST_ALONE = {
    f"test_jax_{topic}.py"
    for topic in (*_TOPICS, "large_batch_program", "verification")
}
"""They call what JAX has had unchanged for long."""
PACKAGES = {"torch": "torch", "jax": "optax", "mindspore": "mindspore"}


class OfFramework(pytest.Module):
    """A file of tests that is skipped where its framework is not installed."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.importorskip(PACKAGES[self.path.name.split("_")[1]])
        yield from super().collect()


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return (
        OfFramework.from_parent(parent, path=module_path)
        if module_path.name.split("_")[1] in PACKAGES
        else None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    briefly = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and item.get_closest_marker("every_mode") is None
    ]
    waiting = _graphs(
        [item for item in briefly if item.path.name.startswith("test_mindspore")]
    )
    if _jax_version() < NEWEST_JAX:
        waiting += _further_cases(
            [item for item in briefly if item.path.name.startswith("test_jax")]
        )
    for item in waiting:
        item.add_marker(pytest.mark.deep)


def _graphs(own: list[pytest.Function]) -> list[pytest.Function]:
    """The cases in graph mode of tests that run under ``jit`` too."""
    jitted = {item.function for item in own if "jit" in _parameters(item)}
    return [
        item for item in own if item.function in jitted and _parameters(item) & GRAPHS
    ]


def _further_cases(own: list[pytest.Function]) -> list[pytest.Function]:
    """All but the first case of each test that runs without ``--deep``; of some files,
    all.
    """
    always = [item for item in own if item.get_closest_marker("deep") is None]
    first = {item.function: item for item in reversed(always)}
    return [
        item
        for item in always
        if item is not first[item.function] or item.path.name in NEWEST_ALONE
    ]


def _jax_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("jax").split(".")[:2])
    except PackageNotFoundError:
        return NEWEST_JAX


def _parameters(item: pytest.Function) -> set[str]:
    """Those of the case that are words, its mode among them."""
    callspec = getattr(item, "callspec", None)
    return (
        set()
        if callspec is None
        else {value for value in callspec.params.values() if isinstance(value, str)}
    )


@pytest.fixture(autouse=True)
def recorded(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that raises inside `mindspore.value_and_grad` of its own leaves MindSpore
    recording: the next would be slow, or fail.
    """
    yield
    if request.path.name.startswith("test_mindspore"):
        from gradaccum_mindspore.mindspore_private import forget_recorded

        forget_recorded()
