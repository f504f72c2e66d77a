"""Properties as claims about terms, each proved if its negation has no solution within
a bound on time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import z3

from gradaccum.kit import ScaleRule, State

from .terms import FLOAT32, INT32, Term, make

SECONDS = 30
"""For one claim; the longest takes some three."""
TINY = 2.0**-126
COUNTERS = ("micro_step", "optimizer_step", "skipped_windows", "growth_tracker")
MOST = 2**31 - 2
"""Counters end there, or the next would be negative."""


class Claim(NamedTuple):
    """For all values of the variables: `assumed` implies `claimed`."""

    name: str
    assumed: list[Any]
    claimed: Any


Property = Callable[[Any], Iterator[Claim]]
"""Of a module of transitions, the claims that make the property up, one per combination
of options.
"""
PROPERTIES: dict[str, Property] = {}


def holds(claims: Property) -> Property:
    """Register a property of the transitions."""
    PROPERTIES[claims.__name__] = claims
    return claims


def refutation(claims: Iterable[Claim]) -> str | None:
    """The first claim that does not hold, with values for which it does not; None if
    all are proved.

    Raises:
        TimeoutError: one was neither proved nor refuted in time.
    """
    asked = set()
    for claim in claims:
        solver = _solver(claim)
        if (question := solver.sexpr()) in asked:
            continue
        asked.add(question)
        answer = solver.check()
        if answer == z3.unknown:
            raise TimeoutError(
                f"{claim.name}: neither proved nor refuted after {SECONDS} s:"
                f" {solver.reason_unknown()}"
            )
        if answer == z3.sat:
            return f"{claim.name}: {solver.model()}"
    return None


def _solver(claim: Claim) -> Any:
    """Bits for a solver of propositions; the solver of polynomials where there are
    reals.
    """
    bits = z3.Then(
        "simplify",
        "propagate-values",
        "fpa2bv",
        "simplify",
        "propagate-values",
        "solve-eqs",
        "bit-blast",
        "sat",
    )
    solver = z3.SolverFor("QF_NRA") if claim.name.startswith("real") else bits.solver()
    solver.set("timeout", 1000 * SECONDS)
    solver.add(*claim.assumed, z3.Not(claim.claimed))
    return solver


def is_finite(term: Any) -> Any:
    return z3.Not(z3.Or(z3.fpIsNaN(term), z3.fpIsInf(term)))


def number(value: float) -> Any:
    return z3.FPVal(value, FLOAT32)


def is_normal(term: Any) -> Any:
    """A normal number above 0."""
    return z3.And(is_finite(term), term >= number(TINY))


def any_state(rule: ScaleRule | None = None) -> tuple[State, list[Any]]:
    """A state of variables, and what is known of it: counters >= 0, a finite weight >=
    0, a scale within the rule's limits.
    """
    ints = {name: z3.Const(name, INT32) for name in COUNTERS}
    weight = z3.FP("weight", FLOAT32)
    scale = z3.FP("loss_scale", FLOAT32)
    known = [z3.And(term >= 0, term <= MOST) for term in ints.values()]
    known += [is_finite(weight), weight >= number(0.0), is_normal(scale)]
    if rule is not None:
        known += [ints["growth_tracker"] < rule.growth_interval, within(scale, rule)]
    fields = {
        **ints,
        "weight": weight,
        "loss_scale": scale,
        "overflow": z3.Bool("overflow"),
    }
    return State(**{name: make(term) for name, term in fields.items()}), known


def within(scale: Any, rule: ScaleRule) -> Any:
    return z3.And(scale >= number(rule.min_scale), scale <= number(rule.max_scale))


def unchanged(before: State, after: State, *names: str) -> Any:
    """These fields, bit for bit."""
    return z3.And([same(getattr(before, name), getattr(after, name)) for name in names])


def same(one: Term, other: Term) -> Any:
    return one.term == other.term


def is_empty(state: State) -> Any:
    return z3.And(
        state.micro_step.term == 0,
        z3.fpEQ(state.weight.term, number(0.0)),
        z3.Not(state.overflow.term),
    )
