"""The core of `gradaccum.verify` on a subject in pure Python, whose gradients are
written by hand: each kind of cause by its definition.
"""

from __future__ import annotations

import io
import math
import re
import sys
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import ROUNDING_LIMIT, Column, Subject, examine
from gradaccum.verification import experiments
from gradaccum.verification import report as reports
from gradaccum.verification.causes import (
    KINDS,
    counts,
    labels,
    listed,
    unequal_weights,
)
from gradaccum.verification.measuring import Coefficients, partitions

from .plain_subject import (
    COUNTS,
    EPSILON,
    PlainSubject,
    X,
    barely_coupled,
    branching,
    by_count,
    by_later_counts,
    by_place,
    by_three_counts,
    by_two_counts,
    coupled,
    coupled_in_order,
    deviating,
    drawing,
    hardly_maximal,
    ignoring_scale,
    in_training,
    maximal,
    mean,
    over_positives,
    part_summed,
    rarely_coupled,
    remembering,
    repeated,
    sound,
    summed,
    two_hardest,
    weakly_coupled,
)


def kinds(report: gradaccum.VerificationReport) -> list[str]:
    return [cause.kind for cause in report.causes]


TOKENS = Column(
    "batch[1]",
    [[1.0] * int(n) + [0.0] * (5 - int(n)) for n in COUNTS],
    integers=True,
    sequence=True,
)


def padded(integers: bool) -> Column:
    return Column(
        "batch[1]",
        [[1.0] * int(n) + [7.0] * (6 - int(n)) for n in COUNTS],
        integers,
        sequence=True,
    )


SQUARES = Column("batch[2]", [[n * n] for n in COUNTS], integers=False, sequence=False)
CLASS = Column(
    "batch[1]", [[float(n > 2)] for n in COUNTS], integers=True, sequence=False
)
POSITIVE = Column(
    "batch[1]", [[float(n > 3)] for n in COUNTS], integers=True, sequence=False
)
COMMAND = "(Add|Choose|Divide|Keep|Make|Mend|Multiply|Read|Seed|Split|Update|Use|Verify|Write) "


Caused = tuple[PlainSubject, str, str]
"""A subject, the kinds of its causes, and where the first one is."""
BY_MEANS: list[Caused] = [
    (PlainSubject(coupled), "coupled_loss", "the loss"),
    (PlainSubject(summed), "wrong_weight", "the loss"),
    (PlainSubject(sound, weights=COUNTS), "wrong_weight", "the loss"),
    (PlainSubject(by_count, [TOKENS]), "wrong_weight", "batch[1] != 0"),
    (PlainSubject(by_later_counts, [TOKENS]), "wrong_weight", "batch[1][:, 1:] != 0"),
    (PlainSubject(by_count, [padded(True)]), "wrong_weight", "batch[1] != 7"),
    (
        PlainSubject(by_count, [padded(False)]),
        "wrong_weight",
        "the denominator of the loss",
    ),
    (PlainSubject(by_count), "wrong_weight", "the denominator of the loss"),
    (
        PlainSubject(by_two_counts, [TOKENS]),
        "coupled_loss",
        "the loss",
    ),
    (
        PlainSubject(by_two_counts, [TOKENS], weights=COUNTS),
        "coupled_loss",
        "the loss",
    ),
    (
        PlainSubject(by_two_counts, [TOKENS], items=4),
        "coupled_loss",
        "the loss",
    ),
    (
        PlainSubject(by_three_counts, [TOKENS, SQUARES]),
        "coupled_loss",
        "the loss",
    ),
    (PlainSubject(by_two_counts), "coupled_loss", "the loss"),
    (PlainSubject(barely_coupled), "coupled_loss", "the loss"),
    (PlainSubject(weakly_coupled, names=["v"]), "coupled_loss", "the loss"),
    (PlainSubject(by_place), "not_repeatable", "the loss"),
    (PlainSubject(by_place, fixed=["line 3"]), "not_repeatable", "line 3"),
    (PlainSubject(maximal), "coupled_loss", "the loss"),
    (PlainSubject(hardly_maximal), "coupled_loss", "the loss"),
    (PlainSubject(two_hardest, names=["v"]), "coupled_loss", "the loss"),
    (PlainSubject(over_positives, [POSITIVE]), "wrong_weight", "batch[1] != 0"),
    (PlainSubject(over_positives), "wrong_weight", "the denominator of the loss"),
    (PlainSubject(deviating), "not_finite", "w"),
    (PlainSubject(part_summed), "wrong_weight", "v"),
    (PlainSubject(rarely_coupled), "coupled_loss", "the loss"),
    (PlainSubject(coupled_in_order), "coupled_loss", "the loss"),
    (PlainSubject(in_training, layers=["norm"]), "batch_statistics", "norm"),
    (PlainSubject(in_training), "batch_statistics", "the model"),
    (PlainSubject(coupled, layers=["norm"]), "batch_statistics coupled_loss", "norm"),
    (PlainSubject(remembering), "hidden_state", "counter"),
    (PlainSubject(branching), "coupled_loss", "the loss"),
    (PlainSubject(ignoring_scale), "custom_backward", "a custom backward"),
    (PlainSubject(sound, culprits=["Rule"]), "custom_backward", "Rule"),
    (PlainSubject(sound, fixed=["line 3"]), "not_repeatable", "line 3"),
    (PlainSubject(drawing, unreplayed=["line 4"]), "not_repeatable", "line 4"),
    (PlainSubject(coupled, unreplayed=["line 4"]), "coupled_loss", "the loss"),
    (PlainSubject(lambda x, n, world: {"w": math.nan, "v": 1.0}), "not_finite", "w"),
]
BY_SUMS: list[Caused] = [
    (PlainSubject(sound), "wrong_weight", "the loss"),
    (PlainSubject(by_count, [TOKENS]), "wrong_weight", "batch[1] != 0"),
    (PlainSubject(repeated), "wrong_weight", "v"),
]


