"""Properties of what counts, closes, forgets and joins windows, for any state and any
event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import z3

from gradaccum import DynamicLossScale
from gradaccum.kit import ScaleRule, State, make_options

from .claims import (
    Claim,
    any_state,
    holds,
    is_empty,
    is_finite,
    is_normal,
    number,
    same,
    unchanged,
    within,
)
from .terms import FLOAT32, make, where

RULES = {
    "a scale that never moves": None,
    "a dynamic scale": DynamicLossScale(),
    "with a ceiling and odd factors, grown at once": DynamicLossScale(
        8.0, 1.7, 0.3, 1, min_scale=0.75, max_scale=1e6
    ),
}
NONE, ONE = (z3.BitVecVal(count, 32) for count in (0, 1))
OUTSIDE = ("optimizer_step", "skipped_windows", "loss_scale", "growth_tracker")
"""The fields that outlive a window."""


@holds
def any_weight_keeps_the_state_sane(transitions: Any) -> Iterator[Claim]:
    """NaN, inf and a negative one too: they raise the flag and add nothing. The flag
    never falls, and one micro-batch is counted.
    """
    state, known = any_state()
    weight = z3.FP("added", FLOAT32)
    finite = z3.Bool("finite")
    after = State(
        *transitions.accumulate(tuple(state), make(weight), make(finite), where)
    )
    usable = transitions.usable(tuple(state), make(weight), make(finite)).term
    total = z3.fpAdd(z3.RNE(), state.weight.term, weight)
    adds = z3.And(finite, weight > number(0.0), is_finite(total))
    bad = z3.Not(z3.Or(adds, z3.fpIsZero(weight)))
    yield Claim(
        "the weight",
        known,
        z3.And(is_finite(after.weight.term), after.weight.term >= number(0.0)),
    )
    added = z3.If(adds, total, state.weight.term)
    yield Claim(
        "what is added",
        known,
        z3.And(usable == adds, z3.fpEQ(after.weight.term, added)),
    )
    yield Claim(
        "the flag", known, after.overflow.term == z3.Or(state.overflow.term, bad)
    )
    yield Claim(
        "the counters",
        known,
        z3.And(
            after.micro_step.term == state.micro_step.term + 1,
            unchanged(state, after, *OUTSIDE),
        ),
    )


class Closed(NamedTuple):
    name: str
    rule: ScaleRule
    state: State
    apply: Any
    overflow: Any
    after: State
    known: list[Any]


def closed(transitions: Any) -> Iterator[Closed]:
    """`close` after any decision: it sees two flags of it."""
    for name, loss_scale in RULES.items():
        options = make_options(4, loss_scale=loss_scale)
        state, known = any_state(options.scale_rule)
        apply = z3.Bool("apply")
        overflow = z3.Bool("overflow of the decision")
        after = State(
            *transitions.close(
                tuple(state), make(apply), make(overflow), options, where
            )
        )
        yield Closed(name, options.scale_rule, state, apply, overflow, after, known)


@holds
def close_moves_exactly_one_counter(transitions: Any) -> Iterator[Claim]:
    """By one, and leaves an empty window."""
    for one in closed(transitions):
        applied = one.after.optimizer_step.term - one.state.optimizer_step.term
        skipped = one.after.skipped_windows.term - one.state.skipped_windows.term
        moved = z3.And(
            applied == z3.If(one.apply, ONE, NONE),
            skipped == z3.If(one.apply, NONE, ONE),
        )
        yield Claim(one.name, one.known, z3.And(moved, is_empty(one.after)))


@holds
def scale_keeps_its_limits(transitions: Any) -> Iterator[Claim]:
    """It stays a normal number between floor and ceiling, falls after an overflow and
    grows after enough clean windows, and only then.
    """
    for one in closed(transitions):
        before = one.state.loss_scale.term
        scale = one.after.loss_scale.term
        rule = one.rule
        yield Claim(
            f"{one.name}: limits",
            one.known,
            z3.And(is_normal(scale), within(scale, rule)),
        )
        clean = z3.And(z3.Not(one.overflow), one.state.weight.term > number(0.0))
        tracker = one.state.growth_tracker.term
        due = z3.And(clean, tracker + 1 >= rule.growth_interval)
        claimed = [
            z3.Implies(scale > before, due),
            z3.Implies(scale < before, one.overflow),
        ]
        if rule.backoff_factor < 1:
            ceiling = number(min(rule.max_scale, 3e38 / rule.growth_factor))
            claimed += [
                z3.Implies(
                    z3.And(one.overflow, before > number(rule.min_scale)),
                    scale < before,
                )
            ]
            claimed += [z3.Implies(z3.And(due, before < ceiling), scale > before)]
        yield Claim(f"{one.name}: direction", one.known, z3.And(claimed))
        counted = z3.If(
            z3.Or(one.overflow, due), NONE, z3.If(clean, tracker + 1, tracker)
        )
        yield Claim(
            f"{one.name}: tracker",
            one.known,
            z3.And(
                one.after.growth_tracker.term == counted, counted < rule.growth_interval
            ),
        )


@holds
def discard_forgets_the_window_alone(transitions: Any) -> Iterator[Claim]:
    """Twice is once, and no counter moves."""
    state, known = any_state()
    once = State(*transitions.discard(tuple(state)))
    twice = State(*transitions.discard(tuple(once)))
    claimed = z3.And(
        is_empty(once),
        unchanged(state, once, *OUTSIDE),
        unchanged(once, twice, *State._fields),
    )
    yield Claim("a window", known, claimed)


@holds
def joining_takes_weight_and_flag_alone(transitions: Any) -> Iterator[Claim]:
    state, known = any_state()
    weight = make(z3.FP("weight of all", FLOAT32))
    overflow = make(z3.Bool("overflow of all"))
    after = State(*transitions.joined(tuple(state), weight, overflow))
    expected = z3.And(
        same(after.weight, weight),
        same(after.overflow, overflow),
        unchanged(state, after, "micro_step", *OUTSIDE),
    )
    yield Claim("a worker", known, expected)
