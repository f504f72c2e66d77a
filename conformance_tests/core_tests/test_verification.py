"""The core of `gradaccum.verify` on a subject in pure Python, whose gradients are
written by hand: each kind of cause by its definition.
"""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import examine
from gradaccum.verification.causes import CAUSES
from gradaccum.verification.comparison import (
    ROUNDING_LIMIT,
    Comparison,
    Weighting,
    partitions,
)
from gradaccum.verification.examination import joined_names

from .plain_subject import (
    COUNTS,
    EPSILON,
    PlainSubject,
    X,
    branching,
    by_count,
    by_later_counts,
    by_place,
    by_two_counts,
    coupled,
    deviating,
    drawing,
    drawing_always,
    drawing_and_counting,
    drawing_from_host,
    hardly_maximal,
    ignoring_scale,
    in_training,
    maximal,
    mean,
    over_positives,
    part_summed,
    remembering,
    repeated,
    root,
    sound,
    summed,
    weakly_coupled,
)

POWERS = ("a", "b", "c", "d", "e", "f")
TOKENS = {"batch[1]": [[1.0] * int(n) + [0.0] * (5 - int(n)) for n in COUNTS]}
POSITIVE = {"batch[1]": [float(n > 3) for n in COUNTS]}
COMMAND = "(Divide|Make|Multiply|Pass|Seed|Split|Update|Use|Write) "


def wide(slopes: Any) -> Any:
    """Give a loss more parameters than there are micro-batches, each a mean of another
    power of the values.
    """

    def many(x, counts, world):
        return {
            name: slopes([value**power for value in x], counts, world)["w"]
            for power, name in enumerate(POWERS, 1)
        }

    many.__name__ = slopes.__name__
    return many


def counted(slopes: Any, **options: Any) -> PlainSubject:
    return PlainSubject(wide(slopes), names=POWERS, **options)


def kinds(report: gradaccum.VerificationReport) -> list[str]:
    return [cause.kind for cause in report.causes]


def compared(subject: PlainSubject, steps: int, reduction: Any = "mean") -> Comparison:
    weighting = Weighting(reduction, subject.batch.weight)
    return Comparison(subject, partitions(8, steps), weighting)


Caused = tuple[PlainSubject, str, str]
"""A subject, the kinds of its causes, and where the first one is."""
BY_MEANS: list[Caused] = [
    (PlainSubject(coupled), "coupled", "the loss"),
    (PlainSubject(summed), "weights", "the loss"),
    (PlainSubject(sound, weights=COUNTS), "weights", "the loss"),
    (counted(by_count, readable=TOKENS), "weights", "(batch[1] != 0).sum()"),
    (PlainSubject(by_count), "weights", "the denominator of the loss"),
    (
        counted(by_later_counts, readable=TOKENS),
        "weights",
        "(batch[1][:, 1:] != 0).sum()",
    ),
    (counted(by_two_counts, readable=TOKENS), "coupled", "the loss"),
    (counted(by_two_counts, weights=COUNTS), "coupled", "the loss"),
    (PlainSubject(weakly_coupled, names=["v"]), "coupled", "the loss"),
    (PlainSubject(root), "coupled", "the loss"),
    (PlainSubject(by_place), "not_repeatable", "the loss"),
    (PlainSubject(by_place, items=7), "not_repeatable", "the loss"),
    (PlainSubject(maximal), "coupled", "the loss"),
    (PlainSubject(hardly_maximal), "coupled", "the loss"),
    (counted(over_positives, readable=POSITIVE), "weights", "(batch[1] != 0).sum()"),
    (counted(over_positives), "weights", "the denominator of the loss"),
    (PlainSubject(deviating), "not_finite", "w"),
    (PlainSubject(part_summed), "coupled", "the loss"),
    (PlainSubject(in_training, layers=["norm"]), "batch_statistics", "norm"),
    (PlainSubject(in_training), "batch_statistics", "the model"),
    (PlainSubject(coupled, layers=["norm"]), "batch_statistics coupled", "norm"),
    (PlainSubject(remembering), "hidden_state", "counter"),
    (PlainSubject(branching), "coupled", "the loss"),
    (PlainSubject(ignoring_scale), "custom_backward", "v"),
    (PlainSubject(drawing), "not_repeatable", "the loss"),
    (PlainSubject(drawing_always, drawing=["noise"]), "not_repeatable", "the loss"),
    (
        PlainSubject(wide(drawing_and_counting), drawing=["noise"], names=POWERS),
        "weights",
        "the denominator of the loss",
    ),
    (PlainSubject(lambda x, n, world: {"w": math.nan, "v": 1.0}), "not_finite", "w"),
]
BY_SUMS: list[Caused] = [
    (PlainSubject(sound), "weights", "the loss"),
    (counted(by_count, readable=TOKENS), "weights", "(batch[1] != 0).sum()"),
    (PlainSubject(repeated), "coupled", "the loss"),
]


