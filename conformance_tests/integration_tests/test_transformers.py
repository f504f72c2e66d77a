"""The Trainer of transformers: its windows, its losses by tokens, two processes, and
what is refused as training begins.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")


from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    IntervalStrategy,
    Trainer,
    TrainerCallback,
)

import gradaccum
from conformance_tests.framework_tests.migrating import programs_of
from conformance_tests.framework_tests.recipes import Recipe, run_recipe
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.integration_tests.regression import Items, Regressor, distance
from conformance_tests.integration_tests.transformers_runs import (
    COUNT,
    STEPS,
    bare,
    large,
    trained,
    wrapped,
)
from gradaccum import ArgumentTypeError, UsageError
from gradaccum_torch.integrations.transformers import (
    AccumulationCallback,
)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def test_default_arguments_equal_large_batch(tmp_path: Path) -> None:
    """The default clips to 1.0. torch adds 1e-6 to the norm as it does, and the window
    does not.
    """
    mine, other = trained(wrapped(tmp_path)), trained(large(tmp_path))
    assert max(logged(other, "grad_norm")) > 1
    assert distance(mine.model, other.model) < 1e-6
    ends = [3, 7, 9, 13, 17, 19]
    for name in ("grad_norm", "learning_rate"):
        lines = logged(mine, name)
        wanted = pytest.approx(logged(other, name), rel=1e-6)
        assert [lines[index] for index in ends] == wanted
    assert mine.state.global_step == 20, "micro-batches"
    assert result_of(mine).optimizer_step == 6
    # The Trainer's arguments and its methods are as they were.
    assert mine.args.max_grad_norm == 1.0
    assert not {"backward", "clip_grad_norm_"} & set(vars(mine.accelerator))
    assert "get_batch_samples" not in vars(mine)


def result_of(trainer: Trainer) -> Any:
    return trainer.optimizer.optimizer.result


def test_loss_scale_is_the_windows(tmp_path: Path) -> None:
    """The Trainer differentiates the loss times the scale of the wrapper, a power of
    two.
    """
    scale = gradaccum.DynamicLossScale(init_scale=2.0**10)
    scaled = trained(wrapped(tmp_path, wrap={"loss_scale": scale}))
    assert result_of(scaled).loss_scale == 2.0**10
    assert distance(scaled.model, trained(wrapped(tmp_path)).model) == 0


def test_bfloat16_equals_own_accumulation(tmp_path: Path) -> None:
    """The Trainer divides each loss by the 4 or 2 that the window divides by."""
    trainers = []
    for make, options in (
        (wrapped, {"bf16": True}),
        (bare, {"bf16": True, "gradient_accumulation_steps": STEPS}),
        (bare, {"gradient_accumulation_steps": STEPS}),
    ):
        data, model = Items(COUNT, torch.float32), Regressor(torch.float32)
        trainers.append(trained(make(tmp_path, model, data, **options)))
    mine, own, full = (trainer.model for trainer in trainers)
    assert distance(mine, own) < 1e-5 < distance(mine, full)


@pytest.mark.parametrize("steps", [6, 10], ids=["mid-window", "end of epoch"])
def test_resumed_run_is_bitwise_the_uninterrupted_one(
    tmp_path: Path, steps: int
) -> None:
    options = {"save_strategy": "steps", "save_steps": steps}
    whole = trained(wrapped(tmp_path, **options))
    resumed = wrapped(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert distance(resumed.model, whole.model) == 0
    assert resumed.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()
    assert result_of(resumed) == result_of(whole)


class Bare(Trainer):
    """Its loader is not Accelerate's, and does not announce its last batch."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=2)


def test_unannounced_end_of_epoch(tmp_path: Path) -> None:
    """A checkpoint of the last micro-batch holds the open window; the resumed run ends
    it before the next epoch.
    """
    trainers = []
    for folder in (tmp_path, tmp_path / "resumed"):
        trainers.append(wrapped(folder, save_strategy="steps", save_steps=10))
        trainers[-1].__class__ = Bare
    whole, resumed = trained(trainers[0]), trainers[1]
    checkpoint = tmp_path / "checkpoint-10"
    saved = torch.load(checkpoint / "optimizer.pt")["gradaccum"]
    assert saved["micro_step"] == 2
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert result_of(whole).optimizer_step == 6
    assert distance(resumed.model, whole.model) == 0


