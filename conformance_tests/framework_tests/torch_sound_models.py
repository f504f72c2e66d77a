"""Models, dtypes and batches for which accumulation is right: nothing in them may be
taken for a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from .torch_invented_losses import ARRAYS, CLASSES, WIDTH

X = ARRAYS["x"]
LABELS = ARRAYS["labels"]


class Case(NamedTuple):
    """What `verify` is called with."""

    model: nn.Module
    loss_fn: Callable[..., Tensor] = cross_entropy
    batch: tuple[Any, ...] = (X, LABELS)
    axes: Any = 0


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), *layers, nn.Tanh(), nn.Linear(4, CLASSES))


def bfloat16() -> Case:
    return Case(net().bfloat16(), batch=(X.bfloat16(), LABELS))


def autocast() -> Case:
    """float32 parameters, computed with in bfloat16: one rounding is bfloat16's."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(model(x).float(), y)

    return Case(net(), loss)


def unused_and_constant_parameters() -> Case:
    """One that the loss never reaches, one whose gradient is zero everywhere, one that
    is frozen.
    """
    model = nn.ModuleDict({"used": net(), "unused": nn.Linear(1, 1)})
    model["used"][0].bias.requires_grad_(False)
    model.zero = nn.Parameter(torch.ones(3))
    return Case(
        model, lambda m, x, y: cross_entropy(m["used"](x) + (m.zero * 0).sum(), y)
    )


def bias_before_a_normalisation() -> Case:
    """Its gradient is zero but for rounding, in float64, of a batch without a
    floating-point number.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(10, 4),
        nn.Conv1d(6, 4, 3),
        nn.GroupNorm(4, 4),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    return Case(model.double(), batch=(torch.randint(0, 10, (12, 6)), LABELS))


def recomputed_dropout() -> Case:
    """Activation checkpointing draws the same numbers twice."""
    return Case(
        net(nn.Dropout(0.5)),
        lambda model, x, y: cross_entropy(checkpoint(model, x, use_reentrant=False), y),
    )


def tied_weights() -> Case:
    words = nn.Embedding(CLASSES, 4)
    head = nn.Linear(4, CLASSES, bias=False)
    head.weight = words.weight
    return Case(nn.Sequential(words, nn.Tanh(), head), batch=(LABELS, LABELS.flip(0)))


def sparse_embedding() -> Case:
    table = nn.Embedding(CLASSES, CLASSES, sparse=True)
    return Case(table, batch=(LABELS, LABELS.flip(0)))


def recurrent() -> Case:
    """The second axis is the batch's: ``axes`` says so."""
    return Case(
        nn.LSTM(WIDTH, CLASSES, num_layers=2, dropout=0.3),
        lambda model, x, y: cross_entropy(model(x)[0][-1], y),
        (ARRAYS["tokens"].transpose(0, 1), LABELS),
        (1, 0),
    )


def heads_that_only_some_use() -> Case:
    """A head that some micro-batches do not use: no gradient is zero there."""

    def loss(model: nn.ModuleList, x: Tensor, y: Tensor, kind: Tensor) -> Tensor:
        out = torch.zeros(len(x), CLASSES)
        for number, head in enumerate(model):
            rows = (kind == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, head(x[rows]))
        return cross_entropy(out, y)

    return Case(nn.ModuleList([net(), net()]), loss, (X, LABELS, ARRAYS["binary"]))


def method_of_a_trainer() -> Case:
    """Which holds the model compiled."""

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = torch.compile(model, backend="eager")

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.model(x), y)

    model = net()
    return Case(model, Trainer(model).loss)


SOUND_MODELS = (
    bfloat16,
    autocast,
    unused_and_constant_parameters,
    bias_before_a_normalisation,
    recomputed_dropout,
    tied_weights,
    sparse_embedding,
    recurrent,
    heads_that_only_some_use,
    method_of_a_trainer,
)
