"""The record is what the code is: public names, refusals and sizes."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from conformance_tests.record import names, refusals, size
from conformance_tests.record.facts import changes, file_of, read
from gradaccum import available_backends

BACKENDS = [name for name in available_backends() if name != "numpy"]
ADVICE = (
    "Look at each line. If all are meant, write them: python -m"
    " conformance_tests.record --write"
)


def test_public_names_are_those_of_the_record() -> None:
    assert list(changes(read(file_of("names")), names.found(BACKENDS))) == [], ADVICE


def test_refusals_are_those_of_the_record() -> None:
    assert list(changes(read(file_of("refusals")), refusals.found())) == [], ADVICE


def test_no_size_rises() -> None:
    rises = list(size.rises(read(file_of("size")), size.found()))
    assert rises == [], (
        "Write it with fewer tokens, or, if it is meant: python -m"
        " conformance_tests.record --part size --write"
    )


def test_a_lost_fact_is_a_removed_line() -> None:
    recorded = {"torch": ["b", "a | c"], "jax": ["d"]}
    expected = ["- torch | a | c", "+ torch | e"]
    assert list(changes(recorded, {"torch": ["b", "e"], "other": ["f"]})) == expected
    lower, higher = {"size": ["tokens: 10"]}, {"size": ["tokens: 11"]}
    assert list(size.rises(lower, higher)) == ["tokens: 11, was 10"]
    assert not list(size.rises(higher, lower))


@pytest.mark.parametrize(
    "package", [*names.PACKAGES, *(f"gradaccum_{name}" for name in BACKENDS)]
)
def test_public_names_have_docstrings(package: str) -> None:
    module = import_module(package)
    values = {name: getattr(module, name) for name in module.__all__}
    documented = [
        name
        for name, value in values.items()
        if inspect.isclass(value) or inspect.isroutine(value)
    ]
    assert [name for name in documented if not values[name].__doc__] == []
