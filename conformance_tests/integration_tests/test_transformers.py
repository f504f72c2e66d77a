"""The Trainer of transformers: its windows, its losses by tokens, two processes, and
what is refused as training begins.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")


from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    IntervalStrategy,
    Trainer,
    TrainerCallback,
)
from transformers.optimization import GreedyLR

import gradaccum
from conformance_tests.framework_tests.migrating import programs_of
from conformance_tests.framework_tests.recipes import Recipe, run_recipe
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.integration_tests.regression import Items, Regressor, distance
from conformance_tests.integration_tests.transformers_runs import (
    COUNT,
    EPOCHS,
    MICRO,
    STEPS,
    bare,
    large,
    logged,
    trained,
    wrapped,
)
from gradaccum import ArgumentTypeError, UsageError
from gradaccum_torch.integrations.transformers import (
    AccumulationCallback,
    require_trainer,
)


def test_default_arguments_equal_large_batch(tmp_path: Path) -> None:
    """The default clips to 1.0. torch adds 1e-6 to the norm as it does, and the window
    does not.
    """
    mine, other = trained(wrapped(tmp_path)), trained(large(tmp_path))
    assert max(logged(other, "grad_norm")) > 1
    assert distance(mine.model, other.model) < 1e-6
    assert logged(mine, "grad_norm", STEPS) == pytest.approx(
        logged(other, "grad_norm"), rel=1e-6
    )
    assert logged(mine, "learning_rate", STEPS) == pytest.approx(
        logged(other, "learning_rate"), rel=1e-12
    )
    assert mine.state.global_step == 20, "micro-batches"
    assert mine.optimizer.optimizer.result.optimizer_step == 6
    # What the Trainer was told, and its methods, are as they were.
    assert mine.args.max_grad_norm == 1.0
    assert not {"backward", "clip_grad_norm_"} & set(vars(mine.accelerator))
    assert "get_batch_samples" not in vars(mine)


def test_loss_scale_is_the_windows(tmp_path: Path) -> None:
    """The Trainer differentiates the loss times the scale of the wrapper, a power of
    two.
    """
    scaled = trained(
        wrapped(
            tmp_path,
            wrap={"loss_scale": gradaccum.DynamicLossScale(init_scale=2.0**10)},
        )
    )
    assert scaled.optimizer.optimizer.result.loss_scale == 2.0**10
    assert distance(scaled.model, trained(wrapped(tmp_path)).model) == 0


def test_bfloat16_equals_own_accumulation(tmp_path: Path) -> None:
    """The Trainer divides each loss by the 4 or 2 that the window divides by."""

    def own(**options: Any) -> Trainer:
        model, data = Regressor(torch.float32), Items(COUNT, torch.float32)
        options["gradient_accumulation_steps"] = STEPS
        return trained(bare(tmp_path, model, data, **options))

    data = Items(COUNT, torch.float32)
    mine = trained(wrapped(tmp_path, Regressor(torch.float32), data, bf16=True))
    assert distance(mine.model, own(bf16=True).model) < 1e-5
    assert distance(mine.model, own().model) > 1e-5


class Reader(TrainerCallback):
    """Counts the updates by the result, at each event at which a window may close."""

    def __init__(self, trainer: Trainer) -> None:
        self.result = lambda: trainer.optimizer.optimizer.result
        self.steps: list[bool] = []
        self.epochs: list[bool] = []

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(self.result().applied)

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.epochs.append(self.result().applied)


@pytest.mark.parametrize(
    ("count", "of_an_epoch"),
    [(20, [0, 0, 0, 1, 0, 0, 0, 1, 0, 1]), (16, [0, 0, 0, 1, 0, 0, 0, 1])],
    ids=["short window", "full windows"],
)
def test_result_is_the_last_steps_for_a_later_callback(
    tmp_path: Path, count: int, of_an_epoch: list[int]
) -> None:
    trainer = wrapped(tmp_path, data=Items(count))
    reader = Reader(trainer)
    trainer.add_callback(reader)
    trained(trainer)
    assert reader.steps == of_an_epoch * EPOCHS
    assert reader.epochs == [True] * EPOCHS


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
    assert resumed.optimizer.optimizer.result == whole.optimizer.optimizer.result


class Bare(Trainer):
    """Its loader is not Accelerate's, and does not announce its last batch."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=MICRO)


