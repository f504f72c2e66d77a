"""An overflow on one worker skips the window of all; one that is dropped costs its own
micro-batch only; limits are of the norm of all.
"""

import math

from gradaccum_conformance.bounds import gamma, worst
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    global_norm,
    outcome_of,
    poisoned,
    random_tree,
    same,
)
from gradaccum_conformance.specs import MLP
from gradaccum_conformance.workers import Crews
from gradaccum_conformance.workers.options import CLIP, DROPPING, FULL, SCALE, SUM
from gradaccum_conformance.workers.shares import (
    Share,
    Shares,
    check_update,
    close,
    feed,
    random_shares,
    require_equal,
    truth_and_bound,
    unequal,
)


def test_overflow_on_one_worker_skips_on_all(crews: Crews) -> None:
    """The next window is, bit for bit, that of a crew without the overflow."""
    crew = crews(**FULL)
    fresh = crew.snapshot()
    good = random_shares([2] * crew.workers)
    feed(crew, good)
    clean = crew.ask("captured")[0].gradient, crew.ask("parameters")[0]
    for rank, index, value in ((0, 0, math.inf), (crew.workers - 1, 1, math.nan)):
        crew.restore(fresh)
        before = crew.ask("parameters")[0]
        hurt = [list(own) for own in good]
        hurt[rank][index] = Share(poisoned(random_tree(MLP, 9), value))
        feed(crew, hurt)
        result = require_equal(crew)
        assert outcome_of(result) == {"skipped", "overflow"}
        assert result.grad_norm == math.inf
        assert result.loss_scale == SCALE.init_scale / 2
        assert crew.ask("state")[0].skipped_windows == 1
        assert crew.ask("captured")[0].calls == 0
        assert same(crew.ask("parameters")[0], before)
        feed(crew, good)
        assert require_equal(crew).applied
        assert same(crew.ask("captured")[0].gradient, clean[0])
        assert same(crew.ask("parameters")[0], clean[1])


def test_one_worker_drops_a_micro_batch(crews: Crews, errors: Errors) -> None:
    """The others' count, and the scale backs off on all; a window in which all are
    dropped applies no update.
    """
    crew = crews(**DROPPING)
    bad = Share(poisoned(random_tree(MLP, 9), math.inf), 5.0)
    good = unequal(crew.workers)
    result = close(crew, [[bad, *good[0]], *good[1:]])
    check_update(errors, crew, good, calls=1, reduction="sum_per_item")
    assert result.overflow
    assert result.loss_scale == SCALE.init_scale / 2
    close(crew, [good[0], *([bad] for _ in good[1:])])
    check_update(errors, crew, good[:1], calls=2, reduction="sum_per_item")
    before = crew.ask("parameters")[0]
    result = close(crew, [[bad]] * crew.workers)
    assert outcome_of(result) == {"skipped", "overflow"}
    assert result.loss_scale == SCALE.min_scale
    assert same(crew.ask("parameters")[0], before)


def test_total_beyond_float32_spoils_one_window(crews: Crews, errors: Errors) -> None:
    """The sum of all workers' weights is infinite, where none of them is; 0 times that
    would be NaN in every later window.
    """
    crew = crews(**DROPPING)
    before = crew.ask("parameters")[0]
    large = [[Share(random_tree(MLP, rank), 3e38)] for rank in range(crew.workers)]
    assert outcome_of(close(crew, large)) == {"skipped", "overflow"}
    assert same(crew.ask("parameters")[0], before)
    good = unequal(crew.workers)
    close(crew, good)
    check_update(errors, crew, good, calls=1, reduction="sum_per_item")
    assert all(state.weight == 0 for state in crew.ask("state"))


def test_limits_are_of_the_reduced_norm(crews: Crews, errors: Errors) -> None:
    """Each worker's own norm would decide otherwise: the gradients cancel, add up to
    one that is clipped, and to one that is skipped.
    """
    crew = crews(**SUM)
    others = crew.workers - 1
    size = global_norm(random_tree(MLP, 0))

    def window(first: float, other: float) -> Shares:
        """Gradients of these norms, in one direction."""
        norms = [first, *([other / others] * others)]
        return [[Share(random_tree(MLP, 0, norm / size))] for norm in norms]

    cancelling = window(1000.0, -990.0)
    close(crew, cancelling)
    check_update(errors, crew, cancelling, calls=1, reduction="sum")
    clipped = window(40.0, 40.0)
    result = close(crew, clipped)
    assert result.grad_norm > CLIP
    truth, bound = truth_and_bound(clipped, "sum")
    factor = CLIP / global_norm(truth)
    elements = sum(array.size for array in truth.values())
    errors.check(
        "clipped",
        worst(
            crew.ask("captured")[0].gradient,
            {name: factor * array for name, array in truth.items()},
        ),
        bound + gamma(2 * elements + 4, "float32"),
    )
    result = close(crew, window(80.0, 80.0))
    assert outcome_of(result) == {"skipped"}
    assert result.optimizer_step == 2