def test_max_steps_closes_last_window(tmp_path: Path) -> None:
    """The last checkpoint is the model that is handed back."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 100}
    trainer = trained(wrapped(tmp_path, **options))
    saved = torch.load(tmp_path / "checkpoint-6" / "optimizer.pt")["gradaccum"]
    assert saved["optimizer_step"] == result_of(trainer).optimizer_step == 2
    assert trainer.lr_scheduler.get_last_lr() == [0.1 / 3]


class ShortEpochs(TrainerCallback):
    """Ends each epoch after three micro-batches."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step in (3, 6)


@pytest.mark.parametrize("kind", [None, ReduceLROnPlateau])
def test_broken_off_epoch_closes_its_window(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler of a metric is the Trainer's, which moves it at an evaluation;
    nothing else does.
    """
    trainer, metrics = wrapped(tmp_path, wrap={"steps": 5}), []
    if kind is not None:
        trainer.args.metric_for_best_model = "loss"
        trainer.args.eval_strategy = IntervalStrategy.EPOCH
        trainer.eval_dataset = Items(4)
        trainer.lr_scheduler = kind(trainer.optimizer)
        monkeypatch.setattr(trainer.lr_scheduler, "step", metrics.append)
    trainer.add_callback(ShortEpochs())
    assert result_of(trained(trainer)).optimizer_step == 2
    assert len(metrics) == (0 if kind is None else 2)
    assert kind is not None or trainer.lr_scheduler.get_last_lr() == [0.1 / 3]


def unwrapped(folder: Path) -> Trainer:
    trainer = bare(folder)
    trainer.add_callback(AccumulationCallback(trainer))
    return trainer


def with_own_scheduler(folder: Path) -> Trainer:
    """It would move at each micro-batch."""
    trainer = wrapped(folder)
    trainer.lr_scheduler = None
    return trainer


def with_scaler(folder: Path) -> Trainer:
    trainer = wrapped(folder)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    return trainer


def test_program_of_the_page_on_moving() -> None:
    """Before and after; after, a callback flushes before the validation that cuts a
    window.
    """
    (program,) = [each for each in programs_of("torch") if each.of_neighbour]
    program.run_here()
    unflushed = program.blocks[1].replace("            optimizer.flush()\n", "")
    with pytest.raises(AssertionError):
        program._replace(blocks=(program.blocks[0], unflushed)).run_here()


class OwnStep(Trainer):
    """Weight and loss scale would be lost."""

    def training_step(self, model: Any, inputs: Any, items: Any = None) -> Tensor:
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=items)
        loss.backward()
        return loss.detach()


def of_kind(folder: Path, kind: type[Trainer]) -> Trainer:
    trainer = wrapped(folder)
    trainer.__class__ = kind
    return trainer


REFUSED: list[tuple[Callable[..., Trainer], type[Exception], str]] = [
    (partial(wrapped, wrap={"clip_norm": None}), UsageError, "clip_norm=1.0"),
    (partial(wrapped, wrap={"clip_norm": 0.5}), UsageError, "max_grad_norm=0.5"),
    (partial(wrapped, gradient_accumulation_steps=2), UsageError, "steps="),
    (
        partial(wrapped, wrap={"separate_sums": False}),
        UsageError,
        "separate_sums=True",
    ),
    (unwrapped, ArgumentTypeError, "gradaccum.wrap(optimizer"),
    (with_own_scheduler, ArgumentTypeError, "gradaccum.wrap(get_scheduler("),
    (with_scaler, UsageError, "bf16=True"),
    (partial(of_kind, kind=OwnStep), UsageError, "accelerator.backward"),
]
"""As training begins: what would be silently wrong under the Trainer."""


@pytest.mark.parametrize(("make", "kind", "words"), REFUSED)
def test_refused_by_name(
    tmp_path: Path, make: Callable[..., Trainer], kind: type[Exception], words: str
) -> None:
    trainer = make(tmp_path)
    with refused(kind, words):
        trainer.train()
    assert distance(trainer.model, Regressor()) == 0


# Losses that the Trainer divides by a number of tokens: a micro-batch weighs as many.


VOCABULARY, LENGTH = 11, 6


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of unequal length; what is beyond is no label. In the first `empty`
    there is none at all.
    """

    def __init__(self, empty: int = 0) -> None:
        self.empty = empty
        self.ids = torch.randint(
            0, VOCABULARY, (COUNT, LENGTH), generator=torch.Generator().manual_seed(2)
        )

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        labels[0 if index < self.empty else 2 + index % 5 :] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
    }
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adam would hide a wrong factor, and blow up the rounding of a gradient of 0."""
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)
    return


@pytest.mark.usefixtures("sgd")
def test_token_means_equal_large_batch(tmp_path: Path) -> None:
    """The Trainer divides by the tokens of a micro-batch, which then weighs as many."""
    mine = trained(wrapped(tmp_path, gpt2(), Tokens()))
    other = trained(large(tmp_path, gpt2(), Tokens()))
    assert distance(mine.model, other.model) < 1e-6


def own_accumulation(folder: Path, data: Any, kind: type[Trainer] = Trainer) -> Trainer:
    trainer = bare(folder, gpt2(), data, gradient_accumulation_steps=STEPS)
    trainer.__class__ = kind
    return trained(trainer)


@pytest.mark.usefixtures("sgd")
def test_micro_batches_without_a_token(tmp_path: Path) -> None:
    """At least five of ten, whose loss is 0 / 0. They weigh nothing, and there is no
    backward pass.
    """
    mine = trained(wrapped(tmp_path, gpt2(), Tokens(15)))
    assert distance(mine.model, own_accumulation(tmp_path, Tokens(15)).model) < 1e-6


class WithoutCount(Trainer):
    """Its model gets no number of tokens."""

    def _get_num_items_in_batch(self, *args: Any) -> None:
        return None


@pytest.mark.usefixtures("sgd")
def test_means_of_unequal_counts_are_the_trainers_own(tmp_path: Path) -> None:
    """A loss without the number of items is a mean for the Trainer too, whatever it
    holds.
    """
    mine = wrapped(tmp_path, gpt2(), Tokens())
    mine.__class__ = WithoutCount
    own = own_accumulation(tmp_path, Tokens(), WithoutCount)
    assert distance(trained(mine).model, own.model) < 1e-6
    of_tokens = trained(large(tmp_path, gpt2(), Tokens()))
    assert distance(mine.model, of_tokens.model) > 1e-4


@pytest.mark.usefixtures("sgd")
def test_loss_of_the_user(tmp_path: Path) -> None:
    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:]
        total = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        return total / num_items_in_batch

    models = []
    for make in (wrapped, large):
        trainer = make(tmp_path, gpt2(), Tokens())
        trainer.compute_loss_func = mean
        models.append(trained(trainer).model)
    assert distance(*models) < 1e-6


# Two processes, with losses over unequally many tokens, beside the Trainer's own
# accumulation.


PROGRAM = """
from conformance_tests.integration_tests import torchvision_ops  # before transformers looks for it
import tempfile
import torch
from conformance_tests.integration_tests.regression import distance
from conformance_tests.integration_tests.test_transformers import Tokens, gpt2
from conformance_tests.integration_tests.transformers_runs import bare, trained, wrapped

torch.optim.AdamW = torch.optim.SGD
options = {"ddp_backend": "gloo", "logging_steps": 100, "max_grad_norm": 0.0, "ddp_find_unused_parameters": False}
mine = trained(wrapped(tempfile.mkdtemp(), gpt2(), Tokens(), {"steps": 2, "clip_norm": None}, **options))
own = trained(bare(tempfile.mkdtemp(), gpt2(), Tokens(), gradient_accumulation_steps=2, **options))
assert mine.args.world_size == 2
assert mine.optimizer.optimizer.result.optimizer_step == own.state.global_step == 6, "windows of 2, 2 and 1, twice"
assert distance(mine.model, own.model) < 1e-6 < 1e-3 < distance(mine.model, gpt2())
"""


def test_two_processes_equal_own_accumulation(tmp_path: Path) -> None:
    command = "python -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    run_recipe(Recipe("two processes", PROGRAM, command), tmp_path, OMP_NUM_THREADS="1")
