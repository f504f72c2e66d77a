"""Lightning's ``Trainer`` over a wrapped optimizer trains as the bare optimizer does on
the large batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from gradaccum import UsageError
from gradaccum_torch.integrations.lightning import AccumulationCallback

from .lightning_model import (
    WARNINGS,
    Automatic,
    Manual,
    falling,
    inner_of,
    large,
    loader,
    trainer,
)
from .regression import X, Y, distance, make_net, mean_square

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]
by_sum = pytest.mark.parametrize("options", [{}, {"separate_sums": True}], ids=str)


@by_sum
@pytest.mark.parametrize("module", [Automatic, Manual])
def test_training_equals_large_batches(
    module: type[Automatic], options: dict[str, Any]
) -> None:
    model = module(options)
    run = trainer()
    run.fit(model, loader())
    assert distance(model.net, large()) < 1e-12
    result = run.optimizers[0].result
    assert result.optimizer_step == 8
    assert result.micro_step == 0
    assert run.global_step == 26


def test_bf16_mixed_equals_lightnings_own() -> None:
    """Lightning divides each loss by four, which is exact: the same bits."""
    data = loader(24, dtype=torch.float32)
    model = Automatic({})
    bare = Automatic(None)
    model.net.float()
    bare.net.float()
    trainer(precision="bf16-mixed").fit(model, data)
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 4}
    trainer(pl.Callback(), **options).fit(bare, data)
    assert distance(model.net, bare.net) == 0


def test_scaler_of_float16_is_the_windows() -> None:
    """``16-mixed`` with the scaler that `gradaccum.wrap` was given: the scale moves
    once per window. Lightning's own is refused.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    data = loader(24, dtype=torch.float32)
    model = Automatic({"loss_scale": scaler})
    without_scaler = Automatic({})
    model.net.float()
    without_scaler.net.float()
    run = trainer(plugins=plugins, max_epochs=1)
    run.fit(model, data)
    assert run.optimizers[0].result.optimizer_step == 3
    assert scaler.state_dict()["_growth_tracker"] == 3
    assert distance(model.net.double(), large(1, rows=24)) < 2**-8
    with pytest.raises(UsageError, match="loss_scale=scaler"):
        trainer(plugins=plugins).fit(without_scaler, data)


class Validating(Automatic):
    """Notes the updates that were made before each validation."""

    def on_fit_start(self) -> None:
        self.updates: list[int] = []

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.updates.append(self.trainer.optimizers[0].result.optimizer_step)


def test_epoch_is_closed_before_its_validation() -> None:
    model = Validating({})
    trainer(num_sanity_val_steps=0).fit(model, loader(), loader(size=26))
    assert model.updates == [4, 8]
    assert distance(model.net, large()) < 1e-12


def test_validation_in_mid_window() -> None:
    """Lightning clears the model's gradients before it validates: refused where the sum
    is in ``.grad``.
    """
    options = {"val_check_interval": 3, "num_sanity_val_steps": 0}
    with pytest.raises(UsageError, match="separate_sums=True"):
        trainer(**options).fit(Validating({}), loader(), loader())
    model = Validating({"separate_sums": True})
    trainer(**options).fit(model, loader(), loader(size=26))
    assert model.updates == [0, 1, 2, 3, 4, 5, 6, 7]
    assert distance(model.net, large()) < 1e-12


@pytest.mark.parametrize(
    "options", [{"limit_train_batches": 7, "max_steps": -1}, {"max_steps": 7}], ids=str
)
def test_last_window_is_closed_where_training_stops(options: dict[str, int]) -> None:
    model = Automatic({})
    trainer(max_epochs=1, **options).fit(model, loader())
    assert distance(model.net, large(1, rows=14)) < 1e-12


class Weighing(Automatic):
    """The last batch of a loader has fewer rows, and weighs as much; the second one has
    no loss.
    """

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        self.rows = len(batch[0])
        return None if batch_idx == 1 else mean_square(self.net, *batch)

    def backward(self, loss: Tensor) -> None:
        self.trainer.optimizers[0].backward(loss, weight=self.rows)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@by_sum
