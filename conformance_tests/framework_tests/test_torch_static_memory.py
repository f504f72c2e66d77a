"""Memory that the next micro-batch writes over, as the replay of a CUDA graph does:
gradients, outputs, losses and buffers as aux.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradaccum
from conformance_tests.framework_tests.torch_versions import has_torch
from gradaccum_torch import backward, coupled_backward
from gradaccum_torch.torch_private.names import keep_own

STEPS = 4
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(8) % 4
OPTIONS = (
    {},
    {"clip_norm": 1e9},
    {"on_overflow": "ignore"},
    {"on_overflow": "drop_micro_batch"},
    {"separate_sums": True},
)
MEMORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "held by others": Tensor.detach,
    "of another library": lambda memory: torch.from_numpy(memory.numpy()),
}


class Static(torch.autograd.Function):
    """`x`, and its gradient, in the same memory each time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        out: Tensor | None,
        gradient: Tensor,
        handed: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.gradient, ctx.handed = gradient, handed
        return x.view_as(x) if out is None else out.data.copy_(x).detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gradient.data.copy_(upstream[0])
        return ctx.handed(ctx.gradient), None, None, None


class Net(nn.Module):
    """Two layers; `handed`: how their gradients, and the losses, come out of memory
    that stays; None: as usual.
    """

    def __init__(
        self, dtype: torch.dtype, handed: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.handed = nn.Linear(6, 8), nn.Linear(8, 4), handed
        self.to(dtype)
        self.memory = {
            name: torch.zeros_like(p, requires_grad=False)
            for name, p in self.named_parameters()
        }
        self.out, self.total = (
            torch.zeros(8 // STEPS, 4, dtype=dtype),
            torch.zeros((), dtype=dtype),
        )

    def forward(self, x: Tensor) -> Tensor:
        w = dict(self.named_parameters())
        if self.handed is not None:
            w = {
                name: Static.apply(p, None, self.memory[name], self.handed)
                for name, p in w.items()
            }
        out = functional.linear(
            x.to(w["first.weight"].dtype), w["first.weight"], w["first.bias"]
        ).tanh()
        return self.static(
            functional.linear(out, w["last.weight"], w["last.bias"]), self.out
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.static(functional.cross_entropy(self(x), y), self.total)

    def static(self, x: Tensor, memory: Tensor) -> Tensor:
        return (
            x
            if self.handed is None or x.shape != memory.shape
            else Static.apply(x, memory, torch.zeros_like(memory), Tensor.detach)
        )


def streaming(model: Net, opt: Any) -> Tensor | None:
    for x, y in zip(X.chunk(STEPS), Y.chunk(STEPS), strict=True):
        model.loss(x, y).backward()
        opt.step()
        opt.zero_grad()
    return None


def at_once(model: Net, opt: Any) -> Tensor:
    return backward(model.loss, X, Y, steps=STEPS, optimizer=opt)


def coupled(model: Net, opt: Any) -> Tensor:
    def loss_fn(out: Tensor) -> Tensor:
        return model.static(functional.cross_entropy(out, Y), model.total)

    return coupled_backward(model, loss_fn, X, steps=STEPS, optimizer=opt)


def moved(
    run: Callable[..., Tensor | None],
    dtype: torch.dtype,
    handed: Any,
    options: dict[str, Any] | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """How far two updates moved the parameters, and their losses; `options`: those of
    the wrapper, None without one.
    """
    model = Net(dtype, handed)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    opt = (
        None
        if options is None
        else gradaccum.wrap(
            inner, steps=None if run in (at_once, coupled) else STEPS, **options
        )
    )
    losses = []
    for _ in range(2):
        losses.append(run(model, opt))
        if opt is None:
            inner.step()
            inner.zero_grad()
        else:
            assert opt.result.applied
    return before - nn.utils.parameters_to_vector(model.parameters()).detach(), losses


CASES = [(run, options) for run in (streaming, at_once, coupled) for options in OPTIONS]
# There is no micro-batch to drop.
CASES.remove((coupled, {"on_overflow": "drop_micro_batch"}))


def named(value: Any) -> str:
    """Return the same name in every process of a test run, where a function's own text
    tells its address.
    """
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("run", "options"), CASES, ids=named)
def test_window(
    run: Callable[..., Tensor | None], options: dict[str, Any], memory: str
) -> None:
    check(run, torch.float64, MEMORIES[memory], options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [streaming, at_once])
def test_window_in_other_dtypes(
    run: Callable[..., Tensor | None], dtype: torch.dtype
) -> None:
    """The half-precision sum is in float32, and small gradients stay in ``.grad`` until
    ``step``.
    """
    check(run, dtype, Tensor.detach, {})


@pytest.mark.parametrize("run", [at_once, coupled])
def test_in_grad(run: Callable[..., Tensor | None]) -> None:
    check(run, torch.float64, Tensor.detach, None)


def check(
    run: Callable[..., Tensor | None],
    dtype: torch.dtype,
    handed: Any,
    options: dict[str, Any] | None,
) -> None:
    """The very bits that ordinary gradients give."""
    (got, losses), (expected, told) = (
        moved(run, dtype, handed, options),
        moved(run, dtype, None, options),
    )
    assert expected.abs().max() > 0.01
    assert torch.equal(got, expected)
    assert losses == told


def test_aux_is_copied() -> None:
    """A buffer that each micro-batch counts up."""
    weight, count = nn.Parameter(torch.ones(6, dtype=torch.float64)), torch.zeros(1)

    def loss_fn(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        count.add_(1)
        return (x * weight).mean(), {"all": count, "sum": count}

    _, aux = backward(loss_fn, X, steps=STEPS, aux={"all": "concatenate", "sum": "sum"})
    assert aux["all"].tolist() == [1, 2, 3, 4]
    assert aux["sum"].item() == 10


@pytest.mark.skipif(
    not has_torch("2.8"),
    reason=(
        "torch before 2.8 counts one or two users more of each storage: gradaccum"
        " copies"
    ),
)
def test_ordinary_gradients_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the backward pass returns one tensor for two parameters, which autograd
    copies itself.
    """
    model, shift = (
        nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 4)
        ),
        nn.Parameter(torch.zeros(4)),
    )
    opt = gradaccum.wrap(torch.optim.SGD([*model.parameters(), shift]), steps=STEPS)
    monkeypatch.setattr(Tensor, "clone", None)
    for _ in range(2 * STEPS):
        opt.backward((model(torch.ones(2, 1, 8, 8)) + shift).square().mean())
        opt.step()
    assert opt.result.applied


def test_gradients_on_a_device_whose_graphs_torch_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What torch.compile warms up or records looks like ordinary memory. So all is
    copied once its graphs are in use.
    """

    class Leaf:
        class grad(nn.Parameter):
            is_cuda = True

    # Another test may have compiled.
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    leaf = Leaf()
    leaf.grad = gradient = Leaf.grad(torch.ones(2), requires_grad=False)
    keep_own(leaf)
    assert leaf.grad is gradient
    monkeypatch.setitem(
        sys.modules, "torch._inductor.cudagraph_trees", ModuleType("trees")
    )
    keep_own(leaf)
    assert leaf.grad is not gradient
    assert torch.equal(leaf.grad, gradient)
