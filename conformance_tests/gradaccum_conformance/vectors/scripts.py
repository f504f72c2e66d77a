"""Scripts of the vectors: options by name, and events to play under them. What must
come out is recorded from the reference.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gradaccum_conformance.harness import Dtype

Event = dict[str, Any]
NAN = math.nan
INF = math.inf
LARGE = 2.0**127
"""Twice of it is beyond float32."""
FLUSH: Event = {"kind": "flush"}
DISCARD: Event = {"kind": "discard"}


class Script(NamedTuple):
    """Events from the start, in one vector."""

    topic: str
    name: str
    options: str
    events: tuple[Event, ...]
    dtype: Dtype = "float32"
    refused: tuple[int, ...] = ()
    """The places of the events that must be refused."""


def micro_batch(
    first: float | None,
    second: float | None,
    weight: float | None = 1.0,
    loss: float = NAN,
) -> Event:
    """The event of a micro-batch with this gradient."""
    return {
        "kind": "micro_batch",
        "gradient": [None if g is None else float(g) for g in (first, second)],
        "weight": weight,
        "loss": loss,
    }


def resume(options: str) -> Event:
    return {"kind": "resume", "options": options}


def complete_options(steps: Any, **options: Any) -> dict[str, Any]:
    """All options of a vector; those that are not given are off."""
    off = {
        "reduction": "mean",
        "on_overflow": "skip_window",
        "clip_norm": None,
        "skip_norm": None,
        "loss_scale": None,
    }
    return {"steps": steps, **off, **options}


def dynamic_scale(**rule: Any) -> dict[str, Any]:
    usual = {
        "init_scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "min_scale": 1.0,
        "max_scale": 16.0,
    }
    return {**usual, **rule}


DROP = {"on_overflow": "drop_micro_batch"}
IGNORE = {"on_overflow": "ignore"}
UNTIL_FIVE = {"until_weight": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "mean of 1": complete_options(1),
    "mean of 2": complete_options(2),
    "mean of 4": complete_options(4),
    "mean, closed by the caller": complete_options(None),
    "mean until weight 5": complete_options(UNTIL_FIVE),
    "mean by a schedule": complete_options([[0, 1], [2, 3]]),
    "sum of 2": complete_options(2, reduction="sum"),
    "sum per item of 2": complete_options(2, reduction="sum_per_item"),
    "clip": complete_options(2, clip_norm=2.5),
    "clip a sum": complete_options(2, clip_norm=2.5, reduction="sum"),
    "clip to almost nothing": complete_options(2, clip_norm=2.0**-100),
    "clip, static scale": complete_options(2, clip_norm=2.5, loss_scale=8.0),
    "skip by norm": complete_options(2, skip_norm=10.0),
    "skip by norm, clip": complete_options(2, skip_norm=10.0, clip_norm=2.5),
    "skip by norm, dynamic scale": complete_options(
        2, skip_norm=10.0, loss_scale=dynamic_scale()
    ),
    "drop": complete_options(3, **DROP),
    "drop, sum per item": complete_options(3, reduction="sum_per_item", **DROP),
    "drop until weight 5": complete_options(UNTIL_FIVE, **DROP),
    "drop, dynamic scale": complete_options(2, loss_scale=dynamic_scale(), **DROP),
    "ignore": complete_options(2, **IGNORE),
    "ignore, clip": complete_options(2, clip_norm=2.5, **IGNORE),
    "ignore, skip by norm": complete_options(2, skip_norm=10.0, **IGNORE),
    "static scale": complete_options(2, loss_scale=8.0),
    "static scale 64": complete_options(2, loss_scale=64.0),
    "largest static scale": complete_options(2, loss_scale=LARGE),
    "smallest static scale": complete_options(2, loss_scale=2.0**-126),
    "dynamic scale": complete_options(2, loss_scale=dynamic_scale()),
    "dynamic scale from 16": complete_options(
        2, loss_scale=dynamic_scale(init_scale=16.0)
    ),
    "scale without a ceiling": complete_options(
        1, loss_scale=dynamic_scale(init_scale=LARGE, growth_interval=1, max_scale=INF)
    ),
    "walk: skip the window": complete_options(
        2, loss_scale=dynamic_scale(), clip_norm=2.5
    ),
    "walk: drop the micro-batch": complete_options(
        2, loss_scale=dynamic_scale(), reduction="sum_per_item", **DROP
    ),
    "walk: skip by norm": complete_options(
        [[0, 1], [1, 3]], skip_norm=4.0, reduction="sum"
    ),
    "walk: ignore": complete_options(2, loss_scale=8.0, clip_norm=2.5, **IGNORE),
    "walk: until a weight": complete_options(UNTIL_FIVE),
}

GOOD = micro_batch(0.75, -1.0)
WALK_EVENTS: dict[str, Event] = {
    "good": GOOD,
    "heavy": micro_batch(6.0, 8.0, 3.0),
    "empty": micro_batch(0.75, -1.0, 0.0),
    "bad": micro_batch(0.75, NAN),
    "flush": FLUSH,
    "discard": DISCARD,
}

EQUAL = "equal micro-batches"
WEIGHTS = "weights"
SHORT = "short last window"
REDUCTIONS = "reductions"
DISCARDS = "discard"
SCHEDULES = "window sizes"
CLIP = "clip_norm"
SKIP = "skip_norm"
SCALE = "loss scale"
RANGE = "range of numbers"
SKIP_WINDOW = "skip_window"
DROPS = "drop_micro_batch"
IGNORES = "ignore"
DTYPES = "float64 and float16"
FOUR = (micro_batch(1, 2), micro_batch(3, -4), micro_batch(5, 6), micro_batch(-1, 0))
RAGGED = (micro_batch(2, 0, 3.0, 0.5), micro_batch(4, 8, 1.0, 1.5))
BAD = micro_batch(NAN, 1.0)

WINDOWS = (
    Script(EQUAL, "four micro-batches, one update", "mean of 4", FOUR),
    Script(EQUAL, "the next window begins from nothing", "mean of 4", FOUR + FOUR),
    Script(EQUAL, "a window of one micro-batch", "mean of 1", FOUR[:3]),
    Script(
        EQUAL,
        "a missing gradient counts as zero",
        "mean of 2",
        (
            micro_batch(None, 2),
            micro_batch(4, 6),
            micro_batch(4, 6),
            micro_batch(None, 2),
        ),
    ),
    Script(
        EQUAL,
        "the loss of a window",
        "mean of 2",
        (
            micro_batch(1, 2, loss=0.5),
            micro_batch(3, 4, loss=2.5),
            micro_batch(1, 1, loss=8.0),
            FLUSH,
        ),
    ),
    Script(WEIGHTS, "weights 3 and 1", "mean of 2", RAGGED),
    Script(
        WEIGHTS,
        "weights 5, 3 and 8",
        "mean, closed by the caller",
        (
            micro_batch(1, 2, 5.0),
            micro_batch(3, -2, 3.0),
            micro_batch(-1, 4, 8.0),
            FLUSH,
        ),
    ),
    Script(
        WEIGHTS,
        "a weight that was left out is 1",
        "mean of 2",
        (
            micro_batch(2, 0, None),
            micro_batch(4, 8, 3.0),
            micro_batch(2, 0, None),
            micro_batch(4, 8, None),
        ),
    ),
    Script(
        WEIGHTS,
        "fractions as weights",
        "mean of 4",
        (
            micro_batch(8, 0, 0.5),
            micro_batch(0, 8, 0.25),
            micro_batch(4, 4, 0.125),
            micro_batch(8, 8, 0.125),
        ),
    ),
    Script(
        WEIGHTS,
        "thirds are rounded",
        "mean of 2",
        (micro_batch(1, 0), micro_batch(0, 1, 2.0)),
    ),
    Script(
        WEIGHTS,
        "weight 0 adds nothing, whatever its gradient",
        "mean of 4",
        (
            micro_batch(1, 2),
            micro_batch(NAN, INF, 0.0),
            micro_batch(3, 4),
            micro_batch(5, 6, 0.0),
        ),
    ),
    Script(
        WEIGHTS,
        "a window of weight 0 makes no update",
        "mean of 2",
        (
            micro_batch(1, 2, 0.0),
            micro_batch(3, 4, 0.0),
            micro_batch(1, 2),
            micro_batch(3, 4),
        ),
    ),
    Script(
        WEIGHTS,
        "a negative, infinite or undefined weight is refused",
        "mean of 2",
        (
            micro_batch(1, 2),
            micro_batch(3, 4, -1.0),
            micro_batch(3, 4, INF),
            micro_batch(3, 4, NAN),
            micro_batch(3, 4),
        ),
        refused=(1, 2, 3),
    ),
    *(
        Script(
            SHORT, f"{count} of four, and a flush", "mean of 4", (*FOUR[:count], FLUSH)
        )
        for count in (1, 2, 3)
    ),
    Script(
        SHORT, "the window after it is full", "mean of 4", (*FOUR[:2], FLUSH, *FOUR)
    ),
    Script(SHORT, "with weights 3 and 1", "mean of 4", (*RAGGED, FLUSH)),
    Script(
        SHORT, "a flush of an empty window does nothing", "mean of 2", (FLUSH, FLUSH)
    ),
    Script(
        SHORT,
        "a flush after a full window does nothing",
        "mean of 2",
        (*FOUR[:2], FLUSH, micro_batch(1, 1), FLUSH, FLUSH),
    ),
    Script(SHORT, "a sum", "sum of 2", (micro_batch(2, 4, 3.0), FLUSH)),
    Script(
        SHORT, "a sum per item", "sum per item of 2", (micro_batch(2, 4, 8.0), FLUSH)
    ),
    Script(SHORT, "clipped", "clip", (micro_batch(6, 8), FLUSH)),
    Script(REDUCTIONS, "sum: weights do not count", "sum of 2", RAGGED),
    Script(
        REDUCTIONS,
        "sum: weight 0 adds nothing",
        "sum of 2",
        (micro_batch(1, 2), micro_batch(NAN, 4, 0.0)),
    ),
    Script(
        REDUCTIONS,
        "sum: a window of weight 0 makes no update",
        "sum of 2",
        (micro_batch(1, 2, 0.0), micro_batch(3, 4, 0.0)),
    ),
    Script(
        REDUCTIONS, "sum per item: divided by the weights", "sum per item of 2", RAGGED
    ),
    Script(
        REDUCTIONS,
        "sum per item: the weight is asked for",
        "sum per item of 2",
        (micro_batch(1, 2, None),),
        refused=(0,),
    ),
    Script(
        DISCARDS,
        "an open window is forgotten",
        "mean of 2",
        (micro_batch(64, 64), DISCARD, *FOUR[:2]),
    ),
    Script(DISCARDS, "of an empty window", "mean of 2", (DISCARD, *FOUR[:2], DISCARD)),
    Script(
        DISCARDS, "an overflow is forgotten", "drop", (BAD, DISCARD, *FOUR[:3], FLUSH)
    ),
    Script(
        DISCARDS,
        "a NaN in the sum is forgotten",
        "mean of 2",
        (BAD, DISCARD, *FOUR[:2]),
    ),
    Script(
        DISCARDS,
        "the loss scale stays",
        "drop, dynamic scale",
        (*FOUR[:2], BAD, DISCARD, *FOUR[:2]),
    ),
    Script(
        DISCARDS,
        "the loss is forgotten",
        "mean of 2",
        (
            micro_batch(1, 2, loss=64.0),
            DISCARD,
            micro_batch(1, 2, loss=1.0),
            micro_batch(1, 2, loss=3.0),
        ),
    ),
    Script(
        SCHEDULES,
        "pairs: windows of 1, 1, 3",
        "mean by a schedule",
        (*FOUR, micro_batch(7, 8)),
    ),
    Script(
        SCHEDULES,
        "pairs count updates, not windows",
        "mean by a schedule",
        (BAD, BAD, micro_batch(1, 2), micro_batch(3, 4), micro_batch(5, 6), FLUSH),
    ),
    Script(
        SCHEDULES,
        "until a weight: it may be exceeded",
        "mean until weight 5",
        (
            micro_batch(1, 2, 4.0),
            micro_batch(3, 4, 4.0),
            micro_batch(5, 6, 5.0),
            micro_batch(1, 2),
        ),
    ),
    Script(
        SCHEDULES,
        "until a weight: one that is dropped does not count",
        "drop until weight 5",
        (micro_batch(NAN, 1, 4.0), micro_batch(3, 4, 4.0), micro_batch(5, 6, 4.0)),
    ),
    Script(
        SCHEDULES,
        "until a weight: the weight is asked for",
        "mean until weight 5",
        (micro_batch(1, 2, None),),
        refused=(0,),
    ),
    Script(
        SCHEDULES,
        "the caller closes every window",
        "mean, closed by the caller",
        (*FOUR, *FOUR, FLUSH, *FOUR[:2], FLUSH),
    ),
    Script(CLIP, "above the limit", "clip", (micro_batch(6, 8), micro_batch(6, 8))),
    Script(CLIP, "at the limit", "clip", (micro_batch(1, 4), micro_batch(2, 0))),
    Script(
        CLIP, "below the limit", "clip", (micro_batch(0.5, 1), micro_batch(0.25, 1))
    ),
    Script(
        CLIP, "a gradient of zero", "clip", (micro_batch(3, 4), micro_batch(-3, -4))
    ),
    Script(
        CLIP,
        "the window's gradient is clipped, not the micro-batches'",
        "clip",
        (micro_batch(30, 40), micro_batch(-27, -36)),
    ),
    Script(
        CLIP,
        "after the weights",
        "clip",
        (micro_batch(12, 16, 3.0), micro_batch(-12, -16)),
    ),
    Script(CLIP, "a sum", "clip a sum", (micro_batch(3, 4), micro_batch(3, 4))),
    Script(
        CLIP,
        "after the loss scale is divided out",
        "clip, static scale",
        (micro_batch(1, 1), micro_batch(2, 3), micro_batch(6, 8), micro_batch(6, 8)),
    ),
    Script(
        SKIP,
        "above the limit: no update, and no overflow",
        "skip by norm",
        (micro_batch(9, 12), micro_batch(9, 12), micro_batch(3, 4), micro_batch(3, 4)),
    ),
    Script(
        SKIP, "at the limit", "skip by norm", (micro_batch(6, 8), micro_batch(6, 8))
    ),
    Script(
        SKIP,
        "beside a limit for clipping",
        "skip by norm, clip",
        (micro_batch(9, 12), micro_batch(9, 12), micro_batch(6, 8), micro_batch(6, 8)),
    ),
    Script(
        SKIP,
        "the loss scale takes the window for a clean one",
        "skip by norm, dynamic scale",
        (
            micro_batch(9, 12),
            micro_batch(9, 12),
            micro_batch(9, 12),
            micro_batch(9, 12),
        ),
    ),
    *(
        Script(
            SKIP_WINDOW,
            f"{bad} in the {place} micro-batch",
            "mean of 2",
            (*events, *FOUR[:2]),
        )
        for bad in (NAN, INF, -INF)
        for place, events in (
            ("first", (micro_batch(bad, 1), micro_batch(2, 3))),
            ("last", (micro_batch(2, 3), micro_batch(1, bad))),
        )
    ),
    Script(SKIP_WINDOW, "in a short window", "mean of 4", (BAD, FLUSH, *FOUR)),
    Script(
        SKIP_WINDOW,
        "the sum of two finite gradients overflows",
        "mean of 2",
        (micro_batch(LARGE, 1), micro_batch(LARGE, 1), *FOUR[:2]),
    ),
    Script(
        SKIP_WINDOW,
        "a gradient times its weight overflows",
        "mean of 2",
        (micro_batch(LARGE, 1, 4.0), micro_batch(1, 1), *FOUR[:2]),
    ),
    Script(
        DROPS,
        "the rest of the window is used",
        "drop",
        (micro_batch(1, 2), BAD, micro_batch(3, 4)),
    ),
    Script(
        DROPS,
        "divided by the weights of the rest",
        "drop, sum per item",
        (micro_batch(1, 2, 1.0), micro_batch(INF, 2, 8.0), micro_batch(3, 4, 3.0)),
    ),
    Script(DROPS, "nothing is left", "drop", (BAD, BAD, BAD, *FOUR[:3])),
    Script(DROPS, "in a short window", "drop", (BAD, micro_batch(3, 4), FLUSH)),
    Script(
        DROPS,
        "a gradient times its weight overflows",
        "drop",
        (micro_batch(LARGE, 1, 4.0), micro_batch(1, 1), micro_batch(3, 3)),
    ),
    Script(
        DROPS,
        "the sum of finite gradients overflows",
        "drop",
        (micro_batch(LARGE, 1), micro_batch(LARGE, 1), micro_batch(1, 1), *FOUR[:3]),
    ),
    Script(
        DROPS,
        "the loss is dropped too",
        "drop",
        (
            micro_batch(1, 2, loss=1.0),
            micro_batch(NAN, 2, loss=64.0),
            micro_batch(3, 4, loss=3.0),
        ),
    ),
    Script(IGNORES, "a NaN is applied", "ignore", (BAD, micro_batch(3, 4), *FOUR[:2])),
    Script(
        IGNORES,
        "an infinity is applied",
        "ignore",
        (micro_batch(INF, 2), micro_batch(3, 4)),
    ),
    Script(
        IGNORES,
        "it is not clipped",
        "ignore, clip",
        (micro_batch(INF, 6), micro_batch(3, 4)),
    ),
    Script(
        IGNORES,
        "what is finite is clipped",
        "ignore, clip",
        (micro_batch(6, 8), micro_batch(6, 8)),
    ),
    Script(
        IGNORES,
        "its norm is above every limit",
        "ignore, skip by norm",
        (micro_batch(INF, 6), micro_batch(3, 4), *FOUR[:2]),
    ),
    Script(
        IGNORES,
        "a window of weight 0 makes no update",
        "ignore",
        (micro_batch(NAN, 1, 0.0), micro_batch(1, 2, 0.0)),
    ),
    Script(
        SCALE,
        "the loss of a window has no scale",
        "static scale",
        (micro_batch(1, 2, 3.0, 0.5), micro_batch(3, 4, 1.0, 2.5)),
    ),
    Script(SCALE, "a static scale is divided out", "static scale", (*FOUR, BAD, FLUSH)),
    Script(
        SCALE,
        "it grows after two clean windows, up to its ceiling",
        "dynamic scale",
        FOUR * 4,
    ),
    Script(
        SCALE,
        "it backs off after an overflow, down to its floor",
        "dynamic scale",
        (BAD, FLUSH) * 4,
    ),
    Script(
        SCALE,
        "an overflow begins the count of clean windows anew",
        "dynamic scale",
        (*FOUR[:2], BAD, micro_batch(1, 2), *FOUR, *FOUR),
    ),
    Script(
        SCALE,
        "it does not move inside a window",
        "drop, dynamic scale",
        (BAD, micro_batch(1, 2), micro_batch(3, 4), micro_batch(1, 2)),
    ),
    Script(
        SCALE,
        "a window of weight 0 leaves the count",
        "dynamic scale",
        (*FOUR[:2], micro_batch(1, 2, 0.0), FLUSH, *FOUR[:2]),
    ),
    Script(
        SCALE,
        "a gradient times the scale overflows",
        "dynamic scale",
        (micro_batch(LARGE, 1), micro_batch(1, 1), *FOUR[:2]),
    ),
    Script(
        SCALE,
        "it does not grow beyond float32",
        "scale without a ceiling",
        (micro_batch(1, 1), micro_batch(0.5, 1)),
    ),
    Script(
        RANGE,
        "a divisor beyond float32 is an overflow",
        "largest static scale",
        (
            micro_batch(2.0**-8, 0),
            micro_batch(2.0**-8, 0),
            micro_batch(2.0**-8, 0),
            FLUSH,
        ),
    ),
    Script(
        RANGE,
        "a divisor below the normal numbers is an overflow",
        "smallest static scale",
        (
            micro_batch(4, 8, 0.25),
            micro_batch(4, 8, 0.25),
            micro_batch(4, 8),
            micro_batch(4, 8),
        ),
    ),
    Script(
        RANGE,
        "a divisor that clipping takes beyond float32 is an overflow",
        "clip to almost nothing",
        (micro_batch(3 * 2.0**60, 0), micro_batch(3 * 2.0**60, 0)),
    ),
    Script(
        RANGE,
        "large squares are no overflow",
        "mean of 2",
        (micro_batch(3 * 2.0**100, 2.0**102), micro_batch(3 * 2.0**100, 2.0**102)),
    ),
    Script(
        DTYPES,
        "a sum in float64",
        "sum of 2",
        (micro_batch(1, 2.0**200), micro_batch(2.0**-40, 2.0**200)),
        "float64",
    ),
    Script(
        DTYPES,
        "a weight in float64",
        "mean of 2",
        (micro_batch(1, 2, 0.1), FLUSH),
        "float64",
    ),
    Script(
        DTYPES,
        "float16 is summed in float32",
        "mean of 4",
        (micro_batch(2048, 1), micro_batch(1, 1), micro_batch(1, 1), micro_batch(2, 1)),
        "float16",
    ),
)

RESUMES = "resume in mid-window"
REFUSALS = "resume under other options"
RESUMING = (
    *(
        Script(
            RESUMES,
            f"{options}, after {count}",
            options,
            (*events[:count], resume(options), *events[count:]),
        )
        for options, events, counts in (
            ("mean of 4", FOUR, (0, 1, 3, 4)),
            ("mean of 2", RAGGED, (1,)),
            ("sum of 2", RAGGED, (1,)),
            ("sum per item of 2", RAGGED, (1,)),
            ("clip", (micro_batch(6, 8), micro_batch(6, 8)), (1,)),
            ("drop", (BAD, micro_batch(1, 2), micro_batch(3, 4)), (1, 2)),
            ("ignore", (BAD, micro_batch(3, 4), *FOUR[:2]), (1,)),
            (
                "mean until weight 5",
                (micro_batch(1, 2, 4.0), micro_batch(3, 4, 4.0)),
                (1,),
            ),
            ("mean by a schedule", (*FOUR, micro_batch(7, 8)), (2, 4)),
            ("mean, closed by the caller", (*FOUR, FLUSH), (3,)),
            ("static scale", FOUR[:2], (1,)),
            ("dynamic scale", (*FOUR, BAD, *FOUR, *FOUR[:3]), (3, 5, 7)),
            ("drop, dynamic scale", (BAD, micro_batch(1, 2), *FOUR), (1, 3)),
        )
        for count in counts
    ),
    *(
        Script(
            REFUSALS,
            f"refused in mid-window: {saved}, then {loaded}",
            saved,
            (micro_batch(1, 2, 1.0), resume(loaded), micro_batch(3, 4, 1.0)),
            refused=(1,),
        )
        for saved, loaded in (
            ("mean of 2", "mean of 4"),
            ("mean of 2", "mean, closed by the caller"),
            ("mean of 2", "mean until weight 5"),
            ("mean until weight 5", "mean of 4"),
            ("mean of 2", "sum of 2"),
            ("mean of 2", "ignore"),
            ("mean of 2", "static scale"),
            ("static scale", "static scale 64"),
            ("static scale", "dynamic scale"),
            ("dynamic scale", "mean of 2"),
        )
    ),
    *(
        Script(
            REFUSALS,
            f"between two windows: {saved}, then {loaded}",
            saved,
            (*events, resume(loaded), *FOUR[2:], FLUSH),
        )
        for saved, loaded, events in (
            ("mean of 2", "sum of 2", FOUR[:2]),
            ("mean of 2", "drop", FOUR[:2]),
            ("mean of 2", "dynamic scale", FOUR[:2]),
            ("static scale", "static scale 64", FOUR[:2]),
            ("dynamic scale", "mean of 2", (BAD, FLUSH)),
            ("dynamic scale", "dynamic scale from 16", (BAD, FLUSH, *FOUR[:2])),
            ("dynamic scale", "clip", FOUR[:2]),
        )
    ),
    Script(
        REFUSALS,
        "in mid-window, where only limits on the norm differ",
        "mean of 2",
        (micro_batch(6, 8), resume("clip"), micro_batch(6, 8)),
    ),
    Script(
        REFUSALS,
        "in mid-window, where only the dynamic rule differs",
        "dynamic scale",
        (micro_batch(6, 8), resume("dynamic scale from 16"), micro_batch(6, 8)),
    ),
)
