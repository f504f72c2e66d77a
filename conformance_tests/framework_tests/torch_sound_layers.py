"""Layers, random numbers and state for which accumulation is right: nothing in them may
be taken for a mistake.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conformance_tests.framework_tests.torch_cases import (
    CLASSES,
    ITEMS,
    TOKENS,
    WIDTH,
    Case,
    classes,
    cross_entropy,
    inputs,
    mask,
    net,
)


def group_norm() -> Case:
    """A bias in front of a normalisation has no gradient but rounding."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    ]
    return Case(nn.Sequential(*layers), cross_entropy, (inputs(2, 4, 4), classes()))


def frozen_batch_norm() -> Case:
    """Statistics of before, as in evaluation mode."""
    model = net(nn.BatchNorm1d(4), nn.ReLU())
    model(inputs(WIDTH))
    return Case(model.eval(), cross_entropy, (inputs(WIDTH), classes()))


def dropout() -> Case:
    return Case(
        net(nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2)),
        cross_entropy,
        (inputs(WIDTH), classes()),
    )


def dropout_after_tokens_were_flattened() -> Case:
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net(nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)

    return Case(Flattens(), cross_entropy, (inputs(TOKENS, WIDTH), classes()))


def recomputed_dropout() -> Case:
    """Activation checkpointing draws the same numbers twice."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    return Case(net(nn.Dropout(0.5)), loss, (inputs(WIDTH), classes()))


def layers_dropped_at_random() -> Case:
    """A layer is left out or not for all items at once, by torch's random numbers and
    by Python's.
    """

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (
                x
                * (2 if random.random() < 0.5 else 1)
                * (3 if torch.rand(()).item() < 0.5 else 1)
            )

    return Case(
        net(*(Drops() for _ in range(8))), cross_entropy, (inputs(WIDTH), classes())
    )


class Attends(nn.Module):
    """A transformer's layer over padded tokens, and the mean of those that are none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 4, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        kept = ids != 0
        found = self.layer(self.words(ids), src_key_padding_mask=~kept)
        return self.head((found * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


def attention_with_padding() -> Case:
    torch.manual_seed(2)
    return Case(
        Attends(),
        cross_entropy,
        (torch.randint(1, 10, (ITEMS, TOKENS)) * mask(), classes()),
    )


def bias_of_keys() -> Case:
    """Its gradient is zero but for rounding, in float64, of a batch without a
    floating-point number.
    """

    class Keyed(Attends):
        def forward(self, ids: Tensor) -> Tensor:
            words = self.words(ids)
            keys = nn.functional.linear(
                words, self.layer.self_attn.out_proj.weight, self.bias
            )
            return self.head((torch.softmax(words @ keys.mT, -1) @ words).sum(1))

    model = Keyed().double()
    model.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    return attention_with_padding()._replace(model=model)


def tied_weights() -> Case:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = (
                nn.Embedding(CLASSES, 4),
                nn.Linear(4, CLASSES, bias=False),
            )
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.words(ids)))

    return Case(Tied(), cross_entropy, (classes(), classes().flip(0)))


def sparse_embedding() -> Case:
    torch.manual_seed(0)
    return Case(
        nn.Embedding(CLASSES, CLASSES, sparse=True),
        cross_entropy,
        (classes(), classes().flip(0)),
    )


def recurrent() -> Case:
    """The second axis is the batch's: ``axes`` says so."""

    class Recurs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cells, self.head = (
                nn.LSTM(WIDTH, 4, num_layers=2, dropout=0.3),
                nn.Linear(4, CLASSES),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cells(x)[0][-1])

    return Case(
        Recurs(),
        cross_entropy,
        (inputs(TOKENS, WIDTH).transpose(0, 1), classes()),
        {"axes": (1, 0)},
    )


def classes_that_only_some_have() -> Case:
    """A head that some micro-batches do not use: no gradient is zero there."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(2)])

        def forward(self, x: Tensor, kind: Tensor) -> Tensor:
            out = torch.zeros(len(x), CLASSES)
            for number, head in enumerate(self.heads):
                if (kind == number).any():
                    out = out.index_add(
                        0, (kind == number).nonzero()[:, 0], head(x[kind == number])
                    )
            return out

    def loss(model: nn.Module, x: Tensor, kind: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, kind), y)

    return Case(
        Heads(),
        loss,
        (inputs(WIDTH), torch.tensor([0, 0, 1, 1, 0, 1, 0, 0]), classes()),
    )


def counts_its_calls() -> Case:
    """State that changes and is not read, and one that is read for nothing but a
    log.
    """

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.seen = net(), 0, []
            self.register_buffer("mean", torch.zeros(CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            self.calls += 1
            self.seen.append(len(x))
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            return out

    return Case(Counts(), cross_entropy, (inputs(WIDTH), classes()))


SOUND_LAYERS: tuple[Callable[[], Case], ...] = (
    group_norm,
    frozen_batch_norm,
    dropout,
    dropout_after_tokens_were_flattened,
    recomputed_dropout,
    layers_dropped_at_random,
    attention_with_padding,
    bias_of_keys,
    tied_weights,
    sparse_embedding,
    recurrent,
    classes_that_only_some_have,
    counts_its_calls,
)
