"""Scalars that build terms of Z3, so that the transitions run on every state at once.

A transition is arithmetic, comparison, ``&``, ``|`` and one passed-in ``where``.
Python's own operators on these scalars give terms: an int is an int32 and a float an
IEEE 754 float32, every operation rounded to nearest, ties to even, as compiled code has
them. A Python number beside such a scalar becomes a term of the scalar's kind. `Real`
is a float32 as numerical analysis sees it: a real number that each operation multiplies
by 1 + e, where e is any number up to the unit roundoff.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import z3

FLOAT32 = z3.Float32()
INT32 = z3.BitVecSort(32)
ROUNDING = z3.RNE()
UNIT_ROUNDOFF = z3.Q(1, 2**24)


class Term:
    """A term of Z3 under Python's operators."""

    def __init__(self, term: Any) -> None:
        self.term = term

    def _of(self, other: Any) -> Any:
        """`other` as a term of this scalar's kind."""
        if isinstance(other, Term):
            assert other.term.sort() == self.term.sort(), (
                f"{self.term.sort()} beside {other.term.sort()}"
            )
            return other.term
        return literal(other, self.term.sort())

    def __eq__(self, other: object) -> Term:  # type: ignore[override]  # as arrays have it
        mine = self.term
        its = self._of(other)
        return make(z3.fpEQ(mine, its) if z3.is_fp(mine) else mine == its)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a transition looked at a value of the state")


class Bool(Term):
    def __and__(self, other: Any) -> Term:
        return make(z3.And(self.term, self._of(other)))

    def __or__(self, other: Any) -> Term:
        return make(z3.Or(self.term, self._of(other)))

    __rand__ = __and__
    __ror__ = __or__


class Number(Term):
    def __lt__(self, other: Any) -> Term:
        return make(self.term < self._of(other))

    def __le__(self, other: Any) -> Term:
        return make(self.term <= self._of(other))

    def __gt__(self, other: Any) -> Term:
        return make(self.term > self._of(other))

    def __ge__(self, other: Any) -> Term:
        return make(self.term >= self._of(other))


class Int(Number):
    def __add__(self, other: Any) -> Term:
        return make(self.term + self._of(other))

    def __sub__(self, other: Any) -> Term:
        return make(self.term - self._of(other))

    def __mul__(self, other: Any) -> Term:
        return make(self.term * self._of(other))

    __radd__ = __add__
    __rmul__ = __mul__


class Float(Number):
    def __add__(self, other: Any) -> Term:
        return make(z3.fpAdd(ROUNDING, self.term, self._of(other)))

    def __mul__(self, other: Any) -> Term:
        exact = z3.fpMul(ROUNDING, self.term, self._of(other))
        return make(
            product(self.term, other.term) if isinstance(other, Term) else exact
        )

    def __truediv__(self, other: Any) -> Term:
        return make(quotient(self.term, self._of(other)))

    __radd__ = __add__
    __rmul__ = __mul__


class Real(Number):
    def __add__(self, other: Any) -> Term:
        # Not rounded: the transitions that ask only add to 0.
        return make(self.term + self._of(other))

    def __mul__(self, other: Any) -> Term:
        return rounded(self.term * self._of(other))

    def __rmul__(self, other: Any) -> Term:
        return (
            make(self.term * self._of(other))
            if other == 0
            else rounded(self.term * self._of(other))
        )

    def __truediv__(self, other: Any) -> Term:
        return rounded(self.term / self._of(other))

    __radd__ = __add__


class Record:
    """What was built on the way, and is to be told to the solver."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.products: list[tuple[Any, Any, Any]] = []
        self.quotients: list[tuple[Any, Any, Any]] = []
        self.errors: list[Any] = []

    def facts(self) -> list[Any]:
        """Equal operands have equal results, `product_is_known`, and no rounding error
        is above the unit roundoff.
        """
        pairs = [*combinations(self.products, 2), *combinations(self.quotients, 2)]
        equal = [
            z3.Implies(z3.And(a == c, b == d), q == r) for (a, b, q), (c, d, r) in pairs
        ]
        small = [
            z3.And(error >= -UNIT_ROUNDOFF, error <= UNIT_ROUNDOFF)
            for error in self.errors
        ]
        return [*equal, *small, *(product_is_known(*one) for one in self.products)]


RECORD = Record()
"""Of the claim that is being built."""


def product(a: Any, b: Any) -> Any:
    """`a` times `b` in float32, neither of them a constant: any number of which
    `Record.facts` are true.

    What holds for every such number holds for the right one. Bit by bit the solver
    would take minutes.
    """
    result = z3.FreshConst(FLOAT32, "product")
    RECORD.products.append((a, b, result))
    return result


def quotient(a: Any, b: Any) -> Any:
    """`a` divided by `b` in float32, in the same way."""
    result = z3.FreshConst(FLOAT32, "quotient")
    RECORD.quotients.append((a, b, result))
    return result


def product_is_known(a: Any, b: Any, result: Any) -> Any:
    """A finite positive number times one that is at least 1 is not below it, and times
    1 it is itself.
    """
    positive = z3.And(a > z3.FPVal(0.0, FLOAT32), z3.Not(z3.fpIsInf(a)))
    one = z3.FPVal(1.0, FLOAT32)
    return z3.And(
        z3.Implies(z3.And(positive, b >= one), result >= a),
        z3.Implies(b == one, result == a),
    )


def rounded(exact: Any) -> Term:
    error = z3.FreshConst(z3.RealSort(), "e")
    RECORD.errors.append(error)
    return make(exact * (1 + error))


KINDS = {z3.BoolSort(): Bool, INT32: Int, FLOAT32: Float, z3.RealSort(): Real}


def make(term: Any) -> Term:
    """The scalar of a term, by its sort."""
    return next(kind for sort, kind in KINDS.items() if term.sort() == sort)(term)


def literal(value: Any, sort: Any) -> Any:
    """A Python number as a term. A bool stays one, and a float is never taken for an
    int.
    """
    if sort == z3.BoolSort():
        assert isinstance(value, bool), value
        return z3.BoolVal(value)
    if sort == INT32:
        assert type(value) is int, value
        return z3.BitVecVal(value, 32)
    if sort == z3.RealSort():  # No claim about real numbers reads an infinity.
        return (
            z3.FreshConst(sort, "infinity")
            if value == math.inf
            else z3.Q(*float(value).as_integer_ratio())
        )
    return z3.FPVal(value, sort)


def where(condition: Term, a: Any, b: Any) -> Term:
    """The `gradaccum.kit.Where` of these scalars. One branch at least is a scalar, as
    compiled code wants it.
    """
    known = a if isinstance(a, Term) else b
    return make(z3.If(condition.term, known._of(a), known._of(b)))