@pytest.mark.parametrize(
    ("case", "reduction"),
    [*product(BY_MEANS, ("mean",)), *product(BY_SUMS, ("sum",))],
    ids=lambda value: value if isinstance(value, str) else value[0].model.__name__,
)
def test_cause_by_its_definition(case: Caused, reduction: str) -> None:
    subject, expected, where = case
    report = examine(subject, 4, reduction)
    assert not report.equivalent
    assert kinds(report) == expected.split()
    assert report.causes[0].where == where
    for cause in report.causes:
        assert re.match(COMMAND, cause.fix)


@pytest.mark.parametrize(
    ("subject", "reduction"),
    [
        (counted(sound), "mean"),
        (PlainSubject(summed), "sum"),
        (PlainSubject(summed), "sum_per_item"),
        (PlainSubject(by_count, weights=COUNTS), "mean"),
        (PlainSubject(sound, layers=["norm"]), "mean"),
        (PlainSubject(drawing, drawing=["dropout"]), "mean"),
        (PlainSubject(drawing_from_host), "mean"),
        (PlainSubject(lambda x, n, world: {"w": mean(x)}), "mean"),
        (PlainSubject(lambda x, n, world: {"w": mean(x) - mean(X)}), "mean"),
        (PlainSubject(lambda x, n, world: {"w": 0.0, "v": 1e-320}), "mean"),
    ],
)
@pytest.mark.parametrize("steps", [3, 8])
def test_sound_losses_pass(subject: PlainSubject, reduction: str, steps: int) -> None:
    report = examine(subject, steps, reduction)
    assert report.equivalent, str(report)
    assert report.moved == ()
    assert "coefficients" not in str(report)
    assert bool(subject.drawing) == any("dropout" in note for note in report.notes)


@pytest.mark.parametrize("has_layers", [False, True])
def test_what_is_not_repeatable_is_found(has_layers: bool) -> None:
    """Without layers that draw numbers of their own: with them, in evaluation mode."""
    calls = iter(range(10**6))
    layers = ["dropout"] if has_layers else []
    report = examine(
        PlainSubject(
            lambda x, n, world: {
                "w": mean(x) + (next(calls) if world.random_layers else 0.0),
                "v": 1.0,
            },
            drawing=layers,
        ),
        4,
    )
    causes = [(cause.kind, cause.where) for cause in report.causes]
    expected = [("not_repeatable", "outside of the model")]
    assert causes == ([] if has_layers else expected)
    assert ("cannot be compared" in str(report)) is not has_layers


def test_memory_of_the_previous_micro_batch_is_found() -> None:
    memory = [0.0]

    def slopes(x, counts, world):
        memory.append(mean(x))
        return {"w": memory[-2], "v": 1.0}

    assert kinds(examine(PlainSubject(slopes), 4)) == ["not_repeatable"]


@pytest.mark.parametrize(
    ("off", "passes"), [(ROUNDING_LIMIT / 4, True), (ROUNDING_LIMIT * 8, False)]
)
def test_error_is_counted_in_units(off: float, passes: bool) -> None:
    """A micro-batch that is wrong by few roundings passes; by many it does not."""

    def slopes(x, counts, world):
        error = 0.0 if world.whole else off * EPSILON * (1 + math.log2(len(X)))
        return {"w": world.w * (1 + error)}

    assert examine(PlainSubject(slopes, names=["w"]), 4).equivalent is passes


def test_missing_where_it_is_right_is_zero() -> None:
    """A part of the items that only some micro-batches have."""

    def slopes(x, counts, world):
        large = [value for value in x if value > 1]
        return {"v": mean(x), **({"w": math.fsum(large) / len(x)} if large else {})}

    report = examine(PlainSubject(slopes), 4)
    assert report.equivalent
    assert report.notes == ()


@pytest.mark.parametrize("steps", [None, 2, 4])
def test_remarks_of_a_framework_are_noted(steps: int | None) -> None:
    """It is asked about the number of steps that the user chose."""

    class Remarking(PlainSubject):
        def unreached_parameters(self) -> list[str]:
            return ["u"]

        def is_divided_by(self, steps: int, reduction: str) -> bool:
            return (steps, reduction) == (4, "mean")

    notes = examine(Remarking(sound), steps).notes
    assert notes[0] == "u: not reached by the loss."
    divided = [note for note in notes if "divided by 4" in note]
    assert len(divided) == len(notes) - 1 == (steps == 4)