def test_batches_by_their_weight(options: dict[str, Any]) -> None:
    model = Weighing(options)
    net = make_net()
    trainer(max_epochs=1).fit(model, loader(7))
    rows = [0, 1, 4, 5, 6]
    mean_square(net, X[rows], Y[rows]).backward()
    inner_of(net).step()
    assert distance(model.net, net) < 1e-12


class Averaging(EMAWeightAveraging):
    """Averages once per update."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.trainer = trainer

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        return step_idx is not None and self.trainer.optimizers[0].result.applied


def test_moving_average_once_per_update() -> None:
    model = Automatic({})
    bare = Automatic(None)
    trainer(AccumulationCallback(), Averaging(decay=0.5)).fit(model, loader())
    trainer(EMAWeightAveraging(decay=0.5)).fit(bare, loader(size=8))
    assert distance(model.net, bare.net) < 1e-12
    assert distance(model.net, large()) > 1e-3


# Refusals of what Lightning's ``Trainer`` does per micro-batch, each by name, and with
# what to write instead.


class Scheduling(Automatic):
    """A scheduler per step that is not gated."""

    def configure_optimizers(self) -> Any:
        (opt,), (config,) = super().configure_optimizers()
        return [opt], [{**config, "scheduler": falling(opt)}]


REFUSED = [
    (Automatic, {"gradient_clip_val": 0.05}, r"gradient_clip_val: .*clip_norm=0\.05"),
    (Automatic, {"accumulate_grad_batches": 2}, "accumulate_grad_batches: .*steps=2"),
    (
        Automatic,
        {"callbacks": [AccumulationCallback(), GradientAccumulationScheduler({1: 2})]},
        "accumulate_grad_batches: .*steps=2",
    ),
    (Scheduling, {}, r"lr_scheduler: .*gradaccum\.wrap\(scheduler\)"),
]


@pytest.mark.parametrize(("module", "options", "words"), REFUSED)
def test_refused_by_name(
    module: type[Automatic], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=f"^{words}"):
        trainer(**options).fit(module({}), loader(8))


def test_refused_optimizer() -> None:
    words = r"^configure_optimizers: .*gradaccum\.wrap\(optimizer, steps=4\)"
    with pytest.raises(UsageError, match=words):
        trainer().fit(Automatic(None), loader(8))


class Resumable:
    """A loader that Lightning can set on where it stopped, as those of torchdata
    can.
    """

    position = 0

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.position %= len(self)
        while self.position < len(self):
            rows = slice(2 * self.position, 2 * self.position + 2)
            self.position += 1
            yield X[rows], Y[rows]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@by_sum
@pytest.mark.parametrize("module", [Automatic, Manual])
def test_resumed_in_mid_window(
    module: type[Automatic], options: dict[str, Any], tmp_path: Path
) -> None:
    """A resumed run has the bits of the uninterrupted one. Without the callback
    Lightning clears the gradients of the model when it has loaded the optimizer.
    """
    saving = ModelCheckpoint(
        dirpath=tmp_path,
        filename="{step}",
        every_n_train_steps=3,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    uninterrupted = module(options)
    run = trainer(AccumulationCallback(), saving, enable_checkpointing=True)
    run.fit(uninterrupted, Resumable())
    for step, micro_step in ((3, 3), (15, 2)):
        path = tmp_path / f"step={step}.ckpt"
        (saved,) = torch.load(path, weights_only=True)["optimizer_states"]
        assert saved["gradaccum"]["micro_step"] == micro_step
        resumed = module(options)
        run = trainer()
        run.fit(resumed, Resumable(), ckpt_path=path)
        assert distance(resumed.net, uninterrupted.net) == 0
        assert run.optimizers[0].result.optimizer_step == 8
    if not options:
        run = trainer(pl.Callback())
        with pytest.raises(UsageError, match="separate_sums=True"):
            run.fit(module(options), Resumable(), ckpt_path=path)
