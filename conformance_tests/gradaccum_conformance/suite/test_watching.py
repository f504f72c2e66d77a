"""A `gradaccum.Watch` that is shown each result hears of every window once, as of the large batch."""

import gradaccum
from gradaccum.watching import ClosedWindow
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import gamma
from gradaccum_conformance.harness import Harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import cut, global_norm, standard_batch, start
from gradaccum_conformance.specs import MLP, Batch, make_weights


def test_each_window_is_heard_once(backend: Harness, mode: str, errors: Errors) -> None:
    """A full one and a flushed one; neither a discarded one nor an empty flush."""
    heard: list[ClosedWindow] = []
    session, watch, batch = start(backend, MLP, steps=2, mode=mode), gradaccum.Watch(heard.append), standard_batch(MLP)
    loss, gradient = oracle.loss_and_gradient(MLP, make_weights(MLP), batch)

    def learn(piece: Batch) -> None:
        told = session.micro_batch(piece, weight=piece.items)
        watch(session.result(), loss=told, weight=piece.items)

    for piece in cut(batch, (7, 5)):
        assert not heard
        learn(piece)
    (window,) = heard
    assert (window.optimizer_step, window.applied, window.weight, window.micro_batches) == (1, True, 12, 2)
    errors.check("loss", abs(window.loss - loss) / loss, gamma(200, "float32"))
    errors.check("norm", abs(window.grad_norm / global_norm(gradient) - 1), gamma(2000, "float32"))
    for close in (session.discard, session.flush, session.flush):
        if len(heard) == 1:
            learn(batch)
        close()
        watch(session.result())
    assert [each.micro_batches for each in heard] == [2, 1]
    assert all(type(value) in (int, float, bool) for each in heard for value in each)