def test_two_items_are_enough() -> None:
    assert examine(PlainSubject(sound, items=2), None).equivalent
    assert not examine(PlainSubject(coupled, items=2), None).equivalent
    assert len(examine(PlainSubject(sound), None).partitions[0]) == 4
    report = examine(PlainSubject(sound, items=5), None)
    assert report.partitions[0] == ((0, 1), (2, 3), (4,)), "at most four parts"
    with pytest.raises(
        ArgumentValueError, match="items in the batch: expected an int >= 2"
    ):
        examine(PlainSubject(sound, items=1), None)


def test_coefficients_are_the_shares_of_the_counts() -> None:
    report = examine(counted(by_count), 4)
    shares = [
        (a + b) / sum(COUNTS) for a, b in zip(COUNTS[::2], COUNTS[1::2], strict=True)
    ]
    assert report.coefficients is not None
    assert report.coefficients.best == pytest.approx(shares, rel=1e-9)
    assert report.coefficients.used == (0.25,) * 4
    assert report.coefficients.unexplained < 1e-12
    assert "0.211 (0.25), 0.368 (0.25), 0.263 (0.25), 0.158 (0.25)" in str(report)


def test_small_gradient_counts_in_its_own_units() -> None:
    """What is tiny and coupled is not hidden by what is large and right."""

    def slopes(x, counts, world):
        exact = {
            name: mean([value**power for value in x])
            for power, name in enumerate(POWERS[:-1], 1)
        }
        return {**exact, "f": 1e-9 * mean(x) ** 2}

    report = examine(PlainSubject(slopes, names=POWERS), 4)
    assert kinds(report) == ["coupled"]
    assert report.coefficients is not None
    assert report.coefficients.unexplained > 0.01


def test_words_of_a_cause() -> None:
    assert joined_names(["a", "b", "c", "d", "e"]) == "a, b, c, d, e"
    assert joined_names(list("abcdef")) == "a, b, c, d, e and 1 more"
    for subject, reduction, fix in (
        (PlainSubject(summed), "mean", "Write reduction='sum'. For the mean over"),
        (PlainSubject(sound), "sum", "Write reduction='mean' and no weight=."),
    ):
        assert examine(subject, 4, reduction).causes[0].fix.startswith(fix)


def test_mode_that_does_not_explain_everything_says_so() -> None:
    for slopes, verdict in ((in_training, "is right"), (coupled, "is wrong for")):
        report = examine(PlainSubject(slopes, layers=["norm"]), 4)
        assert f"In evaluation mode the gradient {verdict}" in str(report)


def test_items_of_a_gradient_that_is_not_finite_are_named() -> None:
    (cause,) = examine(PlainSubject(deviating), 4).causes
    assert "With the items 0, 1 as one" in cause.explanation
    whole = PlainSubject(lambda x, n, world: {"w": math.nan})
    assert "items 0, 1, 2, 3, 4 and 3 more" in str(examine(whole, 4))


def test_scales_that_overflow_are_left_out() -> None:
    def overflowing(x, counts, world):
        return {"w": math.inf if world.scale > 1 else 1.0, "v": 1.0}

    assert examine(PlainSubject(overflowing), 4).equivalent


@pytest.mark.parametrize("items", [2, 3, 4, 5, 7, 8, 9, 24])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_partitions_hold_each_item_once(items: int, steps: int) -> None:
    if steps > items:
        return
    made = partitions(items, steps)
    for parts in made:
        assert sorted(item for part in parts for item in part) == list(range(items))
        assert all(parts)
        assert min(map(len, parts)) > 1 or min(map(len, made[0])) == 1 or items == 3, (
            "a single item nobody asked for"
        )


