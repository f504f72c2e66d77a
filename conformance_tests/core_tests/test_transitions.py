"""The transitions beside a second machine, which is written with ``if`` by the words of
the documentation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from gradaccum import DynamicLossScale, until_weight
from gradaccum import kit as core

TINY, LARGEST = 2.0**-126, 3.4028234663852886e38
SCALES = (
    None,
    8.0,
    DynamicLossScale(4.0, growth_interval=2, min_scale=2.0, max_scale=20.0),
    DynamicLossScale(2.0**126, growth_interval=1),
)
STEPS = (
    3,
    None,
    [(0, 2), (2, 1), (4, 3)],
    until_weight(5),
    until_weight([(0, 2), (3, 6)]),
    lambda step: step % 3 + 1,
)
WEIGHTS = (1.0, 1.0, 2.0, 0.5, 0.0, -1.0, math.inf, math.nan, 1e308)
NORMS = (1.0, 4.0, 0.0, 0.5, 2.0, 16.0, 1e30, LARGEST)


class Machine:
    """An open window and the run so far."""

    def __init__(self, options: Any) -> None:
        self.options, self.rule = options, options.scale_rule
        self.updates = self.skipped = self.clean_windows = 0
        self.scale = self.rule.init_scale
        self.forget()

    def forget(self) -> None:
        self.counted, self.weight, self.bad = 0, 0.0, False

    def add(self, weight: float, finite: bool) -> None:
        self.counted += 1
        if self.takes(weight, finite):
            self.weight += weight
        elif weight != 0:
            self.bad = True

    def takes(self, weight: float, finite: bool) -> bool:
        return finite and 0 < weight < math.inf and self.weight + weight != math.inf

    def is_full(self) -> bool:
        sizes = self.options.steps
        by_weight = isinstance(sizes, core.UntilWeight)
        sizes = sizes.weight if by_weight else sizes
        if sizes is None:
            return False
        if callable(sizes):
            size = sizes(self.updates)
        elif isinstance(sizes, tuple):
            size = [count for first, count in sizes if first <= self.updates][-1]
        else:
            size = sizes
        return self.weight >= size if by_weight else self.counted >= size

    def end(self, norm: float, finite: bool) -> tuple[bool, bool, float, float]:
        """Close the window: the fields of a `Decision`."""
        divisor = self.scale
        if self.options.reduction != "sum" and self.weight:
            divisor *= self.weight
        representable = TINY <= divisor <= LARGEST
        finite = finite and representable
        true_norm = norm / divisor if finite else math.inf
        overflow = self.bad or not finite
        wanted = self.weight > 0
        if self.options.on_overflow == "ignore":
            wanted = wanted and representable and not self.bad
        elif self.options.on_overflow == "skip_window":
            wanted = wanted and not overflow
        else:
            wanted = wanted and finite
        if self.options.skip_norm is not None and true_norm > self.options.skip_norm:
            wanted = False
        if (
            wanted
            and finite
            and self.options.clip_norm is not None
            and true_norm > self.options.clip_norm
        ):
            clipped = divisor * (true_norm / self.options.clip_norm)
            if clipped > LARGEST:
                wanted, overflow = False, True
            else:
                divisor = clipped
        self.count(wanted, overflow)
        return wanted, overflow, divisor, true_norm

    def count(self, applied: bool, overflow: bool) -> None:
        self.updates += applied
        self.skipped += not applied
        if overflow:
            self.scale, self.clean_windows = (
                max(self.scale * self.rule.backoff_factor, self.rule.min_scale),
                0,
            )
        elif self.weight:
            self.clean_windows += 1
            if self.clean_windows >= self.rule.growth_interval:
                grown = min(self.scale * self.rule.growth_factor, self.rule.max_scale)
                self.scale, self.clean_windows = (
                    grown if grown <= LARGEST else self.scale,
                    0,
                )
        self.forget()

    def fields(self) -> core.State:
        return core.State(
            self.counted,
            self.updates,
            self.skipped,
            self.weight,
            self.bad,
            self.scale,
            self.clean_windows,
        )


def options_drawn(draw: random.Random) -> Iterator[Any]:
    for scale in SCALES:
        for steps in STEPS:
            for on_overflow in ("skip_window", "drop_micro_batch", "ignore"):
                if on_overflow == "ignore" and isinstance(scale, DynamicLossScale):
                    continue
                reduction = draw.choice(("mean", "sum", "sum_per_item"))
                norms = {
                    "clip_norm": draw.choice((None, 1.0, 1e-30)),
                    "skip_norm": draw.choice((None, 2.0)),
                }
                yield core.make_options(
                    steps,
                    loss_scale=scale,
                    reduction=reduction,
                    on_overflow=on_overflow,
                    **norms,
                )


@pytest.mark.parametrize("seed", range(4))
def test_both_machines_agree(seed: int) -> None:
    draw = random.Random(seed)
    for options in options_drawn(draw):
        machine, state = (
            Machine(options),
            core.initial_state(options.scale_rule.init_scale),
        )
        for _ in range(60):
            weight, finite = draw.choice(WEIGHTS), draw.random() < 0.9
            assert core.usable(state, weight, finite) == machine.takes(weight, finite)
            assert (
                core.contribution(weight, options)
                == (weight if options.reduction == "mean" else 1)
                or not weight < math.inf
            )
            state = core.State(*core.accumulate(state, weight, finite, core.select))
            machine.add(weight, finite)
            assert state == machine.fields()
            assert core.ends(state, options.steps, core.select) == machine.is_full()
            if draw.random() < 0.05:
                state = core.State(*core.discard(state))
                machine.forget()
            elif machine.is_full() or draw.random() < 0.1:
                norm, finite = machine.scale * draw.choice(NORMS), draw.random() < 0.9
                decision = core.Decision(
                    *core.decide(state, norm, finite, options, core.select)
                )
                state = core.State(
                    *core.close(
                        state, decision.apply, decision.overflow, options, core.select
                    )
                )
                assert tuple(decision) == machine.end(norm, finite), options
            assert state == machine.fields(), options
            assert state.micro_step or not core.ends(state, options.steps, core.select)
