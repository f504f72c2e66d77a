"""Refusals of what Lightning's ``Trainer`` does per micro-batch, each by name, and with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

pytest.importorskip("lightning", reason="needs Lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, WeightAveraging
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gradaccum
from conformance_tests.integration_tests.lightning_model import WARNINGS, Automatic, Manual, furthest, halved, large, loader, trainer
from gradaccum_torch.integrations.lightning import AccumulationCallback

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]

CLIP = 0.05


class Scheduling(Automatic):
    """A scheduler per step that is not gated, or gated and asked for at every other micro-batch."""

    config: dict[str, Any] = {}  # noqa: RUF012

    def configure_optimizers(self) -> Any:
        opt = super().configure_optimizers()
        wanted = dict(self.config)
        scheduler = halved(opt)
        return [opt], [{"scheduler": gradaccum.wrap(scheduler) if wanted.pop("gated") else scheduler, "interval": "step", **wanted}]


class Ungated(Scheduling):
    config = {"gated": False}  # noqa: RUF012


class EveryOther(Scheduling):
    config = {"gated": True, "frequency": 2}  # noqa: RUF012


REFUSED: dict[str, tuple[Callable[[], pl.LightningModule], list[pl.Callback], dict[str, Any], str]] = {
    "clip by norm": (lambda: Automatic({}), [], {"gradient_clip_val": CLIP}, r"^gradient_clip_val: .*clip_norm=0\.05"),
    "clip by value": (
        lambda: Automatic({}),
        [],
        {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"},
        r"^gradient_clip_val: .*register_step_pre_hook",
    ),
    "two accumulations": (lambda: Automatic({}), [], {"accumulate_grad_batches": 2}, r"^accumulate_grad_batches: .*steps=2"),
    "a later one": (lambda: Automatic({}), [GradientAccumulationScheduler({1: 2})], {}, r"^accumulate_grad_batches: .*steps=2"),
    "bare scheduler": (lambda: Ungated({}), [], {}, r"^lr_scheduler: .*gradaccum\.wrap\(scheduler\)"),
    "every other": (lambda: EveryOther({}), [], {}, "^lr_scheduler: .*frequency 2"),
    "moving average": (lambda: Automatic({}), [EMAWeightAveraging(decay=0.5)], {}, r"^callbacks: .*result\.applied"),
    "average": (lambda: Automatic({}), [WeightAveraging()], {}, r"^callbacks: .*result\.applied"),
    "no wrapper": (lambda: Automatic(None), [], {}, r"^configure_optimizers: .*gradaccum\.wrap\(optimizer, steps=4\)"),
}


@pytest.mark.parametrize("options", [{}, {"separate_sums": True}], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, options: dict[str, Any]) -> None:
    make, callbacks, trainer_options, words = REFUSED[name]
    model = make()
    model.options = None if model.options is None else options
    with pytest.raises(gradaccum.UsageError, match=words):
        trainer(AccumulationCallback(), *callbacks, **trainer_options).fit(model, loader(8))


@pytest.mark.parametrize("options", [{}, {"separate_sums": True}], ids=str)
def test_clip_norm_in_place_of_gradient_clip_val(options: dict[str, Any]) -> None:
    model = Automatic({"clip_norm": CLIP, **options})
    trainer().fit(model, loader())
    assert furthest(model.net, large(change=lambda net: clip_grad_norm_(net.parameters(), CLIP))) < 1e-6, "1e-6 stands in torch's clip"
    assert furthest(model.net, large()) > 1e-3


class ClippingByValue(Automatic):
    """What the refusal of ``gradient_clip_algorithm="value"`` says."""

    def configure_optimizers(self) -> Any:
        opt = super().configure_optimizers()
        opt.register_step_pre_hook(lambda *_: clip_grad_value_(self.net.parameters(), CLIP))
        return opt


@pytest.mark.parametrize("options", [{}, {"separate_sums": True}], ids=str)
def test_hook_in_place_of_clipping_by_value(options: dict[str, Any]) -> None:
    model = ClippingByValue(options)
    trainer().fit(model, loader())
    assert furthest(model.net, large(change=lambda net: clip_grad_value_(net.parameters(), CLIP))) < 1e-12
    assert furthest(model.net, large()) > 1e-3


def test_clipping_without_the_callback_is_refused() -> None:
    """Where the sum is in ``.grad``, the wrapper itself sees that it was clipped."""
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        trainer(pl.Callback(), gradient_clip_val=CLIP).fit(Automatic({}), loader())


def test_lightnings_own_scaler_is_refused() -> None:
    model = Automatic({})
    model.net.float()
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(gradaccum.UsageError, match="loss_scale=scaler"):
        trainer(plugins=[plugin]).fit(model, loader(dtype=torch.float32))


def test_clipping_is_lightnings_refusal_in_manual_optimization() -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="gradient_clip_val"):
        trainer(gradient_clip_val=CLIP).fit(Manual({}), loader())