@pytest.mark.parametrize(
    ("case", "reduction"),
    [*product(BY_MEANS, ("mean",)), *product(BY_SUMS, ("sum",))],
    ids=lambda value: value if isinstance(value, str) else value[0].slopes.__name__,
)
def test_cause_by_its_definition(case: Caused, reduction: str) -> None:
    subject, expected, where = case
    report = examine(subject, 4, reduction)
    assert not report.equivalent
    assert kinds(report) == expected.split()
    assert report.causes[0].where.startswith(where)
    for cause in report.causes:
        assert [
            bool(re.match(COMMAND, text))
            for text in (cause.where, cause.explanation, cause.fix)
        ] == [False, False, True]


@pytest.mark.parametrize(
    ("subject", "reduction"),
    [
        (PlainSubject(sound), "mean"),
        (PlainSubject(summed), "sum"),
        (PlainSubject(summed), "sum_per_item"),
        (PlainSubject(by_count, weights=COUNTS), "mean"),
        (PlainSubject(sound, layers=["norm"]), "mean"),
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


def test_what_is_not_repeatable_is_found() -> None:
    calls = iter(range(10**6))
    report = examine(
        PlainSubject(lambda x, n, world: {"w": mean(x) + next(calls), "v": 1.0}), 4
    )
    assert kinds(report) == ["not_repeatable"]


@pytest.mark.parametrize(
    ("off", "passes"), [(ROUNDING_LIMIT / 4, True), (ROUNDING_LIMIT * 8, False)]
)
def test_error_is_counted_in_units(off: float, passes: bool) -> None:
    """A micro-batch that is wrong by few roundings passes; by many it does not."""

    def slopes(x, counts, world):
        return {
            "w": (
                world.w
                * (1.0 if world.whole else 1 + off * EPSILON * (1 + math.log2(len(X))))
            )
        }

    assert examine(PlainSubject(slopes, names=["w"]), 4).equivalent is passes


def test_missing_where_it_is_right_is_zero() -> None:
    """A part of the items that only some micro-batches have."""

    def slopes(x, counts, world):
        large = [value for value in x if value > 1]
        return {"v": mean(x), **({"w": math.fsum(large) / len(x)} if large else {})}

    report = examine(PlainSubject(slopes), 4)
    assert report.equivalent
    assert report.notes == ()


def test_empty_micro_batch_is_told() -> None:
    """A mean over nothing is no state: the count is named, and which micro-batches have
    none.
    """
    (cause,) = examine(PlainSubject(over_positives, [POSITIVE]), 4).causes
    assert (
        "2 of 4 micro-batches (4 micro-batches in order) is not finite"
        in cause.explanation
    )
    (cause,) = examine(PlainSubject(deviating), 4).causes
    assert "1 of 4 micro-batches" in cause.explanation
    assert "max(count, 1)" in cause.fix


def test_weights_follow_a_label() -> None:
    def slopes(x, counts, world):
        return by_count(x, [7.0 if n > 2 else 2.0 for n in counts], world)

    (cause,) = examine(PlainSubject(slopes, [CLASS]), 4).causes
    assert cause.where == "a weight by batch[1]"
    weights = dict(re.findall(r"(\d): (\d\.\d+)", cause.explanation))
    assert float(weights["1"]) / float(weights["0"]) == pytest.approx(3.5, rel=1e-2)
    (measured,) = examine(PlainSubject(slopes), 4).causes
    assert measured.explanation.count(", ") == len(X) + 1, "all are shown"
    assert "..." not in measured.explanation
    assert max(map(len, re.findall(r"\d+\.\d+", measured.explanation))) == 5, (
        "0.468 and 1.64: three digits"
    )


@pytest.mark.parametrize(
    "heavy", [3, 4], ids=["no weight for a label", "a label of one item"]
)
def test_weights_follow_any_label(heavy: int) -> None:
    def slopes(x, counts, world):
        return (
            over_positives(x, counts, world)
            if heavy == 3
            else by_count(x, [7.0 if n > heavy else 2.0 for n in counts], world)
        )

    (cause,) = examine(
        PlainSubject(
            slopes,
            [
                Column(
                    "batch[1]",
                    [[1.0 + (n > heavy)] for n in COUNTS],
                    True,
                    sequence=False,
                )
            ],
        ),
        4,
    ).causes
    assert cause.where == "a weight by batch[1]"


def test_counts_that_are_equal_for_all_items_are_not_tried() -> None:
    """They would be no other weights than one for each item."""
    column = Column("batch[0]", [[1.0, 0.0], [2.0, 0.0]], integers=True, sequence=True)
    found = {count.where: count for count in counts([column])}
    assert "batch[0] != 0" not in found
    total = found["the sum of batch[0]"]
    assert total.values == (1.0, 2.0)
    assert total.code == "lambda *batch: batch[0].sum()"
    assert labels([column]) == []


@pytest.mark.parametrize(
    ("padding", "named"), [(7.0, True), (-100.0, True), (0.0, True)]
)
def test_padding_is_what_rows_end_with(padding: float, named: bool) -> None:
    rows = [[1.0, padding, padding], [1.0, 2.0, padding], [3.0, 2.0, 5.0]]
    column = Column("ids", rows, integers=True, sequence=True)
    found = {count.where: count.values for count in counts([column])}
    assert (f"ids != {padding:g}" in found) is named
    assert found[f"ids != {padding:g}"] == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("weights", "error", "equal", "explains"),
    [
        ((1.0, 2.0), 1.0, 3.0, False),  # not four times better than equal weights
        ((1.0, 2.0), 1.0, 5.0, True),
        ((1.0, 2.0), 9.0, 900.0, False),  # more than four units for each of two
        ((1000.0, 1001.0), 0.01, 5.0, False),  # nearly equal: a thousand times better
        ((1000.0, 1001.0), 0.01, 20.0, True),
        ((1.0, 1.0), 0.01, 20.0, False),
    ],
)
def test_measured_weights_have_to_be_much_better(
    weights: tuple[float, ...], error: float, equal: float, explains: bool
) -> None:
    measured = experiments.Measured(dict(enumerate(weights)), error, equal)
    assert measured.explain() is explains


def test_noise_that_evaluation_switches_off() -> None:
    """Then the other mistake is found in evaluation mode; else nothing more is said."""

    def slopes(x, counts, world, always=False):
        noise = world.number if world.training or always else 0.0
        return {"w": by_count(x, counts, world)["w"] + noise, "v": 1.0}

    def always(x, counts, world):
        return slopes(x, counts, world, always=True)

    for loss, expected in (
        (slopes, ["not_repeatable", "wrong_weight"]),
        (always, ["not_repeatable"]),
    ):
        report = examine(PlainSubject(loss, [TOKENS], unreplayed=["line 4"]), 4)
        assert kinds(report) == expected


def test_two_items_are_enough() -> None:
    assert examine(PlainSubject(sound, items=2), None).equivalent
    with pytest.raises(ArgumentValueError, match="two items at least"):
        examine(PlainSubject(sound, items=1), None)


POWERS = ("a", "b", "c", "d", "e", "f")


def test_coefficients_are_the_shares_of_the_counts() -> None:
    def slopes(x, counts, world):
        return {
            name: by_count([value**power for value in x], counts, world)["w"]
            for power, name in enumerate(POWERS, 1)
        }

    report = examine(PlainSubject(slopes, names=POWERS), 4)
    shares = [
        (a + b) / sum(COUNTS) for a, b in zip(COUNTS[::2], COUNTS[1::2], strict=True)
    ]
    assert report.coefficients is not None
    assert report.coefficients.best == pytest.approx(shares, rel=1e-9)
    assert report.coefficients.used == (0.25,) * 4
    assert report.coefficients.unexplained < 1e-12
    assert "They leave" in str(report)


def test_small_gradient_counts_in_its_own_units() -> None:
    """What is tiny and coupled is not hidden by what is large and right."""

    def slopes(x, counts, world):
        exact = {
            name: mean([value**power for value in x])
            for power, name in enumerate(POWERS[:-1], 1)
        }
        return {**exact, "f": 1e-9 * mean(x) ** 2}

    report = examine(PlainSubject(slopes, names=POWERS), 4)
    assert kinds(report) == ["coupled_loss"]
    assert report.coefficients is not None
    assert report.coefficients.unexplained > 0.01


@pytest.mark.parametrize(("off", "differ"), [(5e-5, False), (5e-4, True)])
def test_coefficients_that_differ_by_rounding_are_the_same(
    off: float, differ: bool
) -> None:
    best = (100.0, 100.0 * (1 + off))
    assert Coefficients(best, (100.0, 100.0), 0.0, is_certain=True).differ is differ


def test_words_of_a_cause() -> None:
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c, d, e"
    assert listed(list("abcdefg")) == "a, b, c, d, e and 2 more"
    sum_per_item = (
        "the mean over the window's items, reduction='sum_per_item' and weight="
    )
    for subject, reduction, fix in (
        (
            PlainSubject(summed),
            "mean",
            f"Write reduction='sum'; or, for {sum_per_item} their number.",
        ),
        (PlainSubject(sound), "sum", "Write reduction='mean' and no weight=."),
    ):
        assert examine(subject, 4, reduction).causes[0].fix == fix
    assert "1.001, 0.999" in unequal_weights([1.001, 0.999], None, []).explanation, (
        "those of 1000 and 1003 tokens are told apart"
    )


def test_conditions_are_changed_one_at_a_time() -> None:
    """A sound loss is never run in evaluation mode, with its state put back or with
    other random numbers.
    """
    subject = PlainSubject(sound)
    examine(subject, 4)
    assert {(c.training, c.carry_state, c.seed, c.replay) for c in subject.windows} == {
        (True, True, 0, True)
    }
    assert {c.scale for c in subject.windows} == {1.0, *experiments.FACTORS}
    assert len(subject.windows) < 60


@pytest.mark.parametrize("items", [2, 3, 4, 5, 7, 8, 9, 24])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_partitions_hold_each_item_once(items: int, steps: int) -> None:
    if steps > items:
        return
    made = partitions(range(items), steps)
    for partition in made:
        assert sorted(item for part in partition.parts for item in part) == list(
            range(items)
        )
        assert all(partition.parts)
        assert (
            min(map(len, partition.parts)) > 1
            or min(map(len, made[0].parts)) == 1
            or items == 3
        ), "a single item nobody asked for"
    assert len({partition.parts for partition in made}) == len(made)
    assert partition.parts == (tuple(reversed(range(items))),)
    assert len(made[0].parts) <= steps
    assert [item for part in made[0].parts for item in part] == list(range(items)), (
        "the first is the one that training makes"
    )


def test_each_kind_has_its_section_and_its_test() -> None:
    page = (Path(gradaccum.__file__).parent / "VERIFY.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (\w+)$", page, flags=re.MULTILINE)) == KINDS
    named = {kind for case in BY_MEANS + BY_SUMS for kind in case[1].split()}
    assert named == set(KINDS)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((1,), ArgumentValueError, "steps: expected an int >= 2"),
        (("four",), ArgumentTypeError, "steps: expected an int >= 2"),
        ((9,), ArgumentValueError, "steps: expected at most the 8 items"),
        ((4, "median"), ArgumentValueError, "reduction: expected one of"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[Any, ...], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        examine(PlainSubject(sound), *arguments)


@pytest.mark.parametrize("model", [3, "model", [1.0, 2.0], {"w": None}, []])
def test_object_of_no_framework_is_refused(model: object) -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"model_or_params: expected a torch\.nn\.Module"
    ):
        gradaccum.verify(model, lambda model: model, ())


