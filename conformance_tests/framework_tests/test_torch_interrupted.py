"""A call that raises leaves the state before the call or the state after it. Otherwise
the next calls are refused.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradaccum import GradAccumWarning, UsageError

from .torch_model import MAKERS, by_place, loss_of, make, rows_of, values

BITS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}


class Failure(Exception):
    """Raised by a hook, a kernel or the user (Ctrl-C)."""


def failing(*_: object) -> Any:
    raise Failure


class Run:
    """A model and its optimizer in windows of three."""

    def __init__(self, place: str = "in .grad") -> None:
        self.place = place
        self.model, self.opt = make(place, steps=3, inner=MAKERS["sgd_momentum"])

    def loss(self, index: int) -> Tensor:
        return loss_of(self.model, rows_of(index))

    def train(self, number: int = 3, *, first: int = 0) -> None:
        for index in range(first, number):
            self.opt.backward(self.loss(index))
            self.opt.step()

    def require_uninterrupted(self) -> None:
        other = Run(self.place)
        for _ in range(self.opt.result.optimizer_step):
            other.train()
        assert other.opt.result.optimizer_step > 0
        off = BITS[self.model[0].weight.dtype]
        torch.testing.assert_close(
            values(self.model), values(other.model), rtol=off, atol=off
        )


# The end of a window.


@by_place
@pytest.mark.parametrize("hook", ["outer pre", "inner pre", "inner post"])
def test_half_made_update_is_refused(place: str, hook: str) -> None:
    """Nobody looks how far it came: the next calls are refused until `discard` or a
    load.
    """
    run = Run(place)
    run.train()
    opt = run.opt
    state, weights = copy.deepcopy((opt.state_dict(), run.model.state_dict()))
    owner, kind = hook.split()
    hooked = opt if owner == "outer" else opt.optimizer
    handle = getattr(hooked, f"register_step_{kind}_hook")(failing)
    for way_out in (opt.discard, lambda: opt.load_state_dict(state)):
        with pytest.raises(Failure):
            run.train()
        backward = partial(opt.backward, run.loss(0))
        for call in (opt.step, opt.flush, opt.state_dict, backward):
            with pytest.raises(UsageError, match="checkpoint"):
                call()
        assert opt.result.optimizer_step == 1
        way_out()
    handle.remove()
    run.model.load_state_dict(weights)
    run.train()
    run.require_uninterrupted()


# A micro-batch.


def test_step_that_raises_a_warning_is_refused() -> None:
    """The micro-batch was counted, but not everything has noticed it."""
    run = Run()
    run.train(1)
    run.opt.param_groups[0]["lr"] = 2.0
    with pytest.raises(GradAccumWarning, match="scheduler"):
        run.train(2, first=1)
    with pytest.raises(UsageError, match="discard"):
        run.opt.step()


def test_interrupted_addition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the sums have the micro-batch, and others do not."""
    run = Run("kept apart")
    run.train(1)
    run.opt.backward(run.loss(1))

    def add_one(totals, terms):
        totals[0].add_(terms[0])
        raise Failure

    monkeypatch.setattr(torch, "_foreach_add_", add_one)
    with pytest.raises(Failure):
        run.opt.step()
    monkeypatch.undo()
    for call in (run.opt.step, run.opt.flush, run.opt.state_dict):
        with pytest.raises(UsageError, match="discard"):
            call()
    run.opt.discard()
    run.train()
    run.require_uninterrupted()


@by_place
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_half_made_backward_can_be_repeated(place: str, micro_batch: int) -> None:
    """`zero_grad` takes the part that arrived out of the sum. If it cannot, calls are
    refused until `discard`.
    """
    run = Run(place)
    opt = run.opt
    run.train(micro_batch)
    if micro_batch:  # A segment's backward pass ends before the pass around it fails.
        last = run.model[2]
        last.forward = partial(checkpoint, last.forward, use_reentrant=True)
    handle = run.model[0].bias.register_hook(failing)
    with pytest.raises(Failure):
        opt.backward(run.loss(micro_batch))
    handle.remove()
    calls = [opt.step, opt.flush, opt.state_dict]
    if micro_batch:
        calls.append(opt.zero_grad)
    number = {"separate": 1, "kept apart": 2}.get(place, 4)
    for call in calls[:number]:
        with pytest.raises(UsageError, match=r"raised an error.*opt\.discard\(\)"):
            call()
    if micro_batch == 0 or place in ("kept apart", "separate"):
        opt.zero_grad()
    else:
        opt.discard()
        run.train(micro_batch)
    run.train(first=micro_batch)
    run.require_uninterrupted()
