"""The core of `gradaccum.verify` on a subject in pure Python, whose gradients are written by hand: each kind of cause by its definition."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import ROUNDING_LIMIT, Column, Conditions, Layer, Precision, Run, Subject, examine
from gradaccum.verification.causes import KINDS
from gradaccum.verification.partitions import partitions

X = (0.5, -1.25, 2.0, 0.75, 1.5, -0.625, 0.25, 3.0)
COUNTS = (3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0, 1.0)
EPSILON = 2.0**-52


class Vector(tuple[float, ...]):
    """Enough of an array to be a gradient."""

    def __add__(self, other: Any) -> Vector:
        return Vector(a + b for a, b in zip(self, other, strict=True))

    def __sub__(self, other: Any) -> Vector:
        return Vector(a - b for a, b in zip(self, other, strict=True))

    def __mul__(self, factor: Any) -> Vector:
        return Vector(a * factor for a in self)


@dataclass
class World:
    """What a loss may look at besides its items."""

    w: float
    training: bool
    scale: float
    state: list[float]
    whole: bool
    """Whether the micro-batch is the large batch: only for what must not depend on it."""
    number: float
    """A random number of the window."""


Slopes = Callable[[Sequence[float], Sequence[float], World], Mapping[str, float]]
"""(values of the items, their counts, the world) -> the loss's slope in two directions of each parameter."""


