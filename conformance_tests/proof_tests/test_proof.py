"""The transitions are right for every state and every event: Z3 proves it of their
source as it is, and refutes it of each faulty copy.

The scalars are float32 and int32 terms, so nothing is sampled. Python's own numbers,
which the torch backend uses, are float64 that is rounded to float32 at rest; the
lockstep tests compare them with the others.
"""

from __future__ import annotations

import itertools
import operator

import pytest

z3 = pytest.importorskip("z3", reason="needs the extra `proof`")

# They register their properties.
from gradaccum import transitions  # noqa: E402

from . import (  # noqa: E402
    decisions,  # noqa: F401
    windows,  # noqa: F401
)
from .claims import PROPERTIES, Claim, refutation  # noqa: E402
from .faults import FAULTS, faulty  # noqa: E402
from .terms import (  # noqa: E402
    FLOAT32,
    Bool,
    make,
    product_is_known,
    where,
)


@pytest.mark.parametrize("name", PROPERTIES)
def test_property_is_proved(name: str) -> None:
    claims = list(PROPERTIES[name](transitions))
    assert claims
    assert refutation(claims) is None


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_refuted(name: str) -> None:
    assert refutation(PROPERTIES[FAULTS[name].breaks](faulty(FAULTS[name]))) is not None


@pytest.mark.parametrize("name", PROPERTIES)
def test_what_is_assumed_is_possible(name: str) -> None:
    """Anything follows from what cannot be."""
    for claim in PROPERTIES[name](transitions):
        impossible = (
            refutation([Claim(claim.name, claim.assumed, z3.BoolVal(False))]) is None
        )
        assert not impossible, claim.name


def test_scalars_refuse_to_be_looked_at() -> None:
    with pytest.raises(TypeError, match="looked at a value"):
        bool(make(z3.Bool("overflow")))


def test_scalars_compute_as_numbers_do() -> None:
    """With constants each operation gives what NumPy gives in float32."""
    numpy = pytest.importorskip("numpy")
    values = [
        numpy.float32(value)
        for value in (0.0, -1.5, 0.1, 3e38, 1e-45, numpy.inf, numpy.nan)
    ]

    def is_(term: object, value: object) -> bool:
        wanted = (
            z3.FPVal(float(value), FLOAT32)
            if isinstance(value, numpy.float32)
            else z3.BoolVal(bool(value))
        )
        return bool(z3.is_true(z3.simplify(term.term == wanted)))

    comparisons = (operator.lt, operator.le, operator.eq, operator.gt, operator.ge)
    for a, b in itertools.product(values, values):
        one = make(z3.FPVal(float(a), FLOAT32))
        other = make(z3.FPVal(float(b), FLOAT32))
        with numpy.errstate(all="ignore"):
            assert is_(one + other, a + b)
            assert is_(float(b) * one, a * b)
            product = z3.FPVal(float(a * b), FLOAT32)
        for compare in comparisons:
            assert is_(compare(one, other), compare(a, b))
        assert is_(where(one < other, one, other), a if a < b else b)
        known = product_is_known(one.term, other.term, product)
        assert z3.is_true(z3.simplify(known))
    yes, no = (Bool(z3.BoolVal(value)) for value in (True, False))
    assert is_(yes & no, False)
    assert is_(yes | no, True)
    assert is_(no == False, True)  # noqa: E712
