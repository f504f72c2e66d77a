"""Several workers share a window: its gradient is that of one large batch over all of them, and every worker makes the same update.

After each window every worker has the same result, state, parameters and optimizer state, bit for bit.
"""

import math
from pathlib import Path

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import additions_in_gradient, bound_of_sum, gamma, unit_roundoff, worst
from gradaccum_conformance.harness import Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import cut, global_norm, poisoned, random_tree, same, standard_batch
from gradaccum_conformance.specs import LINEAR, MLP, make_weights
from gradaccum_conformance.workers import Crews
from gradaccum_conformance.workers.shares import Share, Shares, check_update, expected, feed, require_equal, terms

SCALE = gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=2, min_scale=1.0, max_scale=16.0)
CLIP, SKIP = 64.0, 128.0
SUM: dict[str, Option] = {"reduction": "sum", "clip_norm": CLIP, "skip_norm": SKIP}
DROPPING: dict[str, Option] = {"reduction": "item_mean", "on_overflow": "drop_micro_batch", "loss_scale": SCALE}
FULL: dict[str, Option] = {"steps": 2, "loss_scale": SCALE}
REDUCTIONS: dict[str, dict[str, Option]] = {"mean": {}, "sum": SUM, "item_mean": DROPPING}
"""A backend compiles anew for each set of options, so that the tests share these few."""
COUNTS = (3, 1, 0, 2)
"""Micro-batches of each worker."""


def unequal(workers: int, seed: int = 0) -> Shares:
    """Different numbers of micro-batches of different weights."""
    draw = [[100 * seed + 10 * rank + index for index in range(COUNTS[rank])] for rank in range(workers)]
    return [[Share(random_tree(LINEAR, number), 1.0 + number % 7) for number in own] for own in draw]


def on_first(workers: int, *own: Share) -> list[list[Share]]:
    """Micro-batches of the first worker; the others have none."""
    return [list(own), *([] for _ in range(workers - 1))]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_is_that_of_all_workers(crews: Crews, errors: Errors, reduction: str) -> None:
    """They have different numbers of micro-batches and weights, in two windows one after the other."""
    crew = crews(**REDUCTIONS[reduction])
    for window in range(2):
        shares = unequal(crew.workers, window)
        feed(crew, shares)
        crew.flush()
        check_update(errors, crew, shares, calls=window + 1, reduction=reduction)


def test_worker_without_micro_batches(crews: Crews, errors: Errors) -> None:
    """In the first window every worker but the first has nothing, in the second every one but the last, in the third all of them."""
    crew = crews()
    shares = on_first(crew.workers, *(Share(random_tree(LINEAR, seed), 1.0 + seed) for seed in range(2)))
    feed(crew, shares)
    crew.flush()
    check_update(errors, crew, shares, calls=1)
    shares.reverse()
    feed(crew, shares)
    crew.flush()
    check_update(errors, crew, shares, calls=2)
    before, parameters = crew.states(), crew.parameters()
    crew.flush()
    assert not require_equal(crew).closed
    assert crew.states() == before
    assert all(same(*pair) for pair in zip(crew.parameters(), parameters, strict=True))


def test_missing_gradients_count_as_zero(crews: Crews, errors: Errors) -> None:
    """The weights have none on the last worker, the bias has none in the window's last micro-batches."""
    crew = crews()
    weight, bias = LINEAR.parameter_shapes()
    for window in range(2):
        trees = [[random_tree(LINEAR, 10 * window + 2 * rank + index) for index in range(2)] for rank in range(crew.workers)]
        shares = [[Share(first), Share({**last, bias: None})] for first, last in trees]
        shares[-1] = [Share({**share.tree, weight: None}) for share in shares[-1]]
        feed(crew, shares)
        crew.flush()
        check_update(errors, crew, shares, calls=window + 1)


def test_weight_of_zero_adds_nothing(crews: Crews, errors: Errors) -> None:
    """Not even where the gradient is NaN; a window without weight makes no update, and is no overflow."""
    crew = crews()
    nothing = Share(poisoned(random_tree(LINEAR, 9), math.nan), 0.0)
    shares: list[list[Share]] = [[Share(random_tree(LINEAR, rank), 2.0), nothing] for rank in range(crew.workers)]
    shares[-1] = [nothing]
    feed(crew, shares)
    crew.flush()
    check_update(errors, crew, shares, calls=1)
    before = crew.parameters()
    feed(crew, [[nothing]] * crew.workers)
    crew.flush()
    result = require_equal(crew)
    assert (result.applied, result.skipped, result.overflow) == (False, True, False)
    assert same(crew.parameters()[0], before[0])


