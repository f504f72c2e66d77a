"""Lightning's ``Trainer`` over a wrapped optimizer trains as the bare optimizer does on
the large batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("lightning", reason="needs Lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import gradaccum
from conformance_tests.integration_tests.lightning_model import (
    ROWS,
    STEPS,
    WARNINGS,
    Automatic,
    Manual,
    X,
    Y,
    halved,
    inner_of,
    large,
    loader,
    loss_of,
    make_net,
    trainer,
)
from conformance_tests.integration_tests.regression import distance
from gradaccum_torch.integrations.lightning import AccumulationCallback

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]

SUMS = [{}, {"separate_sums": True}]


@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("module", [Automatic, Manual])
def test_training_equals_large_batches(
    module: type[Automatic], gate: bool, options: dict[str, Any]
) -> None:
    model, run = module(options, gate), trainer()
    run.fit(model, loader())
    assert distance(model.net, large(gate=gate)) < 1e-12
    opt = run.optimizers[0]
    assert (opt.result.optimizer_step, opt.result.micro_step, run.global_step) == (
        8,
        0,
        26,
    )


def test_bf16_mixed_equals_lightnings_own() -> None:
    """Lightning divides each loss by four, which is exact: the same bits."""
    model, own = Automatic({}), Automatic(None)
    for module, callback, steps in (
        (model, AccumulationCallback(), 1),
        (own, pl.Callback(), STEPS),
    ):
        module.net.float()
        run = trainer(callback, precision="bf16-mixed", accumulate_grad_batches=steps)
        run.fit(module, loader(24, dtype=torch.float32))
    assert all(map(torch.equal, model.net.parameters(), own.net.parameters()))


def test_scaler_of_float16_is_the_windows() -> None:
    """``16-mixed`` with the scaler that `gradaccum.wrap` was given: the scale moves
    once per window. Lightning's own is refused.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    model, foreign = Automatic({"loss_scale": scaler}), Automatic({})
    for module in (model, foreign):
        module.net.float()
    run = trainer(plugins=plugins, max_epochs=1)
    run.fit(model, loader(24, dtype=torch.float32))
    assert run.optimizers[0].result.optimizer_step == 3
    assert scaler.state_dict()["_growth_tracker"] == 3
    assert distance(model.net.double(), large(1, rows=24)) < 2**-8
    with pytest.raises(gradaccum.UsageError, match="loss_scale=scaler"):
        trainer(plugins=plugins).fit(foreign, loader(dtype=torch.float32))


