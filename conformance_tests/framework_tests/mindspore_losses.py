"""Small models in MindSpore for `verify`: each with one published mistake planted, or
sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

RNG = np.random.default_rng(0)
ITEMS, TOKENS, WIDTH, CLASSES = 8, 5, 4, 3


def normal(*shape: int) -> Tensor:
    return Tensor(RNG.normal(size=shape).astype(np.float32))


X, Y = normal(ITEMS, WIDTH), normal(ITEMS, 1)
SEQUENCES = normal(ITEMS, TOKENS, WIDTH)
MASK = np.arange(TOKENS) < np.asarray([1, 5, 2, 4, 3, 5, 1, 2])[:, None]
LABELS = Tensor(
    np.where(MASK, RNG.integers(0, CLASSES, MASK.shape), -100).astype(np.int32)
)


class Case(NamedTuple):
    model: Callable[[], nn.Cell]
    loss_fn: Callable[..., Any]
    batch: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    kind: str = ""
    where: str = ""


def filled(cell: nn.Cell) -> nn.Cell:
    """With the same weights in every process."""
    rng = np.random.default_rng(1)
    for parameter in cell.trainable_params():
        ops.assign(
            parameter,
            Tensor(
                rng.normal(size=parameter.shape).astype(np.float32), parameter.dtype
            ),
        )
    return cell.set_train(True)


def net(*between: nn.Cell, outputs: int = 1, dtype: Any = ms.float32) -> nn.Cell:
    return filled(
        nn.SequentialCell(
            nn.Dense(WIDTH, CLASSES, dtype=dtype),
            *between,
            nn.Tanh(),
            nn.Dense(CLASSES, outputs, dtype=dtype),
        )
    )


def plain(model: nn.Cell, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).mean()


class OwnNorm(nn.Cell):
    """A batch normalisation without its name."""

    def construct(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / ops.sqrt(x.var(0) + 1e-5)


class Deaf(nn.Cell):
    """A backward pass that ignores the gradient that it is handed."""

    def construct(self, x: Tensor) -> Tensor:
        return x**2

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (2 * x / ITEMS,)


class Baseline(nn.Cell):
    """A running mean of what went through before is taken off, and kept as an
    attribute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mean = 0.0

    def construct(self, x: Tensor) -> Tensor:
        out = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * float(x.mean().asnumpy())
        return out


class Moving(nn.Cell):
    """The same as a Parameter that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.moving = Parameter(
            Tensor(np.zeros(1, np.float32)), name="moving", requires_grad=False
        )

    def construct(self, x: Tensor) -> Tensor:
        out = x - self.moving.value()
        ops.assign(self.moving, 0.9 * self.moving + 0.1 * ops.stop_gradient(x).mean())
        return out


def seeding(model: nn.Cell, x: Tensor, y: Tensor) -> Tensor:
    ms.set_seed(1)
    return plain(model, ops.dropout(x, 0.5, True), y)


PLANTED = {
    "batch_norm": Case(
        lambda: net(nn.BatchNorm1d(CLASSES)),
        plain,
        (X, Y),
        kind="batch_statistics",
        where="1",
    ),
    "own_norm": Case(
        lambda: net(OwnNorm()), plain, (X, Y), kind="coupled", where="the loss"
    ),
    "deaf": Case(
        lambda: net(Deaf()), plain, (X, Y), kind="custom_backward", where="0.weight"
    ),
    "baseline": Case(
        lambda: net(Baseline()), plain, (X, Y), kind="hidden_state", where="1.mean"
    ),
    "moving": Case(
        lambda: net(Moving()), plain, (X, Y), kind="hidden_state", where="moving"
    ),
    "seeding": Case(net, seeding, (X, Y), kind="not_repeatable", where="the loss"),
}


class Attention(nn.Cell):
    """One head, padding masked out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Dense(WIDTH, CLASSES), nn.Dense(WIDTH, CLASSES)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        logits = (
            ops.matmul(self.q(x), self.k(x).swapaxes(1, 2))
            + (mask[:, None, :] - 1) * 1e4
        )
        return ops.matmul(ops.softmax(logits, -1), self.k(x))


def sequence_mean(model: nn.Cell, x: Tensor, mask: Tensor) -> Tensor:
    each = (model(x, mask) ** 2).sum(-1)
    return ((each * mask).sum(1) / mask.sum(1)).mean()


def embedded(model: nn.Cell, batch: Any) -> Tensor:
    """A dict as the only argument."""
    ids = ops.maximum(batch["ids"], Tensor(0, ms.int32))
    return ((model(ids).mean(1) - batch["target"]) ** 2).mean()


CLOSED_OVER = net()

SOUND = {
    "plain": Case(net, plain, (X, Y)),
    "dropout": Case(lambda: net(nn.Dropout(p=0.5), nn.Dropout(p=0.2)), plain, (X, Y)),
    "layer_norm": Case(lambda: net(nn.LayerNorm((CLASSES,))), plain, (X, Y)),
    "attention": Case(
        lambda: filled(Attention()),
        sequence_mean,
        (SEQUENCES, Tensor(MASK.astype(np.float32))),
    ),
    "embedding": Case(
        lambda: filled(
            nn.SequentialCell(nn.Embedding(CLASSES, WIDTH), nn.Dense(WIDTH, 1))
        ),
        embedded,
        ({"ids": LABELS, "target": Y},),
    ),
    "criterion": Case(net, nn.MSELoss(), (X, Y)),
    "functional_criterion": Case(net, ops.mse_loss, [X, Y]),
    "closing_over": Case(
        lambda: CLOSED_OVER, lambda x, y: plain(CLOSED_OVER, x, y), (X, Y)
    ),
    "with_loss_cell": Case(
        lambda: CLOSED_OVER, nn.WithLossCell(CLOSED_OVER, nn.MSELoss()), (X, Y)
    ),
    "frozen_statistics": Case(
        lambda: net(nn.BatchNorm1d(CLASSES)).set_train(False), plain, (X, Y)
    ),
}
