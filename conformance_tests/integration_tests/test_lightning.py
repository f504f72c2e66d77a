"""Lightning's ``Trainer`` over a wrapped optimizer trains as the bare optimizer does on
the large batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("lightning", reason="needs Lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import gradaccum
from conformance_tests.integration_tests.lightning_model import (
    STEPS,
    WARNINGS,
    Automatic,
    Manual,
    X,
    Y,
    furthest,
    halved,
    inner_of,
    large,
    loader,
    loss_of,
    make_net,
    trainer,
    windows,
)
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
    assert furthest(model.net, large(gate=gate)) < 1e-12
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
        trainer(callback, precision="bf16-mixed", accumulate_grad_batches=steps).fit(
            module, loader(24, dtype=torch.float32)
        )
    assert all(map(torch.equal, model.net.parameters(), own.net.parameters()))


def test_scaler_of_float16_is_the_windows() -> None:
    """``16-mixed`` with the scaler that `gradaccum.wrap` was given: the scale moves
    once per window.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = Automatic({"loss_scale": scaler})
    model.net.float()
    run = trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)], max_epochs=1)
    run.fit(model, loader(24, dtype=torch.float32))
    assert (
        run.optimizers[0].result.optimizer_step,
        scaler.state_dict()["_growth_tracker"],
    ) == (3, 3)
    assert furthest(model.net.double(), large(1, rows=24)) < 2**-8


class Validating(Automatic):
    """Notes the validation loss and the updates that were made before it."""

    def on_fit_start(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.seen.append(
            (
                self.trainer.optimizers[0].result.optimizer_step,
                loss_of(self.net, *batch),
            )
        )


def test_epoch_is_closed_before_its_validation() -> None:
    model = Validating({})
    trainer(num_sanity_val_steps=0).fit(model, loader(), loader(size=26))
    assert [updates for updates, _ in model.seen] == [4, 8]
    for epochs, (_, loss) in enumerate(model.seen, 1):
        torch.testing.assert_close(
            loss, loss_of(large(epochs), X, Y), rtol=1e-12, atol=0
        )


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
    assert furthest(model.net, large()) < 1e-12


@pytest.mark.parametrize(
    "ends", [{"limit_train_batches": 7}, {"max_steps": 7}], ids=str
)
def test_last_window_is_closed_where_training_stops(ends: dict[str, int]) -> None:
    model = Automatic({})
    trainer(max_epochs=1, **{"max_steps": -1, **ends}).fit(model, loader())
    assert furthest(model.net, large(1, rows=14)) < 1e-12


class Weighing(Automatic):
    """The last batch of a loader has fewer rows, and weighs as much."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.rows = len(batch[0])
        return loss_of(self.net, *batch)

    def backward(self, loss: Tensor) -> None:
        self.trainer.optimizers[0].backward(loss, weight=self.rows)


def test_short_last_batch_by_its_weight() -> None:
    for module, same in ((Weighing, True), (Automatic, False)):
        model = module({})
        trainer().fit(model, loader(23))
        assert (furthest(model.net, large(rows=23)) < 1e-12) == same


class Skipping(Automatic):
    """The second batch has no loss."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else loss_of(self.net, *batch)


@pytest.mark.filterwarnings(
    "ignore:`training_step` returned `None`. If this was on purpose, ignore this"
    " warning..."
)
@pytest.mark.parametrize("options", SUMS, ids=str)
def test_batch_without_loss_weighs_nothing(options: dict[str, Any]) -> None:
    model, net = Skipping(options), make_net()
    trainer(max_epochs=1).fit(model, loader(8))
    loss_of(net, torch.cat([X[:2], X[4:8]]), torch.cat([Y[:2], Y[4:8]])).backward()
    inner_of(net).step()
    assert furthest(model.net, net) < 1e-12


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
    model, net = Automatic({}), make_net()
    trainer(AccumulationCallback(), Averaging(decay=0.5)).fit(model, loader())
    opt = inner_of(net)
    averaged = torch.optim.swa_utils.AveragedModel(
        net, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.5)
    )
    for _ in range(2):
        for x, y in windows():
            opt.zero_grad()
            loss_of(net, x, y).backward()
            opt.step()
            averaged.update_parameters(net)
    assert furthest(model.net, averaged.module) < 1e-12


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
        one, two = self.optimizers()
        for opt, loss in (
            (
                one,
                lambda: (
                    loss_of(self.second[0], self.first(x).expand(-1, 5), y)
                    + loss_of(self.first, x, y)
                ),
            ),
            (two, lambda: loss_of(self.second, self.first(x).expand(-1, 5), y)),
        ):
            with opt.toggle_model():
                self.manual_backward(loss())
                opt.step()
                opt.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        made = [
            torch.optim.SGD(net.parameters(), lr=0.01)
            for net in (self.first, self.second)
        ]
        return (
            made
            if self.options is None
            else [gradaccum.wrap(each, steps=STEPS, **self.options) for each in made]
        )


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_two_optimizers_in_manual_optimization(options: dict[str, Any]) -> None:
    """One window: the first network's is the large batch's. The second one's loss sees
    the first's update in the last micro-batch only.
    """
    model, bare = Adversarial(options), Adversarial(None)
    trainer(max_epochs=1).fit(model, loader(8))
    trainer(pl.Callback(), max_epochs=1).fit(bare, loader(8, size=8))
    assert furthest(model.first, bare.first) < 1e-12