class Validating(Automatic):
    """Notes the updates that were made before each validation, and its loss."""

    def on_fit_start(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        updates = self.trainer.optimizers[0].result.optimizer_step
        self.seen.append((updates, loss_of(self.net, *batch)))


def test_epoch_is_closed_before_its_validation() -> None:
    model = Validating({})
    trainer(num_sanity_val_steps=0).fit(model, loader(), loader(size=26))
    assert [updates for updates, _ in model.seen] == [4, 8]
    expected = torch.stack([loss_of(large(epochs), X, Y) for epochs in (1, 2)])
    found = torch.stack([loss for _, loss in model.seen])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_validation_in_mid_window() -> None:
    """Lightning clears the model's gradients before it validates: refused where the sum
    is in ``.grad``.
    """
    options: dict[str, Any] = {"val_check_interval": 3, "num_sanity_val_steps": 0}
    with pytest.raises(gradaccum.UsageError, match="separate_sums=True"):
        trainer(**options).fit(Validating({}), loader(), loader())
    model = Validating({"separate_sums": True})
    trainer(**options).fit(model, loader(), loader(size=26))
    assert [updates for updates, _ in model.seen] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert distance(model.net, large()) < 1e-12


@pytest.mark.parametrize(
    "ends", [{"limit_train_batches": 7}, {"max_steps": 7}], ids=str
)
def test_last_window_is_closed_where_training_stops(ends: dict[str, int]) -> None:
    model = Automatic({})
    trainer(max_epochs=1, **{"max_steps": -1, **ends}).fit(model, loader())
    assert distance(model.net, large(1, rows=14)) < 1e-12


class Weighing(Automatic):
    """The last batch of a loader has fewer rows, and weighs as much; the second one has
    no loss.
    """

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        self.rows = len(batch[0])
        return None if batch_idx == 1 else loss_of(self.net, *batch)

    def backward(self, loss: Tensor) -> None:
        self.trainer.optimizers[0].backward(loss, weight=self.rows)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("options", SUMS, ids=str)
def test_batches_by_their_weight(options: dict[str, Any]) -> None:
    model, net = Weighing(options), make_net()
    trainer(max_epochs=1).fit(model, loader(7))
    rows = [0, 1, 4, 5, 6]
    loss_of(net, X[rows], Y[rows]).backward()
    inner_of(net).step()
    assert distance(model.net, net) < 1e-12


class Averaging(EMAWeightAveraging):
    """Averages once per update."""

    def setup(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str
    ) -> None:
        super().setup(trainer, pl_module, stage)
        self.trainer = trainer

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        return step_idx is not None and self.trainer.optimizers[0].result.applied


def test_moving_average_once_per_update() -> None:
    model, bare = Automatic({}), Automatic(None)
    trainer(AccumulationCallback(), Averaging(decay=0.5)).fit(model, loader())
    trainer(EMAWeightAveraging(decay=0.5)).fit(bare, loader(size=STEPS * ROWS))
    assert distance(model.net, bare.net) < 1e-12
    assert distance(model.net, large()) > 1e-3


class Adversarial(pl.LightningModule):
    """Two optimizers in manual optimization, each with the other's parameters toggled
    off.
    """

    automatic_optimization = False

    def __init__(self, options: dict[str, Any] | None) -> None:
        super().__init__()
        self.first, self.second, self.options = make_net(), make_net(), options

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        x, y = batch
        for place, opt in enumerate(self.optimizers()):
            with opt.toggle_model():
                loss = loss_of(self.second, self.first(x).expand(-1, 5), y)
                self.manual_backward(loss + (0 if place else loss_of(self.first, x, y)))
                opt.step()
                opt.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        made = [
            torch.optim.SGD(net.parameters(), lr=0.01)
            for net in (self.first, self.second)
        ]
        if self.options is None:
            return made
        return [gradaccum.wrap(each, steps=STEPS, **self.options) for each in made]


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_two_optimizers_in_manual_optimization(options: dict[str, Any]) -> None:
    """One window: the first network's is the large batch's. The second one's loss sees
    the first's update in the last micro-batch only.
    """
    model, bare = Adversarial(options), Adversarial(None)
    trainer(max_epochs=1).fit(model, loader(8))
    trainer(pl.Callback(), max_epochs=1).fit(bare, loader(8, size=8))
    assert distance(model.first, bare.first) < 1e-12


# Refusals of what Lightning's ``Trainer`` does per micro-batch, each by name, and with
# what to write instead.


CLIP = 0.05


class Scheduling(Automatic):
    """A scheduler per step that is not gated, or gated and asked for at every other
    micro-batch.
    """

    frequency = 1

    def configure_optimizers(self) -> Any:
        opt = super().configure_optimizers()
        scheduler = halved(opt) if self.frequency == 1 else gradaccum.wrap(halved(opt))
        config = {"interval": "step", "frequency": self.frequency}
        return [opt], [{"scheduler": scheduler, **config}]


class EveryOther(Scheduling):
    frequency = 2


REFUSED: dict[str, tuple[type[Automatic], list[Any], dict[str, Any], str]] = {
    "clip by norm": (
        Automatic,
        [],
        {"gradient_clip_val": CLIP},
        r"gradient_clip_val: .*clip_norm=0\.05",
    ),
    "clip by value": (
        Automatic,
        [],
        {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"},
        "gradient_clip_val: .*register_step_pre_hook",
    ),
    "two accumulations": (
        Automatic,
        [],
        {"accumulate_grad_batches": 2},
        "accumulate_grad_batches: .*steps=2",
    ),
    "a later one": (
        Automatic,
        [GradientAccumulationScheduler({1: 2})],
        {},
        "accumulate_grad_batches: .*steps=2",
    ),
    "bare scheduler": (
        Scheduling,
        [],
        {},
        r"lr_scheduler: .*gradaccum\.wrap\(scheduler\)",
    ),
    "every other": (EveryOther, [], {}, "lr_scheduler: .*frequency 2"),
}


@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize(
    ("module", "callbacks", "given", "words"), REFUSED.values(), ids=REFUSED
)
def test_refused_by_name(
    module: type[Automatic],
    callbacks: list[Any],
    given: dict[str, Any],
    words: str,
    options: dict[str, Any],
) -> None:
    run = trainer(AccumulationCallback(), *callbacks, **given)
    with pytest.raises(gradaccum.UsageError, match=f"^{words}"):
        run.fit(module(options), loader(8))


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        (None, {}, r"^configure_optimizers: .*gradaccum\.wrap\(optimizer, steps=4\)"),
        ({}, {"callbacks": [], "gradient_clip_val": CLIP}, "clip_norm="),
    ],
    ids=["no wrapper", "clipping without the callback"],
)
def test_refused_optimizer(options: Any, given: dict[str, Any], words: str) -> None:
    """Where the sum is in ``.grad``, the wrapper itself sees that it was clipped."""
    with pytest.raises(gradaccum.UsageError, match=words):
        trainer(**given).fit(Automatic(options), loader(8))


# Lightning's checkpoints of an open window: a resumed run has the bits of the run that
# was not interrupted.


class Resumable:
    """A loader that Lightning can set on where it stopped, as those of torchdata
    can.
    """

    def __init__(self) -> None:
        self._position = 0

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._position %= len(self)
        while self._position < len(self):
            start = 2 * self._position
            self._position += 1
            yield X[start : start + 2], Y[start : start + 2]

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=3,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize("module", [Automatic, Manual])
def test_resumed_in_mid_window(
    module: type[Automatic], options: dict[str, Any], gate: bool, tmp_path: Path
) -> None:
    """Without the callback Lightning clears the gradients of the model when it has
    loaded the optimizer. Sums of their own are not there.
    """
    whole = module(options, gate)
    run = trainer(AccumulationCallback(), saving(tmp_path), enable_checkpointing=True)
    run.fit(whole, Resumable())
    for step, micro_step in ((3, 3), (15, 2)):
        path = tmp_path / f"step={step}.ckpt"
        (saved,) = torch.load(path, weights_only=True)["optimizer_states"]
        assert saved["gradaccum"]["micro_step"] == micro_step
        resumed, run = module(options, gate), trainer()
        run.fit(resumed, Resumable(), ckpt_path=path)
        assert all(map(torch.equal, resumed.net.parameters(), whole.net.parameters()))
        assert run.optimizers[0].result.optimizer_step == 8
    if not options:
        with pytest.raises(gradaccum.UsageError, match="separate_sums=True"):
            trainer(pl.Callback()).fit(
                module(options, gate), Resumable(), ckpt_path=path
            )
