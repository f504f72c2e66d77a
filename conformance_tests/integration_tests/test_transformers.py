"""The Trainer of transformers with `AccumulationCallback`: its updates are those of the
large batch.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")


import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments

from benchmarks.scoreboard.transformers_rows import bert, gpt2, labelled, sequences
from conformance_tests.framework_tests.migrating import programs_of
from conformance_tests.framework_tests.recipes import Recipe, run_recipe
from conformance_tests.framework_tests.refusing import refused
from gradaccum import UsageError
from gradaccum_torch.integrations.transformers import AccumulationCallback

from .regression import Items, Regressor, distance

COUNT = 21
"""An epoch of 21 items: windows of four micro-batches of two, the same again, and one
of two micro-batches of two and one of one.
"""


def bare(
    folder: Any,
    model: nn.Module | None = None,
    data: Any = None,
    optimizer_type: type[torch.optim.Optimizer] = AdamW,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    """A Trainer that accumulates by itself."""
    model = model or Regressor()
    optimizer = optimizer_type(model.parameters(), lr=0.1)
    defaults = {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
    }
    return kind(
        model,
        TrainingArguments(str(folder), **{**defaults, **options}),
        train_dataset=data or Items(COUNT),
        optimizers=(optimizer, LambdaLR(optimizer, lambda update: 1 / (1 + update))),
    )


def large(*arguments: Any, **options: Any) -> Trainer:
    size = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    return bare(*arguments, **{**options, **size})


def accumulating(*arguments: Any, **options: Any) -> Trainer:
    trainer = bare(*arguments, **options)
    trainer.add_callback(AccumulationCallback(trainer))
    return trainer


def trained(trainer: Trainer) -> Trainer:
    """On one thread: others wait longer for each other than so small a model takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer.train()
    finally:
        torch.set_num_threads(threads)
    return trainer