def test_refused_weight_changes_nothing(crews: Crews, errors: Errors) -> None:
    """Every worker raises, and what it held is still there."""
    crew = crews()
    shares = unequal(crew.workers)
    feed(crew, shares)
    before = crew.states()
    for weight in (-1.0, math.nan):
        refusals = crew.refused([random_tree(LINEAR, 9)] * crew.workers, [weight] * crew.workers)
        assert all(refusal.startswith("ArgumentValueError: weight: expected") for refusal in refusals), refusals
    assert crew.states() == before
    crew.flush()
    check_update(errors, crew, shares, calls=1)


def test_window_leaves_nothing_to_the_next(crews: Crews) -> None:
    """After a window of large gradients, and after one that was discarded with a NaN in it, the next is that of a new crew, bit for bit."""
    crew = crews()
    fresh, shares = crew.snapshot(), unequal(crew.workers)
    feed(crew, shares)
    crew.flush()
    alone = crew.captured()[0].gradient or {}
    crew.restore(fresh)
    feed(crew, [[Share(random_tree(LINEAR, 20 + rank, 1e6), 3.0)] for rank in range(crew.workers)])
    crew.flush()
    feed(crew, shares)
    crew.flush()
    assert same(crew.captured()[0].gradient or {}, alone)
    feed(crew, [[Share(poisoned(random_tree(LINEAR, 20 + rank), math.nan))] for rank in range(crew.workers)])
    crew.discard()
    assert not any(state.micro_step or state.weight or state.overflow for state in crew.states())
    feed(crew, shares)
    crew.flush()
    assert same(crew.captured()[0].gradient or {}, alone)
    assert require_equal(crew).optimizer_step == 3


def test_full_windows_need_no_flush(crews: Crews, errors: Errors) -> None:
    """Nothing moves inside a window. The loss scale grows on every worker after two clean ones. A short window is flushed."""
    crew = crews(**FULL)
    for window in range(3):
        length = 2 if window < 2 else 1
        shares = [
            [Share(random_tree(LINEAR, 100 * window + 10 * rank + index), 1.0 + rank) for index in range(length)]
            for rank in range(crew.workers)
        ]
        before = crew.parameters()
        feed(crew, [own[:1] for own in shares])
        assert [state.micro_step for state in crew.states()] == [1] * crew.workers
        assert all(same(*pair) for pair in zip(crew.parameters(), before, strict=True)), "parameters moved inside a window"
        feed(crew, [own[1:] for own in shares])
        if length == 1:
            crew.flush()
        check_update(errors, crew, shares, calls=window + 1)
    assert crew.results()[0].loss_scale == 2 * SCALE.init_scale


def test_overflow_on_one_worker_skips_on_all(crews: Crews) -> None:
    """The next window is, bit for bit, that of a crew without the overflow."""
    crew = crews(**FULL)
    fresh = crew.snapshot()
    good = [[Share(random_tree(LINEAR, 10 * rank + index), 1.0 + rank) for index in range(2)] for rank in range(crew.workers)]
    feed(crew, good)
    clean = crew.captured()[0].gradient or {}, crew.parameters()[0]
    for rank, index, value in ((0, 0, math.inf), (crew.workers - 1, 1, math.nan)):
        crew.restore(fresh)
        before = crew.parameters()
        hurt = [list(own) for own in good]
        hurt[rank][index] = Share(poisoned(random_tree(LINEAR, 9), value))
        feed(crew, hurt)
        result = require_equal(crew)
        assert (result.applied, result.skipped, result.overflow, result.grad_norm) == (False, True, True, math.inf)
        assert (result.loss_scale, crew.states()[0].skipped_windows, crew.captured()[0].calls) == (SCALE.init_scale / 2, 1, 0)
        assert same(crew.parameters()[0], before[0])
        feed(crew, good)
        assert require_equal(crew).applied
        assert same(crew.captured()[0].gradient or {}, clean[0])
        assert same(crew.parameters()[0], clean[1])


def test_dropped_micro_batch_is_one_worker_s(crews: Crews, errors: Errors) -> None:
    """The others' count, and the scale backs off on all; a window in which all are dropped makes no update."""
    crew = crews(**DROPPING)
    bad = Share(poisoned(random_tree(LINEAR, 9), math.inf), 5.0)
    good = unequal(crew.workers)
    feed(crew, [[bad, *good[0]], *good[1:]])
    crew.flush()
    check_update(errors, crew, good, calls=1, reduction="item_mean")
    assert (crew.results()[0].overflow, crew.results()[0].loss_scale) == (True, SCALE.init_scale / 2)
    feed(crew, [good[0], *([bad] for _ in good[1:])])
    crew.flush()
    check_update(errors, crew, [good[0]], calls=2, reduction="item_mean")
    before = crew.parameters()
    feed(crew, [[bad]] * crew.workers)
    crew.flush()
    result = require_equal(crew)
    assert (result.applied, result.skipped, result.overflow, result.loss_scale) == (False, True, True, SCALE.min_scale)
    assert same(crew.parameters()[0], before[0])


