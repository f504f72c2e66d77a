"""The record is what the code is: public names and refusals. Size and style stay within
their limits.
"""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from conformance_tests import measure_tokens
from conformance_tests.record import names, refusals
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


def test_size_and_style_are_within_their_limits() -> None:
    everything = measure_tokens.measure(*measure_tokens.PACKAGES.values())
    assert measure_tokens.over_limit(everything) == []
    assert measure_tokens.tests_over_limit() == []


def test_a_lost_fact_is_a_removed_line() -> None:
    recorded = {"torch": ["b", "a | c"], "jax": ["d"]}
    expected = ["- torch | a | c", "+ torch | e"]
    assert list(changes(recorded, {"torch": ["b", "e"], "other": ["f"]})) == expected


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