def logged(trainer: Trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_updates_and_logs_equal_large_batch(
    tmp_path: Path, max_grad_norm: float
) -> None:
    mine = trained(accumulating(tmp_path, max_grad_norm=max_grad_norm))
    other = trained(large(tmp_path, max_grad_norm=max_grad_norm))
    # torch adds 1e-6 to the norm by which it divides, and the window does not.
    assert distance(mine.model, other.model) < (1e-6 if max_grad_norm else 1e-12)
    assert max(logged(other, "grad_norm")) > 1
    assert mine.state.global_step == other.state.global_step == 6
    for name in ("loss", "grad_norm", "learning_rate", "train_loss"):
        assert logged(mine, name) == pytest.approx(logged(other, name), rel=1e-6)
    # The Trainer is as it was, and can train on.
    assert isinstance(mine.optimizer.optimizer, AdamW)
    assert mine.args.average_tokens_across_devices
    assert not {"training_step", "_prepare_inputs"} & set(vars(mine))
    assert distance(trained(mine).model, trained(other).model) < 1e-5


def test_bfloat16_equals_own_accumulation(tmp_path: Path) -> None:
    """The Trainer's own accumulation is right for micro-batches of equal size."""
    models = []
    for make, bf16 in ((accumulating, True), (bare, True), (bare, False)):
        model = Regressor(torch.float32)
        data = Items(20, torch.float32)
        models.append(trained(make(tmp_path, model, data, bf16=bf16)).model)
    mine, own, full = models
    assert distance(mine, own) < 1e-5 < distance(mine, full)


def test_loss_scale_and_skipped_update(tmp_path: Path) -> None:
    """Under fp16 the wrapped optimizer has the scaler. An update that overflows is
    skipped, and the scheduler does not move.
    """
    data = Items(COUNT)
    trainer = accumulating(tmp_path, data=data, train_sampling_strategy="sequential")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trainer.accelerator.scaler = scaler
    data.x[9] = torch.inf
    trained(trainer)
    assert scaler.get_scale() == 2.0**8
    assert trainer.state.global_step == 6
    assert all(map(math.isfinite, logged(trainer, "loss")))
    assert logged(trainer, "learning_rate")[-1] == 0.1 / 4
    kept = torch.utils.data.ConcatDataset(
        [torch.utils.data.Subset(data, [*range(8), *range(16, COUNT)])]
    )
    other = trained(large(tmp_path, data=kept, train_sampling_strategy="sequential"))
    assert distance(trainer.model, other.model) < 1e-6


def test_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    complete = trained(accumulating(tmp_path, **options))
    resumed = accumulating(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(resumed.model, complete.model) == 0
    for name in ("loss", "learning_rate"):
        assert logged(resumed, name) == logged(complete, name)


def test_program_of_the_page_on_moving() -> None:
    (program,) = [each for each in programs_of("torch") if each.of_neighbour]
    program.run_here()


class OwnStep(Trainer):
    """The weight would be lost."""

    def training_step(self, model: Any, inputs: Any, items: Any = None) -> Tensor:
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=items)
        loss.backward()
        return loss.detach()


def test_step_of_the_user_is_refused(tmp_path: Path) -> None:
    with refused(UsageError, "backward"):
        accumulating(tmp_path, kind=OwnStep).train()


def mean_by_count(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    total = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return total / num_items_in_batch


def tokens() -> list[dict[str, Tensor]]:
    """Sequences with unequal numbers of labels, and without any in the first two
    micro-batches.
    """
    data = sequences(False)
    for item in data[:4]:
        item["labels"] = torch.full_like(item["labels"], -100)
    return data


@pytest.mark.parametrize("loss", [None, mean_by_count])
def test_token_means_equal_large_batch(tmp_path: Path, loss: Any) -> None:
    """SGD, because Adam would hide a wrong factor."""
    models = []
    for make in (accumulating, large):
        options = {"train_sampling_strategy": "sequential"}
        trainer = make(tmp_path, gpt2(), tokens(), SGD, **options)
        trainer.compute_loss_func = loss
        models.append(trained(trainer).model)
    assert distance(*models) < 1e-6
    assert distance(models[0], gpt2()) > 1e-3


def test_loss_that_ignores_the_count(tmp_path: Path) -> None:
    """Under the Trainer's own accumulation its gradients are not divided at all."""
    mine, other, own = [
        trained(make(tmp_path, bert(), labelled(), SGD, max_grad_norm=0.0))
        for make in (accumulating, large, bare)
    ]
    assert distance(mine.model, other.model) < 1e-12
    assert distance(own.model, other.model) > 1e-3


PROGRAM = """
from conformance_tests.integration_tests import torchvision_ops  # before transformers looks for it
import tempfile
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from conformance_tests.integration_tests.regression import Items, Regressor, distance
from conformance_tests.integration_tests.test_transformers import accumulating, gpt2, large, sequences, trained

sizes = []
gathers = []
all_reduce = dist.all_reduce
all_gather = dist.all_gather

def counted(tensor, *arguments, **options):
    sizes.append(tensor.numel())
    return all_reduce(tensor, *arguments, **options)

def counted_gather(*arguments, **options):
    gathers.append(arguments)
    return all_gather(*arguments, **options)

def count(reduce, gather):
    dist.all_reduce = reduce
    dist.all_gather = distributed_c10d.all_gather = gather

options = {"ddp_backend": "gloo", "logging_steps": 100, "max_grad_norm": 0.0, "ddp_find_unused_parameters": False}
halves = {**options, "per_device_train_batch_size": 4}
for make, data in ((gpt2, sequences(False)), (Regressor, Items(16))):
    micro = accumulating(tempfile.mkdtemp(), make(), data, torch.optim.SGD, gradient_accumulation_steps=2, **options)
    batch = accumulating(tempfile.mkdtemp(), make(), data, torch.optim.SGD, gradient_accumulation_steps=1, **halves)
    count(counted, counted_gather)
    trained(micro)
    count(all_reduce, all_gather)
    elements = sum(p.numel() for p in micro.model.parameters())
    windows = micro.state.global_step
    assert micro.args.world_size == 2
    assert sizes.count(elements) == windows and len(sizes) == 2 * windows, (sizes, windows)
    # Two as the optimizer is wrapped, one of the Trainer as it ends: none in a window.
    assert len(gathers) == 3, len(gathers)
    sizes.clear()
    gathers.clear()
    trained(batch)
    assert distance(micro.model, batch.model) < 1e-7 < 1e-3 < distance(micro.model, make())
"""


def test_two_processes_reduce_once_per_window(tmp_path: Path) -> None:
    """Besides the gradients a window reduces a few numbers: weights, flags, losses."""
    command = "python -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    run_recipe(Recipe("two processes", PROGRAM, command), tmp_path, OMP_NUM_THREADS="1")
