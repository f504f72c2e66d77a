"""torch: how near the accumulation itself comes to the speed of memory, beside NumPy's
triad; on one core.

The backward pass of `Known` hands over gradients that are there already, so nothing is
left of a micro-batch but what is asked about. float32 gradients are added by autograd,
in place, into ``.grad``; gradaccum adds calls to that and no pass. bfloat16 gradients
are added into float32 sums as autograd produces them. A CPU has no kernel for that in
torch, which copies each gradient to float32 first: so do all who add here, `OWN_MIXED`
too, and 8 bytes per element more are moved than are counted, through a cache as long as
a tensor fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import gradaccum
from benchmarks import triad
from benchmarks.case import Case

HAND_WRITTEN = "hand-written loop"
OWN_TRIAD = "torch.add(b, c, alpha=s, out=a)"
OWN_MIXED = "sum.add_(gradient)"
MIXED = triad.moved(4, 2, 4)


class Known(torch.autograd.Function):
    """A loss of 0 whose gradients are the tensors given, as new objects over the same
    memory.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *(gradient.detach() for gradient in ctx.gradients)


def cases(quick: bool) -> Iterator[Case]:
    triad.one_core()
    torch.set_num_threads(1)
    yield _float32()
    if not quick:
        yield _bfloat16()


def _float32() -> Case:
    contestants = {
        OWN_TRIAD: _own_triad(),
        HAND_WRITTEN: _into_grad(torch.float32),
        "gradaccum": _gradaccum(torch.float32),
    }
    moved = triad.YARDSTICKS | dict.fromkeys(contestants, triad.FLOAT32)
    return Case(
        "float32 gradients and sums",
        triad.NAME,
        triad.yardsticks() | contestants,
        rates=triad.rates(moved),
    )


def _bfloat16() -> Case:
    contestants = {
        OWN_MIXED: _own_mixed(),
        HAND_WRITTEN: _into_buffers(),
        "gradaccum": _gradaccum(torch.bfloat16),
    }
    moved = triad.YARDSTICKS | dict.fromkeys(contestants, MIXED)
    return Case(
        "bfloat16 gradients, float32 sums",
        triad.NAME,
        triad.yardsticks() | contestants,
        rates=triad.rates(moved),
    )


def _tensors(value: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full(triad.SHAPE, value, dtype=dtype) for _ in range(triad.TENSORS)]


def _parameters(dtype: torch.dtype) -> list[Tensor]:
    """Their values are read by nobody: one number each, expanded, so that they take no
    memory of their own.
    """
    return [
        torch.zeros((), dtype=dtype).expand(triad.SHAPE).detach().requires_grad_()
        for _ in range(triad.TENSORS)
    ]


def _loss(gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return Known.apply(gradients, *parameters)  # type: ignore[no-any-return,no-untyped-call]


def _own_triad() -> Callable[[], object]:
    a, b, c = (torch.full((triad.ELEMENTS,), value) for value in (0.0, 1.0, 2.0))
    return lambda: torch.add(b, c, alpha=triad.SCALE, out=a)


def _own_mixed() -> Callable[[], object]:
    sums, gradients = _tensors(0.0), _tensors(triad.GRADIENT, torch.bfloat16)
    return lambda: [
        total.add_(gradient) for total, gradient in zip(sums, gradients, strict=True)
    ]


def _into_grad(dtype: torch.dtype) -> Callable[[], object]:
    parameters, gradients = _parameters(dtype), _tensors(triad.GRADIENT, dtype)
    for parameter, zeros in zip(parameters, _tensors(0.0, dtype), strict=True):
        parameter.grad = zeros
    return lambda: _loss(gradients, parameters).backward()  # type: ignore[no-untyped-call]


def _into_buffers() -> Callable[[], object]:
    parameters, gradients, sums = (
        _parameters(torch.bfloat16),
        _tensors(triad.GRADIENT, torch.bfloat16),
        _tensors(0.0),
    )

    def micro_batch() -> None:
        _loss(gradients, parameters).backward()  # type: ignore[no-untyped-call]
        for parameter, total in zip(parameters, sums, strict=True):
            assert parameter.grad is not None
            total += parameter.grad.float()
            parameter.grad = None

    return micro_batch


def _gradaccum(dtype: torch.dtype) -> Callable[[], object]:
    parameters, gradients = _parameters(dtype), _tensors(triad.GRADIENT, dtype)
    optimizer = gradaccum.wrap(torch.optim.SGD(parameters), steps=None)
    first = _tensors(0.0, dtype)

    def micro_batch(gradients: Sequence[Tensor] = gradients) -> None:
        _loss(gradients, parameters).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    # What arrives first becomes the sum itself, so it must be a tensor that is not
    # added again.
    micro_batch(first)
    return micro_batch
