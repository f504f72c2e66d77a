"""Lightning's checkpoints of an open window: a resumed run has the bits of the run that was not interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

pytest.importorskip("lightning", reason="needs Lightning")

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

import gradaccum
from conformance_tests.integration_tests.lightning_model import WARNINGS, Automatic, Manual, X, Y, furthest, large, trainer
from gradaccum_torch.integrations.lightning import AccumulationCallback

WITHOUT_ITS_CALLBACK = "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided"
AFTER_THE_STEP = "ignore:Using ModelCheckpoint with manual optimization and every_n_train_steps, but no pre-optimization state was saved."

pytestmark = [pytest.mark.filterwarnings(line) for line in (*WARNINGS, WITHOUT_ITS_CALLBACK, AFTER_THE_STEP)]


class Resumable:
    """A loader that Lightning can set on where it stopped, as those of torchdata can."""

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
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("options", [{}, {"separate_sums": True, "clip_norm": 0.1}], ids=str)
@pytest.mark.parametrize("module", [Automatic, Manual])
def test_resumed_in_mid_window(module: type[Automatic], options: dict[str, Any], gate: bool, tmp_path: Path) -> None:
    whole = module(options, gate)
    trainer(AccumulationCallback(), saving(tmp_path), enable_checkpointing=True).fit(whole, Resumable())
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


def test_resumed_under_other_steps_is_refused(tmp_path: Path) -> None:
    trainer(AccumulationCallback(), saving(tmp_path), enable_checkpointing=True, max_epochs=1).fit(Automatic({}), Resumable())
    with pytest.raises(gradaccum.CheckpointError, match="steps"):
        trainer().fit(Automatic({"steps": 5}), Resumable(), ckpt_path=tmp_path / "step=3.ckpt")


def test_resumed_without_the_callback_is_refused(tmp_path: Path) -> None:
    """Lightning clears the gradients of the model when it has loaded the optimizer. Sums of their own are not there."""
    for options in ({}, {"separate_sums": True}):
        folder = tmp_path / str(len(options))
        trainer(AccumulationCallback(), saving(folder), enable_checkpointing=True, max_epochs=1).fit(Automatic(options), Resumable())
        model, run = Automatic(options), trainer(Callback(), max_epochs=1)
        with nullcontext() if options else pytest.raises(gradaccum.UsageError, match="separate_sums=True"):
            run.fit(model, Resumable(), ckpt_path=folder / "step=3.ckpt")