def test_partitions_of_seven_and_nine_items() -> None:
    assert partitions(7, 3) == (
        ((0, 1, 2), (3, 4, 5), (6,)),
        ((0, 3, 6), (1, 4), (2, 5)),
        ((6,), (3, 4, 5), (0, 1, 2)),
        ((0, 1, 2, 3), (4, 5, 6)),
        ((6, 5, 4, 3, 2, 1, 0),),
    )
    assert partitions(9, 3)[3] == ((0, 1, 2, 3, 4, 5), (6, 7, 8)), (
        "one of them as long as two"
    )


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 0.5), ("sum", 1.0)])
@pytest.mark.parametrize(("terms", "additions"), [(1, 1), (2, 1), (16, 4)])
def test_floor_of_a_unit(
    reduction: Any, factor: float, terms: int, additions: int
) -> None:
    """Each of two gradients (3, 6) is rounded once, and its sum as often as it is added
    up in pairs, in float32 at the coarsest.
    """
    subject = PlainSubject(lambda x, n, world: {"w": 3.0, "v": 3.0})
    subject.precision = (2.0**-8, 1e-3)
    subject.batch.terms = terms
    comparison = compared(subject, 2, reduction)
    relative = (2.0**-8 + additions * 2.0**-23) * 2 * factor * math.hypot(3, 6)
    floor = relative + 2 * 1e-3 * math.sqrt(2)
    approximate_floor = pytest.approx(floor, rel=1e-12)
    assert comparison.floors == {"w": approximate_floor, "v": approximate_floor}


def test_floor_is_measured_in_the_partition_of_training() -> None:
    """The means of the four micro-batches are -0.375, 1.375, 0.4375 and 1.625."""
    subject = PlainSubject(lambda x, n, world: {"w": mean(x)}, names=["w"])
    floor = 4 * EPSILON * 3.8125 / 4 * math.hypot(1, 2)
    assert compared(subject, 4).floors == {"w": pytest.approx(floor, abs=0)}


def test_micro_batch_that_is_not_finite_has_the_coefficient_zero() -> None:
    """Only the second and the third micro-batch have an item that counts."""
    coefficients = examine(counted(over_positives), 4).coefficients
    assert coefficients is not None
    assert coefficients.best == pytest.approx((0, 0.5, 0.5, 0))


def test_gradient_of_terms_that_cancel_is_measured_by_the_largest() -> None:
    """A bias that cancels, as of two logits whose difference a loss takes, is rounding
    alone, and exactly 0 in some partitions. A small gradient has its own measure.
    """

    def slopes(x, counts, world):
        rounding = 2e-15 if x[0] > x[-1] else 0.0
        return {"w": 3.0, "v": rounding, "u": 1e-9}

    subject = PlainSubject(slopes, names=["w", "v", "u"])
    assert examine(subject, 4).equivalent
    floors = compared(subject, 4).floors
    assert floors["v"] == pytest.approx(4 * EPSILON * math.hypot(3, 6), abs=0)
    assert floors["u"] == pytest.approx(4e-9 * EPSILON * math.hypot(1, 2), abs=0)


def test_unit_is_what_roundings_of_the_inputs_make_of_a_gradient() -> None:
    """The next numbers beside 1.5 times a rounding are two steps away. Of all
    partitions only that of training has micro-batches that depend on w: two of four.
    """
    subject = PlainSubject(
        lambda x, n, world: {"w": 1 + 1e6 * (world.w - 1.5) * (x[-1] < 0 < x[0])},
        names=["w"],
    )
    assert compared(subject, 4).units == {
        "w": pytest.approx(1e6 * 2.0**-52 * math.hypot(1, 2), rel=1e-3)
    }


def test_each_kind_has_its_section_and_its_test() -> None:
    kinds_of_causes = tuple(dict.fromkeys(kind for kind, *_ in CAUSES.values()))
    page = (Path(gradaccum.__file__).parent / "VERIFY.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (\w+)$", page, flags=re.MULTILINE)) == kinds_of_causes
    named = {kind for case in BY_MEANS + BY_SUMS for kind in case[1].split()}
    assert named == set(kinds_of_causes)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((1,), ArgumentValueError, "steps: expected an int >= 2"),
        (("four",), ArgumentTypeError, "steps: expected an int >= 2"),
        ((9,), ArgumentValueError, "items in the batch: expected an int >= 9"),
        ((4, "median"), ArgumentValueError, "reduction: expected one of"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[Any, ...], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        examine(PlainSubject(sound), *arguments)


def test_object_of_no_framework_is_refused() -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"model_or_params: expected a torch\.nn\.Module"
    ):
        gradaccum.verify([1.0], lambda model: model, ())


def test_report_of_a_gradient_that_is_infinite() -> None:
    report = examine(
        PlainSubject(
            lambda x, n, world: {"w": mean(x) if len(x) > 2 else math.inf, "v": 1.0}
        ),
        4,
    )
    assert report.errors["w"] == math.inf
    assert "The worst is w, by inf units (up to 4 units" in str(report)
    assert repr(report) == str(report), "as the last line of a notebook's cell"
    assert str(report).endswith("More about each cause: gradaccum/VERIFY.md.")
