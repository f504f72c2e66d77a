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


class Heard:
    """A session, and what its listener heard. Where the optimizer has no listeners,
    the loop looks at the result after each call.
    """

    def __init__(self, backend: Harness, **options: Option) -> None:
        self.session: Session = start(backend, MLP, **{"steps": 2, **options})
        self.windows: list[ClosedWindow | StepResult] = []
        self.own = self.session.listen(self.windows.append)

    def learn(self, piece: Batch) -> None:
        self.session.micro_batch(piece, weight=piece.items)
        self.look()

    def close(self, call: str) -> None:
        getattr(self.session, call)()
        self.look()

    def look(self) -> None:
        if not self.own and self.session.result().closed:
            self.windows.append(self.session.result())

    def counts(self) -> list[tuple[float, float]]:
        """The micro-batches and the weight of each window, which a listener hears."""
        windows = [each for each in self.windows if isinstance(each, ClosedWindow)]
        return [(window.micro_batches, window.weight) for window in windows]


def bad(piece: Batch) -> Batch:
    return Batch(piece.x * math.inf, piece.y)


def test_listener_hears_the_large_batch(backend: Harness, errors: Errors) -> None:
    heard, batch = Heard(backend), standard_batch(MLP)
    loss, gradient = oracle.loss_and_gradient(MLP, make_weights(MLP), batch)
    first, last = cut(batch, (7, 5))
    heard.learn(first)
    heard.close("discard")
    heard.close("flush")
    heard.learn(first)
    assert not heard.windows
    heard.learn(last)
    (window,) = heard.windows
    assert (window.optimizer_step, window.applied) == (1, True)
    errors.check("loss", abs(window.loss - loss) / loss, gamma(200, "float32"))
    errors.check(
        "norm",
        abs(window.grad_norm / global_norm(gradient) - 1),
        gamma(2000, "float32"),
    )
    heard.learn(last)
    for _ in range(2):
        heard.close("flush")
    assert [window.optimizer_step for window in heard.windows] == [1, 2]
    assert heard.counts() == ([(2, 12), (1, 5)] if heard.own else [])
    assert all(type(value) in (int, float, bool) for value in heard.windows[1])


def test_listener_hears_what_is_lost(backend: Harness, errors: Errors) -> None:
    """A window that is skipped, by its norm or by an overflow, and the part of one that
    was dropped.
    """
    first, last = cut(standard_batch(MLP), (7, 5))
    skipped = Heard(backend, skip_norm=1e-9)
    scaled = Heard(backend, loss_scale=gradaccum.DynamicLossScale(init_scale=8.0))
    dropping = Heard(backend, on_overflow="drop_micro_batch")
    for heard in (skipped, scaled, dropping):
        heard.learn(first if heard is skipped else bad(first))
        heard.learn(last)
    assert [
        (w.applied, w.skipped, w.overflow, w.optimizer_step) for w in skipped.windows
    ] == [(False, True, False, 0)]
    assert [
        (w.skipped, w.overflow, w.grad_norm, w.loss_scale) for w in scaled.windows
    ] == [(True, True, math.inf, 4.0)]
    (window,) = dropping.windows
    loss = oracle.loss_and_gradient(MLP, make_weights(MLP), last)[0]
    assert window.applied
    if isinstance(window, ClosedWindow):  # A result does not tell what was dropped.
        assert (window.overflow, window.weight) == (True, 5)
        errors.check("loss", abs(window.loss - loss) / loss, gamma(200, "float32"))


def test_listener_that_raises_loses_nothing(backend: Harness) -> None:
    """The window is closed, the others have heard of it, and the next one is as if
    nothing had been.
    """
    heard, quiet = Heard(backend), Heard(backend)
    heard.own = heard.session.listen(lambda window: 1 // 0)
    first, last = cut(standard_batch(MLP), (7, 5))
    for piece in (first, last, first, last):
        quiet.learn(piece)
        try:
            heard.learn(piece)
        except ZeroDivisionError:
            assert heard.session.result().closed
        else:
            assert not (heard.own and heard.session.result().closed)
    assert [window.optimizer_step for window in heard.windows] == [1, 2]
    assert same(heard.session.parameters(), quiet.session.parameters())


def test_what_moves_per_update_moves_once(backend: Harness, mode: str) -> None:
    """Full, flushed and skipped windows, a discarded one, and flushes of empty ones.
    Where the optimizer calls nothing, the loop looks at the result after each call, and
    once more after each flush.
    """
    session = start(backend, LINEAR, steps=2, mode=mode, skip_norm=1e6)
    moved: list[int] = []

    def move() -> None:
        moved.append(session.state().optimizer_step)

    hooked = session.on_update(move)

    def look() -> None:
        if not hooked and session.result().applied:
            move()

    small = random_tree(LINEAR, 0)
    large = {name: array * 1e9 for name, array in small.items()}
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
