"""A subject of `gradaccum.verify` without a framework, and losses whose gradients are
written by hand.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaccum.kit import Conditions, ModelState, Subject, places_of

X = (0.5, -1.25, 2.0, 0.75, 1.5, -0.625, 0.25, 3.0)
COUNTS = (3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0, 1.0)
EPSILON = 2.0**-52


@dataclass
class World:
    """What a loss may look at besides its items."""

    w: float
    training: bool
    scale: float
    state: list[float]
    whole: bool
    """Whether the micro-batch is the large batch: only for what must not depend on it.
    """
    number: float
    """A random number of the window."""
    random_layers: bool


Slopes = Callable[[Sequence[float], Sequence[float], World], Mapping[str, float]]
"""(values of the items, their counts, the world) -> the loss's slope in two directions
of each parameter. The losses below are such functions.
"""


class BatchNorm:
    """A layer that a loss may have."""

    training = True


class PlainState(ModelState):
    """The memory of a subject, the mode of its layers and the perturbation."""

    def __init__(self, subject: PlainSubject) -> None:
        self.subject = subject

    def restore(self) -> None:
        self.subject.memory = [0.0]
        self.subject.perturbation = None
        for layer in self.subject.layers.values():
            layer.training = True

    def changed_names(self) -> tuple[str, ...]:
        return ("counter",) if self.subject.memory != [0.0] else ()


class PlainSubject(Subject):
    """A loss in one variable; each parameter has the gradient (slope, 2 x slope)."""

    def __init__(
        self,
        slopes: Slopes,
        readable: Mapping[str, Sequence[Any]] | None = None,
        layers: Sequence[str] = (),
        drawing: Sequence[str] = (),
        weights: Sequence[float] | None = None,
        items: int = len(X),
        names: Sequence[str] = ("w", "v"),
    ) -> None:
        batch = (np.zeros(items),)
        super().__init__(slopes, slopes, batch, weight=weights and weights[:items])
        self.readable = readable or {}
        self.layers = {name: BatchNorm() for name in layers}
        self.drawing = drawing
        self.places = places_of(dict.fromkeys(names, 2))
        self.state = PlainState(self)
        self.memory = [0.0]
        self.perturbation: int | None = None

    is_array = staticmethod(lambda value: True)
    take = staticmethod(lambda array, axis, items: array[list(items)])
    precision = (EPSILON, 5e-324)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        with np.errstate(all="ignore"), super().isolated():
            yield

    def perturb(self, seed: int) -> None:
        self.perturbation = seed

    def gradient(self, part: Sequence[int], conditions: Conditions) -> Any:
        own = random.Random(self.perturbation)
        factors = [1 - EPSILON, 1 + EPSILON]
        if self.perturbation is None:
            factors = [1.0]
        items = self.batch.items
        move = [own.choice(factors) for _ in range(items + 1)]
        layers = self.layers.values()
        world = World(
            1.5 * move[-1],
            all(layer.training for layer in layers) if layers else conditions.training,
            conditions.scale,
            self.memory,
            len(part) == items,
            0.1 * bool(conditions.seed),
            not self.quiet_layers,
        )
        found = self.model(
            [X[item] * move[item] for item in part],
            [COUNTS[item] for item in part],
            world,
        )
        slopes = [found.get(name, 0.0) for name in self.places]
        return np.array([(slope, 2 * slope) for slope in slopes]).reshape(-1)

    def arrays(self, part: Sequence[int]) -> list[tuple[str, Any]]:
        return [
            (path, np.array([rows[item] for item in part]))
            for path, rows in self.readable.items()
        ]

    def named_layers(self) -> Iterable[tuple[str, Any]]:
        return self.layers.items()

    def random_layers(self) -> Sequence[str]:
        return self.drawing


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sound(x, counts, world):
    """The mean of (w x)^2 / 2, and of w x."""
    return {"w": mean([world.w * value**2 for value in x]), "v": mean(x)}


def multiplied(slopes, factor):
    return {name: slope * factor for name, slope in slopes.items()}


def summed(x, counts, world):
    return multiplied(sound(x, counts, world), len(x))


def by_count(x, counts, world):
    """A mean over tokens: item i has counts[i] of them."""
    tokens = math.fsum(counts)
    pairs = list(zip(x, counts, strict=True))
    return {
        "w": math.fsum(world.w * v**2 * n for v, n in pairs) / tokens,
        "v": math.fsum(v * n for v, n in pairs) / tokens,
    }


def repeated(x, counts, world):
    """A sum over items, and a penalty in v that every micro-batch adds."""
    found = summed(x, counts, world)
    return {**found, "v": found["v"] + 0.3}


def part_summed(x, counts, world):
    found = sound(x, counts, world)
    return {**found, "v": found["v"] + math.fsum(value**2 for value in x)}


def coupled(x, counts, world):
    """The slope of a variance over the batch."""
    centre = mean(x)
    return {
        "w": mean([world.w * (value - centre) ** 2 for value in x]),
        "v": mean([value * max(x) for value in x]),
    }


def weakly_coupled(x, counts, world):
    """A mean, and a coupling so small that weights, which are measured in its
    gradients, fit; they are equal to nine digits.
    """
    return {"v": mean(x) + 1e-9 * mean(x) * mean([value**2 for value in x])}


def by_two_counts(x, counts, world):
    """A mean over items and a mean over tokens."""
    items = sound(x, counts, world)
    tokens = by_count([value**3 for value in x], counts, world)
    return {name: items[name] + tokens[name] for name in items}


def by_later_counts(x, counts, world):
    """A mean over tokens, in which the first one of an item does not count."""
    return by_count(x, [count - 1 for count in counts], world)


def hardly_maximal(x, counts, world):
    """Its gradients have norms below 1."""
    return multiplied(maximal(x, counts, world), 1 / 100)


def by_place(x, counts, world):
    """Each item times a number of a table that is read by its place in the
    micro-batch.
    """
    slope = mean([value * (1.0 + 0.3 * place**2) for place, value in enumerate(x)])
    return {"w": slope, "v": slope}


def maximal(x, counts, world):
    """The hardest item of the batch alone: measured by leaving one out, it has all the
    weight.
    """
    return {"w": world.w * max(x) ** 2, "v": max(x)}


def over_positives(x, counts, world):
    """A mean over the items with a count above 3, of which a micro-batch may have
    none.
    """
    chosen = [value for value, count in zip(x, counts, strict=True) if count > 3]
    return {
        "v": mean(chosen) if chosen else math.nan,
        "w": mean(chosen) if chosen else math.inf,
    }


def deviating(x, counts, world):
    """Divided by a distance to the next item that some micro-batches have not."""
    return {
        "w": mean(x) / (max(x) - min(x)) if max(x) > 1.4 else math.nan,
        "v": mean(x),
    }


def in_training(x, counts, world):
    return coupled(x, counts, world) if world.training else sound(x, counts, world)


def remembering(x, counts, world):
    world.state[0] += 1.0
    return multiplied(sound(x, counts, world), world.state[0])


def branching(x, counts, world):
    return {"w" if x[0] > 0.6 else "v": mean(x)}


def ignoring_scale(x, counts, world):
    found = sound(x, counts, world)
    return {**found, "v": found["v"] / world.scale}


def root(x, counts, world):
    """A root of a mean square: its micro-batches' gradients span the large batch's, and
    their shares do not add up to one.
    """
    slope = mean(x) / math.sqrt(mean([value**2 for value in x]))
    return {"w": slope, "v": slope}


def noise(x, world):
    return 1 + world.number + len(x) * 0.01


def drawing(x, counts, world):
    """Random numbers that depend on the micro-batch, in training."""
    is_noisy = world.training and world.random_layers
    exact = sound(x, counts, world)
    return multiplied(exact, noise(x, world)) if is_noisy else exact


def drawing_always(x, counts, world):
    return multiplied(sound(x, counts, world), noise(x, world))


def drawing_from_host(x, counts, world):
    """Each micro-batch begins with the same random state."""
    return multiplied(sound(x, counts, world), 1 + random.random())


def drawing_and_counting(x, counts, world):
    exact = by_count(x, counts, world)
    return multiplied(exact, noise(x, world)) if world.random_layers else exact
