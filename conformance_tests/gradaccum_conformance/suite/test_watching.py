"""A listener of the optimizer, or a loop that looks at each result, hears of every
window once, as of the large batch.
"""

import math

import gradaccum
from gradaccum import StepResult
from gradaccum.watching import ClosedWindow
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import gamma
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    cut,
    global_norm,
    random_tree,
    same,
    standard_batch,
    start,
)
from gradaccum_conformance.specs import LINEAR, MLP, Batch, make_weights

BATCH = standard_batch(MLP)
FIRST, LAST = cut(BATCH, (7, 5))
BAD = Batch(FIRST.x * math.inf, FIRST.y)


class Heard:
    """A session, and what its listener heard. Where the optimizer has no listeners,
    the loop looks at the result after each call.
    """

    def __init__(self, backend: Harness, **options: Option) -> None:
        self.session: Session = start(backend, MLP, **{"steps": 2, **options})
        self.windows: list[ClosedWindow | StepResult] = []
        self.listens = self.session.listen(self.windows.append)

    def micro_batch(self, piece: Batch) -> None:
        self.session.micro_batch(piece, weight=piece.items)
        self.look()

    def flush(self) -> None:
        self.session.flush()
        self.look()

    def look(self) -> None:
        if not self.listens and self.session.result().closed:
            self.windows.append(self.session.result())


def check_loss(errors: Errors, window: ClosedWindow | StepResult, batch: Batch) -> None:
    loss, _ = oracle.loss_and_gradient(MLP, make_weights(MLP), batch)
    errors.check("loss", abs(window.loss - loss) / loss, gamma(200, "float32"))


def test_listener_hears_the_large_batch(backend: Harness, errors: Errors) -> None:
    """Once of each window, and not of one that is discarded or empty."""
    heard = Heard(backend)
    heard.micro_batch(FIRST)
    heard.session.discard()
    heard.flush()
    heard.micro_batch(FIRST)
    assert not heard.windows
    heard.micro_batch(LAST)
    (window,) = heard.windows
    assert (window.optimizer_step, window.applied) == (1, True)
    check_loss(errors, window, BATCH)
    _, gradient = oracle.loss_and_gradient(MLP, make_weights(MLP), BATCH)
    distance = abs(window.grad_norm / global_norm(gradient) - 1)
    errors.check("norm", distance, gamma(2000, "float32"))
    heard.micro_batch(LAST)
    for _ in range(2):
        heard.flush()
    assert [window.optimizer_step for window in heard.windows] == [1, 2]
    assert all(type(value) in (int, float, bool) for value in heard.windows[1])
    counts = [
        (window.micro_batches, window.weight)
        for window in heard.windows
        if isinstance(window, ClosedWindow)
    ]
    assert counts == ([(2, 12), (1, 5)] if heard.listens else [])


def test_listener_hears_what_is_lost(backend: Harness, errors: Errors) -> None:
    """A window that is skipped, by its norm or by an overflow, and the part of one that
    was dropped.
    """
    skipped = Heard(backend, skip_norm=1e-9)
    scaled = Heard(backend, loss_scale=gradaccum.DynamicLossScale(init_scale=8.0))
    dropping = Heard(backend, on_overflow="drop_micro_batch")
    for heard in (skipped, scaled, dropping):
        heard.micro_batch(FIRST if heard is skipped else BAD)
        heard.micro_batch(LAST)
    (window,) = skipped.windows
    assert (window.applied, window.skipped, window.overflow) == (False, True, False)
    (window,) = scaled.windows
    assert (window.skipped, window.overflow) == (True, True)
    assert window.grad_norm == math.inf
    assert window.loss_scale == 4.0
    (window,) = dropping.windows
    assert window.applied
    if isinstance(window, ClosedWindow):  # A result does not tell what was dropped.
        assert (window.overflow, window.weight) == (True, 5)
        check_loss(errors, window, LAST)


def test_listener_that_raises_loses_nothing(backend: Harness) -> None:
    """The window is closed, the others have heard of it, and the next one is as if
    nothing had been.
    """
    heard = Heard(backend)
    quiet = Heard(backend)
    heard.listens = heard.session.listen(lambda window: 1 // 0)
    for piece in (FIRST, LAST, FIRST, LAST):
        quiet.micro_batch(piece)
        try:
            heard.micro_batch(piece)
        except ZeroDivisionError:
            assert heard.session.result().closed
        else:
            assert not (heard.listens and heard.session.result().closed)
    assert [window.optimizer_step for window in heard.windows] == [1, 2]
    assert same(heard.session.parameters(), quiet.session.parameters())


def test_what_moves_per_update_moves_once(backend: Harness, mode: str) -> None:
    """Full, flushed and skipped windows, a discarded one, and flushes of empty ones.
    Where the optimizer calls nothing, the loop looks at the result after each call, and
    once more after each flush.
    """
    session = start(backend, LINEAR, steps=2, mode=mode, skip_norm=1e6)
    moved = []

    def move() -> None:
        moved.append(session.state().optimizer_step)

    hooked = session.on_update(move)

    def look() -> None:
        if not hooked and session.result().applied:
            move()

    small = random_tree(LINEAR, 0)
    large = random_tree(LINEAR, 0, 1e9)
    for trees in ((small, small), (small, large), (small, small), (small,)):
        for tree in trees:
            session.gradients(tree)
            look()
        for _ in range(2):
            session.flush()
            session.result()  # In compiled code of the user's own this calls the hooks.
            look()
    session.gradients(small)
    look()
    session.discard()
    look()
    assert moved == [1, 2, 3]