def test_unannounced_end_of_epoch(tmp_path: Path) -> None:
    """A checkpoint of the last micro-batch holds the open window; the resumed run ends
    it before the next epoch.
    """

    def make(folder: Path) -> Trainer:
        trainer = wrapped(folder, save_strategy="steps", save_steps=10)
        trainer.__class__ = Bare
        return trainer

    whole, resumed = trained(make(tmp_path)), make(tmp_path / "resumed")
    assert (
        torch.load(tmp_path / "checkpoint-10" / "optimizer.pt")["gradaccum"][
            "micro_step"
        ]
        == 2
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert whole.optimizer.optimizer.result.optimizer_step == 6
    assert distance(resumed.model, whole.model) == 0


def test_max_steps_closes_last_window(tmp_path: Path) -> None:
    """The last checkpoint is the model that is handed back."""
    trainer = trained(
        wrapped(tmp_path, max_steps=6, save_strategy="steps", save_steps=100)
    )
    saved = torch.load(tmp_path / "checkpoint-6" / "optimizer.pt")
    assert (
        saved["gradaccum"]["optimizer_step"]
        == trainer.optimizer.optimizer.result.optimizer_step
        == 2
    )
    assert trainer.lr_scheduler.get_last_lr() == [0.1 / 3]


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Data without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(Items(COUNT).__getitem__, range(COUNT))


def test_stream_of_data_equals_large_batch(tmp_path: Path) -> None:
    """The loader alone knows where an epoch ends."""
    mine, other = (
        wrapped(tmp_path, data=Stream(), max_steps=20),
        large(tmp_path, data=Stream(), max_steps=6),
    )
    assert distance(trained(mine).model, trained(other).model) < 1e-6
    assert mine.optimizer.optimizer.result.optimizer_step == 6


class Raising(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_interrupted_run_starts_anew(tmp_path: Path) -> None:
    trainer = wrapped(tmp_path)
    trainer.add_callback(Raising())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Raising)
    assert distance(trained(trainer).model, trained(wrapped(tmp_path)).model) == 0


class ShortEpochs(TrainerCallback):
    """Ends each epoch after three micro-batches."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step in (3, 6)


def test_broken_off_epoch_closes_its_window(tmp_path: Path) -> None:
    trainer = wrapped(tmp_path, wrap={"steps": 5})
    trainer.add_callback(ShortEpochs())
    trainer.train()
    assert trainer.optimizer.optimizer.result.optimizer_step == 2
    assert trainer.lr_scheduler.get_last_lr() == [0.1 / 3]


@pytest.mark.parametrize("kind", [ReduceLROnPlateau, GreedyLR])
def test_scheduler_of_a_metric(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer moves it at an evaluation, and nothing else does, where an epoch is
    broken off either.
    """
    trainer, metrics = (
        wrapped(tmp_path, metric_for_best_model="loss", wrap={"steps": 5}),
        [],
    )
    trainer.args.eval_strategy, trainer.eval_dataset = IntervalStrategy.EPOCH, Items(4)
    trainer.lr_scheduler = kind(trainer.optimizer)
    monkeypatch.setattr(trainer.lr_scheduler, "step", metrics.append)
    trainer.add_callback(ShortEpochs())
    assert trained(trainer).optimizer.optimizer.result.optimizer_step == 2
    assert len(metrics) == EPOCHS


def test_program_of_the_page_on_moving() -> None:
    """Before and after; after, a callback flushes before the validation that cuts a
    window.
    """
    (program,) = [each for each in programs_of("torch") if each.of_neighbour]
    program.run_here()
    unflushed = program.blocks[1].replace("            optimizer.flush()\n", "")
    with pytest.raises(AssertionError):
        program._replace(blocks=(program.blocks[0], unflushed)).run_here()


# Refusals, as training begins, of what would be silently wrong under the Trainer.


@pytest.mark.parametrize(
    ("kind", "word", "wrap", "options"),
    [
        (UsageError, "clip_norm=1.0", {"clip_norm": None}, {}),
        (UsageError, "max_grad_norm=0.5", {"clip_norm": 0.5}, {}),
        (UsageError, "steps=", {}, {"gradient_accumulation_steps": 2}),
        (UsageError, "separate_sums=True", {"separate_sums": False}, {}),
    ],
)
def test_refused_by_name(
    tmp_path: Path,
    kind: type[Exception],
    word: str,
    wrap: dict[str, Any],
    options: dict[str, Any],
) -> None:
    trainer = wrapped(tmp_path, wrap=wrap, **options)
    with refused(kind, word):
        trainer.train()
    assert distance(trainer.model, Regressor()) == 0


def test_bare_optimizer_is_refused(tmp_path: Path) -> None:
    trainer = bare(tmp_path)
    trainer.add_callback(AccumulationCallback(trainer))
    with refused(ArgumentTypeError, "gradaccum.wrap(optimizer", "AdamW"):
        trainer.train()


def test_own_scheduler_of_the_trainer_is_refused(tmp_path: Path) -> None:
    """It would move at each micro-batch."""
    trainer = wrapped(tmp_path)
    trainer.lr_scheduler = None
    with refused(ArgumentTypeError, "gradaccum.wrap(get_scheduler(", "LambdaLR"):
        trainer.train()


def test_loss_scaler_is_refused(tmp_path: Path) -> None:
    trainer = wrapped(tmp_path)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with refused(UsageError, "fp16", "bf16=True"):
        trainer.train()


def test_other_engines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed keeps gradients to itself."""
    trainer = wrapped(tmp_path)
    monkeypatch.setattr(
        trainer.accelerator.state, "distributed_type", DistributedType.DEEPSPEED
    )
    with refused(UsageError, "DEEPSPEED", "accumulation of that engine"):
        require_trainer(trainer)


def test_weights_of_one_worker_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker would divide by another sum of weights."""
    trainer = wrapped(tmp_path)
    trainer.model_accepts_loss_kwargs, trainer.args.average_tokens_across_devices = (
        True,
        False,
    )
    require_trainer(trainer)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with refused(UsageError, "average_tokens_across_devices"):
        require_trainer(trainer)


class OwnStep(Trainer):
    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        loss: Tensor = self.compute_loss(
            model, inputs, num_items_in_batch=num_items_in_batch
        )
        loss.backward()
        return loss.detach()


class OwnClipping(Trainer):
    """As the Trainer does where gradients are on several meshes."""

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(
            model.parameters(), self.args.max_grad_norm
        )


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (OwnStep, "did without accelerator.backward"),
        (OwnClipping, "did without accelerator.clip"),
    ],
)
def test_step_that_goes_another_way_is_refused(
    tmp_path: Path, kind: type[Trainer], missing: str
) -> None:
    """Weight and loss scale would be lost, or each micro-batch clipped."""
    trainer = wrapped(tmp_path)
    trainer.__class__ = kind
    with refused(UsageError, missing, "training_step"):
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
    mine, other = (
        trained(wrapped(tmp_path, gpt2(), Tokens())),
        trained(large(tmp_path, model=gpt2(), data=Tokens())),
    )
    own = trained(bare(tmp_path, gpt2(), Tokens(), gradient_accumulation_steps=STEPS))
    assert distance(own.model, other.model) < 1e-6
    assert distance(mine.model, other.model) < 1e-6


