"""A model small enough to compare parameter by parameter, its eight rows of data, and
what one large batch makes of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import gradaccum

X = torch.arange(24, dtype=torch.float32).reshape(8, 3) / 8
Y = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(
    model: nn.Module, rows: slice = slice(None), reduction: str = "mean"
) -> Tensor:
    dtype = next(model.parameters()).dtype
    outputs = model(X[rows].to(dtype)).to(torch.promote_types(dtype, torch.float32))
    return nn.functional.cross_entropy(outputs, Y[rows], reduction=reduction)


def rows_of(index: int) -> slice:
    return slice(2 * index, 2 * index + 2)


def large_batch_step(
    make: Any, updates: int = 1, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The parameters after so many updates with all rows."""
    model = make_model().to(dtype)
    optimizer = make(model.parameters())
    for _ in range(updates):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


MAKERS = {
    "sgd": lambda ps: SGD(ps, lr=0.5),
    "adamw_fused": lambda ps: AdamW(ps, lr=0.1, fused=True),
    "adamw_foreach": lambda ps: AdamW(ps, lr=0.1, foreach=True),
    "adam_weight_decay": lambda ps: torch.optim.Adam(ps, lr=0.1, weight_decay=0.1),
    "sgd_momentum": lambda ps: SGD(ps, lr=0.5, momentum=0.9, nesterov=True),
}


HALF = {"dtype": torch.bfloat16}
PLACES: dict[str, dict[str, Any]] = {
    "in .grad": {},
    "in float64": {"accumulate_dtype": "float64"},
    "kept apart": {"on_overflow": "drop_micro_batch"},
    "separate": {"separate_sums": True},
    "half precision": HALF,
    "masters": {**HALF, "master_weights": True},
    "masters, half sums": {
        **HALF,
        "master_weights": True,
        "accumulate_dtype": "bfloat16",
    },
}
"""The model's dtype and the options that put a window's sum there."""
by_place = pytest.mark.parametrize("place", PLACES)
by_float_place = pytest.mark.parametrize("place", [*PLACES][:4])


def make(place: str = "in .grad", **options: Any) -> tuple[nn.Module, Any]:
    """The model, and its optimizer, wrapped with its sum in one of `PLACES`."""
    options = {"steps": 4, **PLACES[place], **options}
    model = make_model().to(options.pop("dtype", torch.float32))
    inner = options.pop("inner", MAKERS["sgd"])
    return model, gradaccum.wrap(inner(model.parameters()), **options)


def train(model: nn.Module, opt: Any, micro_batches: int, first: int = 0) -> None:
    """The usual loop over micro-batches `first` to `first` + `micro_batches`."""
    for index in range(first, first + micro_batches):
        loss_of(model, rows_of(index % 4)).backward()
        opt.step()
        opt.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def same(model: nn.Module, other: nn.Module | list[Tensor]) -> bool:
    """True if the parameters are these, bit for bit."""
    wanted = list(other.parameters()) if isinstance(other, nn.Module) else other
    pairs = zip(model.parameters(), wanted, strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


# What a user may do to ``.grad``.


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)


def clear(model: nn.Module) -> None:
    model.zero_grad()


def zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def assign(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
