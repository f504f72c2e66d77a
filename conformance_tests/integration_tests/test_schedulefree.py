"""schedulefree: its optimizers, their two modes of weights, and the wrapper that it has
for other optimizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import (
    PART,
    SUMS,
    WINDOW,
    Loop,
    Make,
    assert_equals_large_batches,
    furthest,
)

schedulefree = pytest.importorskip("schedulefree", reason="needs schedulefree")


class ScheduleFree(schedulefree.ScheduleFreeWrapper, torch.optim.Optimizer):  # type: ignore[misc]
    """schedulefree's wrapper is no `torch.optim.Optimizer`; two lines make it one."""


def in_training(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


MAKERS: dict[str, Make] = {
    "AdamWScheduleFree": lambda model: schedulefree.AdamWScheduleFree(
        model.parameters(), lr=0.01, warmup_steps=2
    ),
    "AdamWScheduleFreeReference": lambda model: schedulefree.AdamWScheduleFreeReference(
        model.parameters(), lr=0.01
    ),
    "AdamWScheduleFreePaper": lambda model: schedulefree.AdamWScheduleFreePaper(
        model.parameters(), lr=0.01
    ),
    "RAdamScheduleFree": lambda model: schedulefree.RAdamScheduleFree(
        model.parameters(), lr=0.01
    ),
    "SGDScheduleFree": lambda model: schedulefree.SGDScheduleFree(
        model.parameters(), lr=0.1, foreach=True
    ),
    "SGDScheduleFreeReference": lambda model: schedulefree.SGDScheduleFreeReference(
        model.parameters(), lr=0.1
    ),
    "ScheduleFreeWrapper": lambda model: ScheduleFree(
        torch.optim.SGD(model.parameters(), lr=0.1), momentum=0.9
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_training_equals_large_batches(name: str) -> None:
    assert_equals_large_batches(lambda model: in_training(MAKERS[name](model)))


@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_validation_in_mid_window(name: str, options: dict[str, Any]) -> None:
    """``opt.eval()`` puts the averaged weights into the model, ``opt.train()`` takes
    them out: the open window's sum stays.
    """
    loop = Loop()

    def run(wrapped: bool) -> tuple[nn.Module, list[float]]:
        model, seen = loop.model(), []
        opt = MAKERS[name](model)
        opt = gradaccum.wrap(opt, steps=WINDOW // PART, **options) if wrapped else opt
        opt.train()
        size = PART if wrapped else WINDOW
        for start in range(0, 16, size):
            # Once per window: in its midst, or before it.
            if start % WINDOW == size % WINDOW:
                opt.eval()
                seen.append(float(loop.loss(model, 0, 20).detach()))
                opt.train()
            opt.zero_grad()
            loop.loss(model, start, size).backward()
            opt.step()
        opt.eval()
        return model, seen

    (mine, seen), (bare, expected) = run(True), run(False)
    assert seen == pytest.approx(expected, rel=1e-12)
    assert furthest(mine, bare) < 1e-11


@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_resumed_in_mid_window(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    loop = Loop()

    def micro_batches(model: nn.Module, opt: Any, starts: range) -> None:
        for start in starts:
            opt.zero_grad()
            loop.loss(model, start, PART).backward()
            opt.step()

    def make() -> tuple[nn.Module, Any]:
        model = loop.model()
        return model, in_training(
            gradaccum.wrap(MAKERS[name](model), steps=WINDOW // PART, **options)
        )

    whole, opt = make()
    micro_batches(whole, opt, range(0, 12, PART))
    torch.save([whole.state_dict(), opt.state_dict()], tmp_path / "state.pt")
    micro_batches(whole, opt, range(12, 16, PART))
    model, resumed = make()
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(weights)
    resumed.load_state_dict(state)
    micro_batches(model, resumed, range(12, 16, PART))
    assert all(map(torch.equal, model.parameters(), whole.parameters()))


def test_step_in_eval_mode_is_schedulefrees_error() -> None:
    model = Loop().model()
    opt = gradaccum.wrap(MAKERS["SGDScheduleFree"](model), steps=1)
    Loop().loss(model, 0, 2).backward()
    with pytest.raises(Exception, match="train mode"):
        opt.step()


@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize(
    "kind",
    ["AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"],
)
def test_closure_variant_is_refused(kind: str, options: dict[str, Any]) -> None:
    """It moves the weights before the closure and back after it."""
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=rf"optimizer: .*{kind}, whose step evaluates"
    ):
        gradaccum.wrap(
            getattr(schedulefree, kind)(Loop().model().parameters(), lr=0.01),
            steps=1,
            **options,
        )


def test_its_wrapper_is_refused_as_it_is() -> None:
    opt = schedulefree.ScheduleFreeWrapper(
        torch.optim.SGD(Loop().model().parameters(), lr=0.1)
    )
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"optimizer: .*ScheduleFreeWrapper"
    ):
        gradaccum.wrap(opt, steps=4)
