"""The training loop of torchtune's recipe for one device, without what the recipe loads
and logs: one update of micro-batches is the update of the large batch, also where items
differ in length and have no prompt.
"""

import importlib.util
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtune.models.llama2 import llama2
from torchtune.modules.loss import CEWithChunkedOutputLoss

ITEMS, LENGTH, VOCABULARY = 8, 6, 12
RECIPE = metadata.distribution("torchtune").locate_file(
    "recipes/full_finetune_single_device.py"
)


class Batches(list[dict[str, Tensor]]):
    sampler = SimpleNamespace(set_epoch=lambda epoch: None)


def recipe_class() -> Any:
    """Return the recipe's class, which the wheel has in a script."""
    spec: Any = importlib.util.spec_from_file_location("recipe", str(RECIPE))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FullFinetuneRecipeSingleDevice


def update(tokens: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Return how far one update by SGD moved the parameters."""
    torch.manual_seed(0)
    model = llama2(
        vocab_size=VOCABULARY,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        embed_dim=8,
        max_seq_len=LENGTH,
    ).double()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    loss_fn = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_fn.num_output_chunks)
    micro_batches = zip(tokens.chunk(steps), labels.chunk(steps), strict=True)
    kind = recipe_class()
    recipe = kind.__new__(kind)
    vars(recipe).update(
        _model=model,
        _loss_fn=loss_fn,
        _optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        _dataloader=Batches({"tokens": a, "labels": b} for a, b in micro_batches),
        _gradient_accumulation_steps=steps,
        _steps_per_epoch=1,
        max_steps_per_epoch=None,
        epochs_run=0,
        total_epochs=1,
        global_step=0,
        _device=torch.device("cpu"),
        ignore_labels_cache=torch.full((ITEMS, 1), loss_fn.ignore_index),
        activations_handling_ctx=nullcontext(),
        save_checkpoint=lambda epoch: None,
        _compile=False,
        _optimizer_in_bwd=False,
        _clip_grad_norm=None,
        _lr_scheduler=None,
        _log_every_n_steps=100,
        _profiler=SimpleNamespace(start=int, step=int, stop=int),
        profiler_profile_memory=False,
    )
    recipe.train()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


@pytest.mark.parametrize(
    ("ragged", "prompt"),
    [(False, 0), (True, 1), (True, 0)],
    ids=["equal", "with_prompt", "without_prompt"],
)
def test_accumulated_update(ragged: bool, prompt: int) -> None:
    """`prompt` is the number of tokens at an item's beginning that are no labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ITEMS, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[:, :prompt] = -100
    if ragged:
        for item in range(ITEMS):
            labels[item, 2 + item % 5 :] = -100
    accumulated = update(tokens, labels, steps=4)
    torch.testing.assert_close(accumulated, update(tokens, labels, steps=1))
