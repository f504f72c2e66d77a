"""MindSpore compiles a graph from the same source as under ``jit``, and takes longest.

Where a test runs under ``jit`` too, its graphs wait for ``--deep``, unless it is marked ``every_mode``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

GRAPHS = {"graph", "cell"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if isinstance(item, pytest.Function) and item.path.name.startswith("test_mindspore")]
    jitted = {item.function for item in own if "jit" in _parameters(item)}
    for item in own:
        if item.function in jitted and _parameters(item) & GRAPHS and item.get_closest_marker("every_mode") is None:
            item.add_marker(pytest.mark.deep)


def _parameters(item: pytest.Function) -> set[str]:
    """Those of the case that are words, its mode among them."""
    callspec = getattr(item, "callspec", None)
    return set() if callspec is None else {value for value in callspec.params.values() if isinstance(value, str)}


@pytest.fixture(autouse=True)
def recorded(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that raises inside `mindspore.value_and_grad` of its own leaves MindSpore recording: the next would be slow, or fail."""
    yield
    if request.path.name.startswith("test_mindspore"):
        from gradaccum_mindspore.recorded import forget_recorded

        forget_recorded()