@pytest.mark.parametrize("module", [Automatic, Manual])
def test_proxy_loads_a_state(module: type[Automatic]) -> None:
    """``self.optimizers()`` is a proxy whose methods are the optimizer's: what it
    loads, the optimizer and its gate know of.
    """
    model, run = module({}, gate=True), trainer(max_epochs=1)
    run.fit(model, loader(24))
    proxy, opt = model.optimizers(), run.optimizers[0]
    assert proxy is not opt
    proxy.load_state_dict(opt.state_dict())
    assert opt._loads == [3]


# Refusals of what Lightning's ``Trainer`` does per micro-batch, each by name, and with
# what to write instead.


CLIP = 0.05


class Scheduling(Automatic):
    """A scheduler per step that is not gated, or gated and asked for at every other
    micro-batch.
    """

    config: dict[str, Any] = {}  # noqa: RUF012

    def configure_optimizers(self) -> Any:
        opt = super().configure_optimizers()
        wanted = dict(self.config)
        scheduler = halved(opt)
        return [opt], [
            {
                "scheduler": (
                    gradaccum.wrap(scheduler) if wanted.pop("gated") else scheduler
                ),
                "interval": "step",
                **wanted,
            }
        ]


class Ungated(Scheduling):
    config = {"gated": False}  # noqa: RUF012


class EveryOther(Scheduling):
    config = {"gated": True, "frequency": 2}  # noqa: RUF012


REFUSED: dict[
    str, tuple[Callable[[], pl.LightningModule], list[pl.Callback], dict[str, Any], str]
] = {
    "clip by norm": (
        lambda: Automatic({}),
        [],
        {"gradient_clip_val": CLIP},
        r"^gradient_clip_val: .*clip_norm=0\.05",
    ),
    "clip by value": (
        lambda: Automatic({}),
        [],
        {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"},
        r"^gradient_clip_val: .*register_step_pre_hook",
    ),
    "two accumulations": (
        lambda: Automatic({}),
        [],
        {"accumulate_grad_batches": 2},
        r"^accumulate_grad_batches: .*steps=2",
    ),
    "a later one": (
        lambda: Automatic({}),
        [GradientAccumulationScheduler({1: 2})],
        {},
        r"^accumulate_grad_batches: .*steps=2",
    ),
    "bare scheduler": (
        lambda: Ungated({}),
        [],
        {},
        r"^lr_scheduler: .*gradaccum\.wrap\(scheduler\)",
    ),
    "every other": (lambda: EveryOther({}), [], {}, "^lr_scheduler: .*frequency 2"),
    "moving average": (
        lambda: Automatic({}),
        [EMAWeightAveraging(decay=0.5)],
        {},
        r"^callbacks: .*result\.applied",
    ),
    "average": (
        lambda: Automatic({}),
        [WeightAveraging()],
        {},
        r"^callbacks: .*result\.applied",
    ),
    "no wrapper": (
        lambda: Automatic(None),
        [],
        {},
        r"^configure_optimizers: .*gradaccum\.wrap\(optimizer, steps=4\)",
    ),
}


@pytest.mark.parametrize("options", [{}, {"separate_sums": True}], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, options: dict[str, Any]) -> None:
    make, callbacks, trainer_options, words = REFUSED[name]
    model = make()
    model.options = None if model.options is None else options
    with pytest.raises(gradaccum.UsageError, match=words):
        trainer(AccumulationCallback(), *callbacks, **trainer_options).fit(
            model, loader(8)
        )


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
@pytest.mark.parametrize(
    "options", [{}, {"separate_sums": True, "clip_norm": 0.1}], ids=str
)
@pytest.mark.parametrize("module", [Automatic, Manual])
def test_resumed_in_mid_window(
    module: type[Automatic], options: dict[str, Any], gate: bool, tmp_path: Path
) -> None:
    whole = module(options, gate)
    trainer(AccumulationCallback(), saving(tmp_path), enable_checkpointing=True).fit(
        whole, Resumable()
    )
    for step, micro_step in ((3, 3), (6, 2), (9, 1), (15, 2)):
        path = tmp_path / f"step={step}.ckpt"
        (saved,) = torch.load(path, weights_only=True)["optimizer_states"]
        assert saved["gradaccum"]["micro_step"] == micro_step
        resumed, run = module(options, gate), trainer()
        run.fit(resumed, Resumable(), ckpt_path=path)
        assert all(map(torch.equal, resumed.net.parameters(), whole.net.parameters()))
        assert run.optimizers[0].result.optimizer_step == 8
    if not options:
        assert furthest(whole.net, large(gate=gate)) < 1e-12


def test_resumed_without_the_callback_is_refused(tmp_path: Path) -> None:
    """Lightning clears the gradients of the model when it has loaded the optimizer.
    Sums of their own are not there.
    """
    for options in ({}, {"separate_sums": True}):
        folder = tmp_path / str(len(options))
        trainer(
            AccumulationCallback(),
            saving(folder),
            enable_checkpointing=True,
            max_epochs=1,
        ).fit(Automatic(options), Resumable())
        model, run = Automatic(options), trainer(Callback(), max_epochs=1)
        with (
            nullcontext()
            if options
            else pytest.raises(gradaccum.UsageError, match="separate_sums=True")
        ):
            run.fit(model, Resumable(), ckpt_path=folder / "step=3.ckpt")
