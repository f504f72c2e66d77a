"""timm's optimizers and schedulers: as on the large batches, with the schedule counted
in updates.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

pytest.importorskip("timm", reason="needs timm")

import timm.optim
import timm.scheduler
import timm.utils
import torch
from torch import nn

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import (
    PART,
    ROWS,
    SUMS,
    WINDOW,
    Loop,
    assert_equals_large_batches,
    furthest,
)

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Using backward.. with create_graph=True will create a reference"
        " cycle:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"
    ),
]

NEED_A_GPU = [
    name for name in timm.optim.list_optimizers() if name.startswith(("bnb", "fused"))
]
"""bitsandbytes' and APEX's: timm refuses to make them without CUDA."""
NAMES = [name for name in timm.optim.list_optimizers() if name not in NEED_A_GPU]
LOOPS = {"adahessian": Loop(graph=True)}


@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        *(
            f"lookahead_{name}"
            for name in ("adamw", "lamb", "lion", "muon", "radam", "sgd")
        ),
    ],
)
def test_optimizer_equals_large_batches(name: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return timm.optim.create_optimizer_v2(
            model, opt=name, lr=0.01, weight_decay=0.05
        )

    # Kron compiles its small products, which takes a minute.
    with torch.compiler.set_stance("force_eager"):
        assert_equals_large_batches(make, LOOPS.get(name, Loop()))


def test_layer_decay_and_no_decay_groups() -> None:
    """Groups of rates and decays of their own; a `clip_norm` beside them is over all of
    them.
    """

    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = timm.optim.param_groups_weight_decay(model, 0.05)
        return timm.optim.create_optimizer_v2(groups, opt="nadamw", lr=0.01)

    assert_equals_large_batches(make)


SCHEDULERS: dict[str, dict[str, Any]] = {
    "CosineLRScheduler": {
        "t_initial": 10,
        "lr_min": 1e-3,
        "warmup_t": 2,
        "warmup_lr_init": 1e-3,
    },
    "StepLRScheduler": {"decay_t": 2, "decay_rate": 0.5},
    "MultiStepLRScheduler": {"decay_t": [2, 4], "decay_rate": 0.5},
    "PolyLRScheduler": {"t_initial": 10, "lr_min": 1e-3},
    "TanhLRScheduler": {"t_initial": 10, "lr_min": 1e-3},
}


@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedule_per_update(name: str, options: dict[str, Any]) -> None:
    """The training script of timm counts the calls of ``step``; the gate hands on the
    number of updates, whatever the loop has counted.
    """
    kind, loop = getattr(timm.scheduler, name), Loop()

    def run(wrapped: bool) -> tuple[nn.Module, list[float]]:
        model, rates = loop.model(), []
        bare = torch.optim.SGD(model.parameters(), lr=0.1)
        opt: Any = (
            gradaccum.wrap(bare, steps=WINDOW // PART, **options) if wrapped else bare
        )
        scheduler = kind(opt, t_in_epochs=False, **SCHEDULERS[name])
        schedule = gradaccum.wrap(scheduler) if wrapped else scheduler
        calls = 0
        for epoch in range(2):
            for start in range(0, ROWS, PART if wrapped else WINDOW):
                opt.zero_grad()
                loop.loss(model, start, PART if wrapped else WINDOW).backward()
                opt.step()
                calls += 1
                schedule.step_update(num_updates=calls)
                if not wrapped or opt.result.applied:
                    rates.append(opt.param_groups[0]["lr"])
            if wrapped:
                opt.flush()
                schedule.step_update(num_updates=calls)
                rates.append(opt.param_groups[0]["lr"])
            schedule.step(epoch + 1)
        return model, rates

    (mine, rates), (bare, expected) = run(True), run(False)
    assert rates == expected
    assert len(set(rates)) > 1
    assert furthest(mine, bare) < 1e-12


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_model_ema_per_update(options: dict[str, Any]) -> None:
    loop = Loop()

    def run(wrapped: bool) -> nn.Module:
        model = loop.model()
        bare = torch.optim.SGD(model.parameters(), lr=0.1)
        opt: Any = (
            gradaccum.wrap(bare, steps=WINDOW // PART, **options) if wrapped else bare
        )
        ema = timm.utils.ModelEmaV3(model, decay=0.5)
        for start in range(0, 16, PART if wrapped else WINDOW):
            opt.zero_grad()
            loop.loss(model, start, PART if wrapped else WINDOW).backward()
            opt.step()
            if not wrapped or opt.result.applied:
                ema.update(
                    model,
                    step=opt.result.optimizer_step if wrapped else start // WINDOW + 1,
                )
        return ema.module

    assert furthest(run(True), run(False)) < 1e-12
    assert furthest(run(True), loop.model()) > 1e-3


def test_adaptive_clipping_of_a_part_is_refused() -> None:
    """The loop of timm clips what is in ``.grad``, and that is a sum that still
    grows.
    """
    loop = Loop()
    model = loop.model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    loop.loss(model, 0, 2).backward()
    timm.utils.dispatch_clip_grad(model.parameters(), 1e-3, mode="agc")
    with pytest.raises(gradaccum.UsageError, match="register_step_pre_hook"):
        opt.step()


def test_adaptive_clipping_of_the_window() -> None:
    """The hook that the refusal names."""
    loop = Loop(epochs=1)

    def clipped(model: nn.Module) -> None:
        timm.utils.dispatch_clip_grad(model.parameters(), 1e-3, mode="agc")

    mine, bare = loop.model(), loop.model()
    opt = gradaccum.wrap(torch.optim.SGD(mine.parameters(), lr=0.1), steps=4)
    opt.register_step_pre_hook(lambda *_: clipped(mine))
    for start in range(0, WINDOW, PART):
        loop.loss(mine, start, PART).backward()
        opt.step()
    loop.loss(bare, 0, WINDOW).backward()
    clipped(bare)
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    assert furthest(mine, bare) < 1e-12