def test_limits_are_of_the_reduced_norm(crews: Crews, errors: Errors) -> None:
    """Each worker's own norm would decide otherwise: the gradients cancel, add up to one that is clipped, and to one that is skipped."""
    crew = crews(**SUM)
    others, tree = crew.workers - 1, random_tree(LINEAR, 0)
    unit = {name: array / global_norm(tree) for name, array in tree.items()}

    def window(first: float, other: float) -> Shares:
        sizes = [first, *([other / others] * others)]
        return [[Share({name: (size * array).astype("float32").astype("float64") for name, array in unit.items()})] for size in sizes]

    cancelling = window(1000.0, -990.0)
    feed(crew, cancelling)
    crew.flush()
    check_update(errors, crew, cancelling, calls=1, reduction="sum")
    clipped = window(40.0, 40.0)
    feed(crew, clipped)
    crew.flush()
    truth = expected(clipped, "sum")
    factor = CLIP / global_norm(truth)
    bound = bound_of_sum(terms(clipped, "sum"), "float32") + gamma(60, "float32")
    errors.check("clipped", worst(crew.captured()[0].gradient or {}, {name: factor * array for name, array in truth.items()}), bound)
    assert require_equal(crew).grad_norm > CLIP
    feed(crew, window(80.0, 80.0))
    crew.flush()
    result = require_equal(crew)
    assert (result.applied, result.skipped, result.overflow, result.optimizer_step) == (False, True, False, 2)


def test_resumed_window_is_the_same(crews: Crews, tmp_path: Path) -> None:
    """From memory and from files, in mid-window, bit for bit."""
    crew = crews(**FULL)
    trees = [[random_tree(LINEAR, 10 * rank + index) for index in range(6)] for rank in range(crew.workers)]

    def go_on(first: int, last: int) -> None:
        feed(crew, [[Share(tree, 1.0 + index) for index, tree in enumerate(own)][first:last] for own in trees])

    go_on(0, 3)
    middle, states, sums = crew.snapshot(), crew.states(), crew.accumulators()
    crew.save(tmp_path)
    go_on(3, 6)
    end = require_equal(crew), crew.parameters()[0]
    for source in ("memory", "files"):
        crew.restore(middle) if source == "memory" else crew.load(tmp_path)
        assert crew.states() == states
        assert all(same(*pair) for pair in zip(crew.accumulators(), sums, strict=True))
        go_on(3, 6)
        assert require_equal(crew) == end[0]
        assert same(crew.parameters()[0], end[1])


def test_model_s_gradient_is_the_large_batch_s(crews: Crews, errors: Errors) -> None:
    """By the frameworks' own forward and backward passes, against the float64 oracle, with unequal micro-batches."""
    crew = crews(MLP)
    batch = standard_batch(MLP, 5 * crew.workers)
    pieces = cut(batch, (1, 4) * crew.workers)
    for index in range(2):
        row = pieces[index::2]
        crew.micro_batch(row, [piece.items for piece in row])
    crew.flush()
    require_equal(crew)
    _, truth = oracle.loss_and_gradient(MLP, make_weights(MLP), batch)
    bound = gamma(additions_in_gradient(MLP, batch.items, len(pieces)), "float32")
    errors.check("gradient", worst(crew.captured()[0].gradient or {}, truth), bound)


def test_half_precision_gradients_are_summed_in_float32(crews: Crews, errors: Errors) -> None:
    """And so reduced. The large ones of the first and the last worker cancel, and what is left is below bfloat16's resolution of them."""
    crew = crews(dtype="bfloat16")
    sizes = [[2.0**-9, 2.0**-9] for _ in range(crew.workers)]
    sizes[0][0], sizes[-1][0] = 1.0, -1.0
    ones = {name: np.ones(shape) for name, shape in LINEAR.parameter_shapes().items()}
    shares = [[Share({name: size * array for name, array in ones.items()}) for size in own] for own in sizes]
    feed(crew, shares)
    crew.flush()
    require_equal(crew)
    errors.check("gradient", worst(crew.captured()[0].gradient or {}, expected(shares, "mean")), unit_roundoff("bfloat16"))