def test_report_counts_what_cannot_be_written() -> None:
    report = examine(
        PlainSubject(
            lambda x, n, world: {"w": mean(x) if len(x) > 2 else math.inf, "v": 1.0}
        ),
        4,
    )
    assert report.errors["w"] == math.inf
    assert '"w": "inf"' in report.to_json()
    assert "w not finite" in str(report)


def test_table_of_a_report() -> None:
    found = examine(PlainSubject(repeated), 4, "sum")
    console = Console(width=300, file=io.StringIO())
    console.print(found.table())
    printed = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    for words in (
        "WRONG for this loss: wrong_weight.",
        "wrong_weight (v): The gradient",
        "What to do: Add",
        "moved, in units",
    ):
        assert words in printed
    assert re.search(rf"w .* {found.units['w']:.2g} ", printed)
    assert [column.header for column in found.table().columns] == [
        "parameter",
        "moved, in units",
        "unit",
    ]
    assert str(found).endswith("More about each cause: gradaccum/VERIFY.md.")
    assert repr(found) == str(found), "as the last line of a notebook's cell"
    assert [row.style for row in found.table().rows] == ["", "bold red"]


class Here:
    """Of a framework by its module."""


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (Here(), ["d", "c", "a", "b"]),
        ([Here(), Fraction(1)], ["d", "c", "a", "b"]),
        ([Fraction(1), Here()], ["b", "c", "a", "d"]),
        ([1.0, {"w": "text"}], []),
    ],
)
def test_likeliest_framework_is_asked_first(
    monkeypatch: pytest.MonkeyPatch, model: object, asked: list[str]
) -> None:
    """The model's own or its first leaf's, then those that are imported."""
    tops = {
        "a": "no_such_package",
        "b": "fractions",
        "c": "json",
        "d": Here.__module__.partition(".")[0],
    }
    entries = {reports.BACKENDS: {name: SimpleNamespace(value=name) for name in tops}}
    entries[reports.TYPES] = {
        top: SimpleNamespace(value=name) for name, top in tops.items()
    }
    monkeypatch.setattr(reports, "owners", entries.__getitem__)
    monkeypatch.setattr(reports, "available_backends", lambda: sorted(tops))
    monkeypatch.delitem(sys.modules, tops["b"])
    monkeypatch.delitem(sys.modules, tops["d"], raising=False)
    assert list(reports._likeliest_first(model)) == asked


def test_plain_subject_is_a_subject() -> None:
    subject: Subject = PlainSubject(sound)
    assert subject.items == 8
