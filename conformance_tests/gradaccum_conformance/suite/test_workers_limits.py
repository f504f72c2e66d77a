"""An overflow on one worker skips the window of all; one that is dropped costs its own
micro-batch only; limits are of the norm of all.
"""

import math

from gradaccum_conformance.bounds import bound_of_sum, gamma, worst
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import global_norm, poisoned, random_tree, same
from gradaccum_conformance.specs import MLP
from gradaccum_conformance.workers import Crews
from gradaccum_conformance.workers.options import CLIP, DROPPING, FULL, SCALE, SUM
from gradaccum_conformance.workers.shares import (
    Share,
    Shares,
    check_update,
    expected,
    feed,
    require_equal,
    terms,
    unequal,
)


def test_overflow_on_one_worker_skips_on_all(crews: Crews) -> None:
    """The next window is, bit for bit, that of a crew without the overflow."""
    crew = crews(**FULL)
    fresh = crew.snapshot()
    good = [
        [Share(random_tree(MLP, 10 * rank + index), 1.0 + rank) for index in range(2)]
        for rank in range(crew.workers)
    ]
    feed(crew, good)
    clean = crew.captured()[0].gradient or {}, crew.parameters()[0]
    for rank, index, value in ((0, 0, math.inf), (crew.workers - 1, 1, math.nan)):
        crew.restore(fresh)
        before = crew.parameters()
        hurt = [list(own) for own in good]
        hurt[rank][index] = Share(poisoned(random_tree(MLP, 9), value))
        feed(crew, hurt)
        result = require_equal(crew)
        assert (result.applied, result.skipped, result.overflow, result.grad_norm) == (
            False,
            True,
            True,
            math.inf,
        )
        assert (
            result.loss_scale,
            crew.states()[0].skipped_windows,
            crew.captured()[0].calls,
        ) == (SCALE.init_scale / 2, 1, 0)
        assert same(crew.parameters()[0], before[0])
        feed(crew, good)
        assert require_equal(crew).applied
        assert same(crew.captured()[0].gradient or {}, clean[0])
        assert same(crew.parameters()[0], clean[1])


def test_one_worker_drops_a_micro_batch(crews: Crews, errors: Errors) -> None:
    """The others' count, and the scale backs off on all; a window in which all are
    dropped makes no update.
    """
    crew = crews(**DROPPING)
    bad = Share(poisoned(random_tree(MLP, 9), math.inf), 5.0)
    good = unequal(crew.workers)
    feed(crew, [[bad, *good[0]], *good[1:]])
    crew.flush()
    check_update(errors, crew, good, calls=1, reduction="sum_per_item")
    assert (crew.results()[0].overflow, crew.results()[0].loss_scale) == (
        True,
        SCALE.init_scale / 2,
    )
    feed(crew, [good[0], *([bad] for _ in good[1:])])
    crew.flush()
    check_update(errors, crew, [good[0]], calls=2, reduction="sum_per_item")
    before = crew.parameters()
    feed(crew, [[bad]] * crew.workers)
    crew.flush()
    result = require_equal(crew)
    assert (result.applied, result.skipped, result.overflow, result.loss_scale) == (
        False,
        True,
        True,
        SCALE.min_scale,
    )
    assert same(crew.parameters()[0], before[0])


def test_total_beyond_float32_spoils_one_window(crews: Crews, errors: Errors) -> None:
    """The sum of all workers' weights is infinite, where none of them is; 0 times that
    would be NaN in every later window.
    """
    crew = crews(**DROPPING)
    before = crew.parameters()
    feed(crew, [[Share(random_tree(MLP, rank), 3e38)] for rank in range(crew.workers)])
    crew.flush()
    result = require_equal(crew)
    assert (result.applied, result.skipped, result.overflow) == (False, True, True)
    assert same(crew.parameters()[0], before[0])
    good = unequal(crew.workers)
    feed(crew, good)
    crew.flush()
    check_update(errors, crew, good, calls=1, reduction="sum_per_item")
    assert all(state.weight == 0 for state in crew.states())


def test_limits_are_of_the_reduced_norm(crews: Crews, errors: Errors) -> None:
    """Each worker's own norm would decide otherwise: the gradients cancel, add up to
    one that is clipped, and to one that is skipped.
    """
    crew = crews(**SUM)
    others, tree = crew.workers - 1, random_tree(MLP, 0)
    unit = {name: array / global_norm(tree) for name, array in tree.items()}

    def window(first: float, other: float) -> Shares:
        sizes = [first, *([other / others] * others)]
        return [
            [
                Share(
                    {
                        name: (size * array).astype("float32").astype("float64")
                        for name, array in unit.items()
                    }
                )
            ]
            for size in sizes
        ]

    cancelling = window(1000.0, -990.0)
    feed(crew, cancelling)
    crew.flush()
    check_update(errors, crew, cancelling, calls=1, reduction="sum")
    clipped = window(40.0, 40.0)
    feed(crew, clipped)
    crew.flush()
    truth = expected(clipped, "sum")
    factor = CLIP / global_norm(truth)
    elements = sum(array.size for array in truth.values())
    bound = bound_of_sum(terms(clipped, "sum"), "float32") + gamma(
        2 * elements + 4, "float32"
    )
    errors.check(
        "clipped",
        worst(
            crew.captured()[0].gradient or {},
            {name: factor * array for name, array in truth.items()},
        ),
        bound,
    )
    assert require_equal(crew).grad_norm > CLIP
    feed(crew, window(80.0, 80.0))
    crew.flush()
    result = require_equal(crew)
    assert (result.applied, result.skipped, result.overflow, result.optimizer_step) == (
        False,
        True,
        False,
        2,
    )