@dataclass
class PlainSubject:
    """A loss in one variable; each parameter has the gradient (slope, 2 x slope)."""

    slopes: Slopes
    readable: Sequence[Column] = ()
    layers: Sequence[Layer] = ()
    fixed: Sequence[str] = ()
    unreplayed: Sequence[str] = ()
    culprits: Sequence[str] = ()
    weights: Sequence[float] | None = None
    items: int = len(X)
    names: Sequence[str] = ("w", "v")
    windows: list[Conditions] = field(default_factory=list)

    def window(self, parts: Sequence[Sequence[int]], conditions: Conditions) -> list[Run]:
        self.windows.append(conditions)
        state, runs = [0.0], []
        for part in parts:
            state = state if conditions.carry_state else [0.0]
            before = list(state)
            own = random.Random(conditions.perturbation)
            move = [1.0 if conditions.perturbation is None else 1 + own.choice((-EPSILON, EPSILON)) for _ in range(self.items + 1)]
            world = World(1.5 * move[-1], conditions.training, conditions.scale, state, len(part) == self.items, 0.1 * conditions.seed)
            found = self.slopes([X[item] * move[item] for item in part], [COUNTS[item] for item in part], world)
            gradients = {name: Vector((slope, 2 * slope)) for name, slope in found.items()}
            weight = float(len(part)) if self.weights is None else sum(self.weights[item] for item in part)
            runs.append(Run(0.0, gradients, weight, ("counter",) if state != before else ()))
        return runs

    def dot(self, a: Vector, b: Vector) -> float:
        return sum(p * q for p, q in zip(a, b, strict=True))

    def precision(self, name: str) -> Precision:
        return Precision(EPSILON, 5e-324, 2, self.items)

    def columns(self) -> Sequence[Column]:
        return self.readable

    def mixing_layers(self) -> Sequence[Layer]:
        return self.layers

    def fixed_draws(self) -> Sequence[str]:
        return self.fixed

    def unreplayed_draws(self) -> Sequence[str]:
        return self.unreplayed

    def custom_rules(self) -> Sequence[str]:
        return self.culprits


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sound(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    """The mean of (w x)^2 / 2, and of w x."""
    return {"w": mean([world.w * value**2 for value in x]), "v": mean(x)}


def summed(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    return {name: slope * len(x) for name, slope in sound(x, counts, world).items()}


def by_count(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    """A mean over tokens: item i has counts[i] of them."""
    tokens = math.fsum(counts)
    pairs = list(zip(x, counts, strict=True))
    return {"w": math.fsum(world.w * v**2 * n for v, n in pairs) / tokens, "v": math.fsum(v * n for v, n in pairs) / tokens}


def repeated(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    """A sum over items, and a penalty in v that every micro-batch adds."""
    found = summed(x, counts, world)
    return {**found, "v": found["v"] + 0.3}


def part_summed(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    found = sound(x, counts, world)
    return {**found, "v": found["v"] + math.fsum(value**2 for value in x)}


def coupled(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    """The slope of a variance over the batch."""
    centre = mean(x)
    return {"w": mean([world.w * (value - centre) ** 2 for value in x]), "v": mean([value * max(x) for value in x])}


def maximal(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    """The hardest item of the batch alone: measured by leaving one out, it has all the weight."""
    return {"w": world.w * max(x) ** 2, "v": max(x)}


def two_hardest(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    return {"v": mean(sorted(x)[-2:])}


def over_positives(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    """A mean over the items with a count above 3, of which a micro-batch may have none."""
    chosen = [value for value, count in zip(x, counts, strict=True) if count > 3]
    return {"v": mean(chosen) if chosen else math.nan, "w": mean(chosen) if chosen else math.inf}


def deviating(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    """Divided by a distance to the next item that some micro-batches have not."""
    return {"w": mean(x) / (max(x) - min(x)) if max(x) > 1.4 else math.nan, "v": mean(x)}


def in_training(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    return coupled(x, counts, world) if world.training else sound(x, counts, world)


def remembering(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    world.state[0] += 1.0
    return {name: slope * world.state[0] for name, slope in sound(x, counts, world).items()}


def branching(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    return {"w" if x[0] > 0.6 else "v": mean(x)}


def ignoring_scale(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    found = sound(x, counts, world)
    return {**found, "v": found["v"] / world.scale}


def drawing(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
    """Random numbers that depend on the micro-batch, in training."""
    noise = (world.number + len(x) * 0.01 if world.training else 0.0) + 1
    return {name: slope * noise for name, slope in sound(x, counts, world).items()}


def kinds(report: gradaccum.VerificationReport) -> list[str]:
    return [cause.kind for cause in report.causes]


TOKENS = Column("batch[1]", [[1.0] * int(n) + [0.0] * (5 - int(n)) for n in COUNTS], integers=True, sequence=True)
CLASS = Column("batch[1]", [[float(n > 2)] for n in COUNTS], integers=True, sequence=False)
POSITIVE = Column("batch[1]", [[float(n > 3)] for n in COUNTS], integers=True, sequence=False)
NORM, GHOST = Layer("norm", "BatchNorm", False), Layer("", "Model", True)


@pytest.mark.parametrize(
    ("subject", "reduction", "expected", "where"),
    [
        (PlainSubject(coupled), "mean", ["coupled_loss"], "the loss"),
        (PlainSubject(summed), "mean", ["wrong_reduction"], "the loss"),
        (PlainSubject(sound), "sum", ["wrong_reduction"], "the loss"),
        (PlainSubject(by_count, [TOKENS]), "mean", ["unequal_counts"], "batch[1] != 0"),
        (PlainSubject(by_count, [TOKENS]), "sum", ["unequal_counts"], "batch[1] != 0"),
        (PlainSubject(by_count), "mean", ["unequal_counts"], "the denominator of the loss"),
        (PlainSubject(maximal), "mean", ["coupled_loss"], "the loss"),
        (PlainSubject(two_hardest, names=["v"]), "mean", ["coupled_loss"], "the loss"),
        (PlainSubject(over_positives, [POSITIVE]), "mean", ["unequal_counts"], "batch[1] != 0"),
        (PlainSubject(over_positives), "mean", ["unequal_counts"], "the denominator of the loss"),
        (PlainSubject(deviating), "mean", ["not_finite"], "w"),
        (PlainSubject(repeated), "sum", ["repeated_term"], "v"),
        (PlainSubject(part_summed), "mean", ["summed_term"], "v"),
        (PlainSubject(in_training, layers=[NORM]), "mean", ["batch_statistics"], "norm"),
        (PlainSubject(coupled, layers=[GHOST]), "mean", ["batch_statistics"], "the model"),
        (PlainSubject(coupled, layers=[NORM]), "mean", ["batch_statistics", "coupled_loss"], "norm"),
        (PlainSubject(remembering), "mean", ["state"], "counter"),
        (PlainSubject(branching), "mean", ["missing_gradients"], "w"),
        (PlainSubject(branching, layers=[GHOST]), "mean", ["missing_gradients"], "w"),
        (PlainSubject(ignoring_scale), "mean", ["custom_backward"], "a custom backward"),
        (PlainSubject(sound, culprits=["Rule"]), "mean", ["custom_backward"], "Rule"),
        (PlainSubject(sound, fixed=["line 3"]), "mean", ["shared_randomness"], "line 3"),
        (PlainSubject(drawing, unreplayed=["line 4"]), "mean", ["randomness"], "line 4"),
        (PlainSubject(lambda x, n, world: {"w": math.nan, "v": 1.0}), "mean", ["not_finite"], "w"),
    ],
    ids=lambda value: value.slopes.__name__ if isinstance(value, PlainSubject) else None,
)
def test_cause_by_its_definition(subject: PlainSubject, reduction: str, expected: list[str], where: str) -> None:
    report = examine(subject, 4, reduction)
    assert not report.equivalent
    assert kinds(report) == expected
    assert report.causes[0].where.startswith(where)


@pytest.mark.parametrize(
    ("subject", "reduction"),
    [
        (PlainSubject(sound), "mean"),
        (PlainSubject(summed), "sum"),
        (PlainSubject(summed), "item_mean"),
        (PlainSubject(by_count, weights=COUNTS), "mean"),
        (PlainSubject(sound, layers=[NORM]), "mean"),
        (PlainSubject(sound, unreplayed=["line 4"]), "mean"),
        (PlainSubject(lambda x, n, world: {"w": mean(x)}), "mean"),
        (PlainSubject(lambda x, n, world: {"w": 0.0, "v": 1e-320}), "mean"),
    ],
)
@pytest.mark.parametrize("steps", [2, 3, 4, 8])
def test_sound_losses_pass(subject: PlainSubject, reduction: str, steps: int) -> None:
    report = examine(subject, steps, reduction)
    assert report.equivalent, str(report)
    assert report.moved == ()


def test_hidden_state_is_found() -> None:
    calls = iter(range(10**6))
    report = examine(PlainSubject(lambda x, n, world: {"w": mean(x) + next(calls), "v": 1.0}), 4)
    assert kinds(report) == ["hidden_state"]


@pytest.mark.parametrize(("off", "passes"), [(ROUNDING_LIMIT / 4, True), (ROUNDING_LIMIT * 8, False)])
def test_error_is_counted_in_units(off: float, passes: bool) -> None:
    """A micro-batch that is wrong by few roundings passes; by many it does not."""

    def slopes(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
        return {"w": world.w * (1.0 if world.whole else 1 + off * EPSILON * (1 + math.log2(len(X))))}

    assert examine(PlainSubject(slopes, names=["w"]), 4).equivalent is passes


def test_missing_where_it_is_right_is_a_note() -> None:
    """A part of the items that only some micro-batches have."""

    def slopes(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
        large = [value for value in x if value > 1]
        return {"v": mean(x), **({"w": math.fsum(large) / len(x)} if large else {})}

    report = examine(PlainSubject(slopes), 4)
    assert report.equivalent
    assert len(report.notes) == 1
    assert "w: no gradient in" in report.notes[0]
    assert "w: no gradient in" in str(report)


def test_empty_micro_batch_is_told() -> None:
    """A mean over nothing is no state: the count is named, and which micro-batches have none."""
    (cause,) = examine(PlainSubject(over_positives, [POSITIVE]), 4).causes
    assert "2 of 4 micro-batches (4 micro-batches in order) is not finite" in cause.explanation
    (cause,) = examine(PlainSubject(deviating), 4).causes
    assert "1 of 4 micro-batches" in cause.explanation
    assert "max(count, 1)" in cause.fix


def test_weights_follow_a_label() -> None:
    def slopes(x: Sequence[float], counts: Sequence[float], world: World) -> dict[str, float]:
        return by_count(x, [7.0 if n > 2 else 2.0 for n in counts], world)

    (cause,) = examine(PlainSubject(slopes, [CLASS]), 4).causes
    assert cause.where == "a weight by batch[1]"
    weights = dict(re.findall(r"(\d): (\d\.\d+)", cause.explanation))
    assert float(weights["1"]) / float(weights["0"]) == pytest.approx(3.5, rel=1e-2)


def test_conditions_are_changed_one_at_a_time() -> None:
    """A sound loss is never run in evaluation mode, with its state put back or with other random numbers."""
    subject = PlainSubject(sound)
    examine(subject, 4)
    assert {(c.training, c.carry_state, c.seed, c.replay) for c in subject.windows} == {(True, True, 0, True)}
    assert len(subject.windows) < 60


@pytest.mark.parametrize("items", [2, 3, 4, 5, 7, 8, 9, 24])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_partitions_hold_each_item_once(items: int, steps: int) -> None:
    if steps > items:
        return
    made = partitions(range(items), steps)
    for partition in made:
        assert sorted(item for part in partition.parts for item in part) == list(range(items))
        assert all(partition.parts)
        assert min(map(len, partition.parts)) > 1 or min(map(len, made[0].parts)) == 1 or items == 3, "a single item nobody asked for"
    assert len({partition.parts for partition in made}) == len(made)
    assert partition.parts == (tuple(reversed(range(items))),)
    assert len(made[0].parts) <= steps
    assert [item for part in made[0].parts for item in part] == list(range(items)), "the first is the one that training makes"


def test_each_kind_has_its_section_and_its_test() -> None:
    page = (Path(gradaccum.__file__).parent / "VERIFY.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (\w+)$", page, flags=re.MULTILINE)) == KINDS
    marks = test_cause_by_its_definition.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {kind for case in marks for kind in case[2]} | {"hidden_state"} == set(KINDS)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((1,), ArgumentValueError, "steps: expected an int >= 2"),
        (("four",), ArgumentTypeError, "steps: expected an int >= 2"),
        ((9,), ArgumentValueError, "steps: expected at most the 8 items"),
        ((4, "median"), ArgumentValueError, "reduction: expected one of"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        examine(PlainSubject(sound), *arguments)


@pytest.mark.parametrize("model", [3, "model", [1.0, 2.0], {"w": None}, []])
def test_object_of_no_framework_is_refused(model: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"model_or_params: expected a torch\.nn\.Module"):
        gradaccum.verify(model, lambda model: model, ())


def test_report_counts_what_cannot_be_written() -> None:
    report = examine(PlainSubject(lambda x, n, world: {"w": mean(x) if len(x) > 2 else math.inf, "v": 1.0}), 4)
    assert report.errors["w"] == math.inf
    assert '"w": "inf"' in report.to_json()
    assert "w not finite" in str(report)


def test_plain_subject_is_a_subject() -> None:
    subject: Subject = PlainSubject(sound)
    assert subject.items == 8
