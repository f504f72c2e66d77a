"""Properties of `decide`, for any state, any norm, any answer of the finite check and
any limits on the norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import z3

from gradaccum.kit import Options, State, make_options
from gradaccum.options import ON_OVERFLOW, REDUCTIONS

from .claims import Claim, any_state, holds, is_finite, is_normal, number
from .terms import FLOAT32, RECORD, make, product, product_is_known, quotient, where


class Decided(NamedTuple):
    name: str
    options: Options
    """With terms for the limits."""
    state: State
    norm: Any
    finite: Any
    decision: Any
    known: list[Any]


def decisions(transitions: Any) -> Iterator[Decided]:
    """One for each combination of options that `decide` reads."""
    for reduction, on_overflow, clips, skips in itertools.product(
        REDUCTIONS, ON_OVERFLOW, (False, True), (False, True)
    ):
        RECORD.clear()
        options = make_options(4, reduction=reduction, on_overflow=on_overflow)
        clip, skip = (z3.FP(name, FLOAT32) for name in ("clip_norm", "skip_norm"))
        options = options._replace(
            clip_norm=make(clip) if clips else None,
            skip_norm=make(skip) if skips else None,
        )
        state, known = any_state()
        norm = z3.FP("norm", FLOAT32)
        finite = z3.Bool("finite")
        decision = transitions.Decision(
            *transitions.decide(tuple(state), make(norm), make(finite), options, where)
        )
        known = [
            *known,
            *(z3.And(is_finite(limit), limit > number(0.0)) for limit in (clip, skip)),
            *RECORD.facts(),
        ]
        name = f"{reduction}, {on_overflow}{', clip' * clips}{', skip' * skips}"
        yield Decided(name, options, state, norm, finite, decision, known)


def divides(made: Decided) -> Any:
    """Loss scale times denominator, as the documents say it."""
    denominator = (
        number(1.0) if made.options.reduction == "sum" else made.state.weight.term
    )
    return product(made.state.loss_scale.term, denominator)


@holds
def products_are_known(transitions: Any) -> Iterator[Claim]:
    """What the other properties are told of multiplication, bit by bit."""
    a = z3.FP("a", FLOAT32)
    b = z3.FP("b", FLOAT32)
    yield Claim("in float32", [], product_is_known(a, b, z3.fpMul(z3.RNE(), a, b)))


@holds
def nothing_bad_is_applied(transitions: Any) -> Iterator[Claim]:
    """Not a sum that is not finite (unless that is ignored), nor one without weight,
    nor with a divisor that is no normal number.
    """
    for made in decisions(transitions):
        on_overflow = made.options.on_overflow
        skip = made.options.skip_norm
        claimed = [
            made.state.weight.term > number(0.0),
            is_normal(made.decision.divisor.term),
        ]
        claimed += [] if on_overflow == "ignore" else [made.finite]
        claimed += (
            []
            if on_overflow == "drop_micro_batch"
            else [z3.Not(made.state.overflow.term)]
        )
        claimed += [] if skip is None else [made.decision.grad_norm.term <= skip.term]
        yield Claim(made.name, [*made.known, made.decision.apply.term], z3.And(claimed))


@holds
def what_is_good_is_applied(transitions: Any) -> Iterator[Claim]:
    """Which a machine that never applies an update would not do. The norm is divided as
    the sum is, and clipping leaves a small one alone.
    """
    for made in decisions(transitions):
        exact = divides(made)
        decision = made.decision
        true_norm = quotient(made.norm, exact)
        excess = (
            None
            if made.options.clip_norm is None
            else quotient(true_norm, made.options.clip_norm.term)
        )
        good = [
            made.finite,
            is_normal(exact),
            made.state.weight.term > number(0.0),
            z3.Not(made.state.overflow.term),
            *RECORD.facts(),
        ]
        small = (
            z3.BoolVal(True)
            if made.options.skip_norm is None
            else true_norm <= made.options.skip_norm.term
        )
        plain = z3.And(
            decision.divisor.term == exact,
            z3.Not(decision.overflow.term),
            decision.apply.term == small,
        )
        unclipped = z3.BoolVal(True) if excess is None else z3.Not(excess > number(1.0))
        yield Claim(
            made.name,
            [*made.known, *good],
            z3.And(decision.grad_norm.term == true_norm, z3.Implies(unclipped, plain)),
        )


@holds
def overflow_is_told(transitions: Any) -> Iterator[Claim]:
    """Of a sum that is not finite, of a flag that is up and of a divisor outside the
    range. The norm of what is not finite is inf.
    """
    for made in decisions(transitions):
        weight = made.state.weight.term
        exact = divides(made)
        outside = z3.And(weight > number(0.0), z3.Not(is_normal(exact)))
        infinite = z3.Or(z3.Not(made.finite), outside)
        told = z3.Implies(
            z3.Or(infinite, made.state.overflow.term), made.decision.overflow.term
        )
        yield Claim(
            made.name,
            [*made.known, *RECORD.facts()],
            z3.And(
                told, z3.Implies(infinite, z3.fpIsInf(made.decision.grad_norm.term))
            ),
        )


@holds
def clipping_keeps_the_limit(transitions: Any) -> Iterator[Claim]:
    """The true norm of what is applied is at most the limit, but for four roundings;
    for real numbers with rounding errors.

    Left out: norms so small that a result on the way is below the normal numbers, where
    an error is no longer a part of the result.
    """
    names = ("weight", "loss_scale", "norm", "clip_norm")
    for reduction, on_overflow in itertools.product(REDUCTIONS, ON_OVERFLOW):
        RECORD.clear()
        weight, scale, norm, clip = (z3.Real(name) for name in names)
        options = make_options(
            4, reduction=reduction, on_overflow=on_overflow
        )._replace(clip_norm=make(clip))
        state = any_state()[0]._replace(weight=make(weight), loss_scale=make(scale))
        finite = make(z3.BoolVal(True))
        decision = transitions.Decision(
            *transitions.decide(tuple(state), make(norm), finite, options, where)
        )
        known = [
            norm >= 0,
            scale > 0,
            weight > 0,
            clip > 0,
            *RECORD.facts(),
            decision.apply.term,
        ]
        slack = 1 + z3.Q(4, 2**24)
        yield Claim(
            f"real numbers, {reduction}, {on_overflow}",
            known,
            norm <= clip * slack * decision.divisor.term,
        )