@pytest.mark.usefixtures("sgd")
def test_micro_batches_without_a_token(tmp_path: Path) -> None:
    """At least five of ten, whose loss is 0 / 0. They weigh nothing, and there is no
    backward pass.
    """
    trainer = trained(wrapped(tmp_path, gpt2(), Tokens(15)))
    assert (
        distance(
            trainer.model,
            trained(
                bare(tmp_path, gpt2(), Tokens(15), gradient_accumulation_steps=STEPS)
            ).model,
        )
        < 1e-6
    )


class Untold(Trainer):
    """Its model is not told how many tokens there are."""

    def _get_num_items_in_batch(self, *args: Any) -> None:
        return None


class MeanOfBatch(Trainer):
    """Its loss is not told, though the Trainer counts."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        loss: Tensor = model(**inputs).loss
        return loss


@pytest.mark.usefixtures("sgd")
@pytest.mark.parametrize("kind", [Untold, MeanOfBatch])
def test_means_of_unequal_counts_are_the_trainers_own(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    """A loss that is not told the number of items is a mean for the Trainer too,
    whatever it holds.
    """

    def once(make: Any, **options: Any) -> Trainer:
        trainer = make(tmp_path, gpt2(), Tokens(), **options)
        trainer.__class__ = kind
        return trained(trainer)

    mine, own = once(wrapped), once(bare, gradient_accumulation_steps=STEPS)
    assert distance(mine.model, own.model) < 1e-6
    assert (
        distance(
            mine.model, trained(large(tmp_path, model=gpt2(), data=Tokens())).model
        )
        > 1e-4
    )


class OfTRL(Untold):
    """Its inputs have the number of tokens with them, by which its loss divides, as
    TRL's `GRPOTrainer`.
    """

    loss_is_scaled_for_ga = True
    loss_type: str | None = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        items = (prepared["labels"][:, 1:] != -100).sum()
        return {**prepared, "num_items_in_batch": items}

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Tensor:
        items = inputs.pop("num_items_in_batch")
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        divisor = len(labels) if self.loss_type == "grpo" else items
        return total / divisor


class Twice(OfTRL):
    """A micro-batch of two losses."""

    def training_step(self, model: Any, inputs: Any, items: Any = None) -> Tensor:
        inputs = self._prepare_inputs(inputs)
        for share in (0.25, 0.75):
            loss = self.compute_loss(model, dict(inputs))
            self.accelerator.backward(loss * share)
        return loss.detach()


def of_trl(kind: type[Trainer], loss_type: str | None, make: Any, folder: Path) -> Any:
    trainer = make(folder, model=gpt2(), data=Tokens())
    trainer.__class__ = kind
    trainer.loss_type = loss_type
    return trainer


@pytest.mark.usefixtures("sgd")
@pytest.mark.parametrize(
    ("kind", "loss_type"),
    [(OfTRL, "dapo"), (OfTRL, "grpo"), (OfTRL, None), (Twice, "dapo")],
)
def test_tokens_by_which_the_loss_of_trl_divides_are_the_weight(
    tmp_path: Path, kind: type[Trainer], loss_type: str | None
) -> None:
    """Or the micro-batches count the same, where its loss is a mean of each."""
    mine = trained(of_trl(kind, loss_type, wrapped, tmp_path))
    other = trained(of_trl(OfTRL, loss_type, large, tmp_path))
    assert distance(mine.model, other.model) < 1e-6 < 1e-3
    assert distance(mine.model, gpt2()) > 1e-3


def test_unknown_loss_of_trl_is_refused(tmp_path: Path) -> None:
    with refused(UsageError, "loss_type", "dapo"):
        trained(of_trl(OfTRL, "new", wrapped, tmp_path))


@pytest.mark.usefixtures("sgd")
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing_factor": 0.1}], ids=["function", "smoothed"]
)
def test_losses_of_the_user_and_of_the_trainer(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = outputs["logits"][:, :-1].reshape(-1, VOCABULARY)
        return (
            nn.functional.cross_entropy(
                logits, labels[:, 1:].flatten(), reduction="sum"
            )
            / num_items_in_batch
        )

    def once(trainer: Trainer) -> nn.Module:
        if not options:
            trainer.compute_loss_func = mean
        return trained(trainer).model

    mine, other = (
        once(wrapped(tmp_path, gpt2(), Tokens(), **options)),
        once(large(tmp_path, model=gpt2(), data=Tokens(), **options)),
    )
    assert distance(mine, other) < 1e-6


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
