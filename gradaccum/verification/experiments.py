"""Experiments that change one condition at a time: the loss's scale, the random numbers, the state carried over, the mode.

Each gives a `Finding`: the causes, and the conditions under which the next experiment goes on, from which the cause is taken away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from gradaccum.verification import causes
from gradaccum.verification.measuring import Bench, Gradients, moved
from gradaccum.verification.report import Cause
from gradaccum.verification.subject import Conditions, Layer

TRAINING = Conditions()
FACTORS = (0.25, 8.0)
"""Powers of two: they scale every step of a linear backward pass exactly."""


class Finding(NamedTuple):
    """What an experiment found."""

    causes: tuple[Cause, ...] = ()
    go_on: Conditions | None = TRAINING
    """The conditions without the cause; None: nothing more can be told."""


def finite(bench: Bench) -> Finding:
    """Is the large batch's own gradient finite?"""
    gradients = bench.large(TRAINING).gradients
    bad = [name for name, gradient in gradients.items() if not math.isfinite(bench.norm(gradient))]
    return Finding((causes.not_finite(bad),), None) if bad else Finding()


def repeatable(bench: Bench) -> Finding:
    """Does the same batch give the same gradient twice? By the floor: what is hidden would move the perturbed runs, and so the units."""
    again = bench.subject.window([bench.items], TRAINING)[0].gradients
    names = moved(bench.apart_by(bench.floor(TRAINING), again, bench.large(TRAINING).gradients))
    return Finding((causes.hidden_state(names),), None) if names else Finding()


def linear(bench: Bench) -> Finding:
    """Does the gradient scale with the loss? A scale that overflows tells nothing."""
    large, found = bench.large(TRAINING).gradients, dict.fromkeys(bench.subject.names, 0.0)
    for factor in FACTORS:
        scaled = bench.subject.window([bench.items], replace(TRAINING, scale=factor))[0].gradients
        if all(math.isfinite(bench.norm(gradient)) for gradient in scaled.values()):
            found = {name: max(found[name], error) for name, error in bench.apart(scaled, large, TRAINING).items()}
    names, culprits = moved(found), tuple(bench.subject.custom_rules())
    return Finding((causes.custom_backward(names, culprits),), None) if names or culprits else Finding()


def fresh_numbers(bench: Bench) -> Finding:
    """Do the random numbers follow the random state?"""
    places = bench.subject.fixed_draws()
    return Finding((causes.shared_randomness(places),)) if places else Finding()


def replayed(bench: Bench, conditions: Conditions) -> Finding:
    """Are there random numbers that the items cannot be given again? Then evaluation mode is compared, if they are not drawn there too."""
    places = bench.subject.unreplayed_draws()
    if not places:
        return Finding((), conditions)
    names = _follow_the_seed(bench, conditions)
    if not names:
        return Finding((), conditions)
    evaluation = replace(conditions, training=False)
    return Finding((causes.randomness(places, names),), None if _follow_the_seed(bench, evaluation) else evaluation)


def _follow_the_seed(bench: Bench, conditions: Conditions) -> tuple[str, ...]:
    """The parameters whose gradient is another one with other random numbers."""
    other = bench.subject.window([bench.items], replace(conditions, seed=1))[0].gradients
    return moved(bench.apart(other, bench.large(conditions).gradients, conditions))


def stateless(bench: Bench, conditions: Conditions) -> Finding:
    """Does what one micro-batch leaves behind change the gradient of the next? Sums that are not finite either way do not tell."""
    alone = replace(conditions, carry_state=False)
    changed: dict[str, None] = {}
    found: dict[str, float] = {}
    for partition in bench.partitions:
        runs = bench.subject.window(partition.parts, conditions)
        carried = bench.total(partition.parts, runs, conditions, bench.way)
        put_back = bench.accumulated(partition.parts, alone)
        apart = bench.apart(*_without_same_infinities(bench, carried, put_back), conditions)
        found = {name: max(found.get(name, 0.0), error) for name, error in apart.items()}
        changed |= dict.fromkeys(name for run in runs for name in run.changed)
    names = moved(found)
    return Finding((causes.state(tuple(changed), names),), alone) if names else Finding((), conditions)


def _without_same_infinities(bench: Bench, a: Gradients, b: Gradients) -> tuple[Gradients, Gradients]:
    both = {name for name in a.keys() & b.keys() if not any(math.isfinite(bench.norm(sums[name])) for sums in (a, b))}
    left_a, left_b = ({name: gradient for name, gradient in sums.items() if name not in both} for sums in (a, b))
    return left_a, left_b


def infinite_parts(bench: Bench, conditions: Conditions) -> dict[str, str]:
    """Parameters whose gradient is not finite in some micro-batches; where, in words."""
    found: dict[str, str] = {}
    for partition in bench.partitions:
        runs = bench.subject.window(partition.parts, conditions)
        for name in bench.subject.names:
            bad = sum(name in run.gradients and not math.isfinite(bench.norm(run.gradients[name])) for run in runs)
            if bad:
                found.setdefault(name, f"{bad} of {len(runs)} micro-batches ({partition.words})")
    return found


def separate(bench: Bench, conditions: Conditions, missing: Mapping[str, str]) -> Finding:
    """Is there a layer whose output for an item depends on the other items? Not one that chooses a branch: that is another cause.

    Args:
        bench: the batch.
        conditions: those without the causes found so far.
        missing: parameters without a gradient in some micro-batches.
    """
    layers = [layer for layer in _mixing(bench, conditions) if not any(_holds(layer, name) for name in missing)]
    if not layers:
        return Finding((), conditions)
    if any(layer.in_evaluation for layer in layers) or not conditions.training:
        return Finding((causes.batch_statistics(layers, None),), None)
    evaluation = replace(conditions, training=False)
    settled = not moved(bench.errors(evaluation))
    return Finding((causes.batch_statistics(layers, settled),), evaluation)


def missing_gradients(bench: Bench, conditions: Conditions) -> dict[str, str]:
    """Parameters with a gradient in some micro-batches of a partition and not in others, or only in the large batch; where, in words."""
    found: dict[str, str] = {}
    whole = bench.large(conditions).gradients
    for partition in bench.partitions:
        runs = bench.subject.window(partition.parts, conditions)
        for name in bench.subject.names:
            absent = sum(name not in run.gradients for run in runs)
            if 0 < absent < len(runs) or (absent == len(runs)) == (name in whole):
                found.setdefault(name, f"{absent} of {len(runs)} micro-batches ({partition.words})")
    return found


def _holds(layer: Layer, parameter: str) -> bool:
    return not layer.name or parameter.startswith(f"{layer.name}.")


def _mixing(bench: Bench, conditions: Conditions) -> list[Layer]:
    return [layer for layer in bench.subject.mixing_layers() if conditions.training or layer.in_evaluation]
