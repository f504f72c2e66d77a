"""The cost of a call with the large batch, counted: bytes, operations, passes. And the
same under `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradaccum
from gradaccum_torch import backward, coupled_backward

from .torch_large_batch import gradients
from .torch_operations import Operations, Peak

quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
ITEMS = 64
X = torch.randn(ITEMS, 16, generator=torch.Generator().manual_seed(1))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(64, 16)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def by_hand(model: nn.Module, x: Tensor, steps: int) -> None:
    total = torch.zeros(())
    for part in x.chunk(steps):
        loss = loss_of(model, part) / steps
        loss.backward()
        total = total + loss.detach()


def of_call(model: nn.Module, x: Tensor, steps: int) -> None:
    backward(lambda x: loss_of(model, x), x, steps=steps)


def of_window(model: nn.Module, x: Tensor, steps: int) -> None:
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=None)
    backward(lambda x: loss_of(model, x), x, steps=steps, optimizer=opt)


def of_coupled(model: nn.Module, x: Tensor, steps: int) -> None:
    coupled_backward(model, torch.std, x, steps=steps)


@pytest.mark.parametrize("run", [of_call, of_window, of_coupled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_loop_by_hand(
    run: Callable[..., None], dtype: torch.dtype
) -> None:
    """The activations of one micro-batch, and one sum: `.grad`, or float32 for half
    precision. A coupled loss needs the outputs of all.
    """
    x = X.to(dtype)
    peaks = []
    for each in (run, by_hand):
        model = make_model(dtype)
        with Peak() as memory:
            each(model, x, 16)
        peaks.append(memory.peak)
    scalars = 256
    sums = 5 * sum(p.numel() for p in model.parameters()) * (dtype != torch.float32)
    outputs = 3 * x.nbytes * (run is of_coupled)
    assert peaks[0] <= peaks[1] + scalars + sums + outputs


@pytest.mark.parametrize("steps", [4, 16])
def test_fewer_operations_than_the_loop_by_hand(steps: int) -> None:
    """No pass over the gradients, and no operation per micro-batch that the loop does
    not have.
    """
    model = make_model()
    with Operations() as ours:
        of_call(model, X, steps)
    model.zero_grad()
    with Operations() as others:
        by_hand(model, X, steps)
    assert len(ours.names) <= len(others.names), ours.counts - others.counts
    assert not {"_foreach_div_", "_foreach_mul_", "div_", "mul_"} & set(ours.names)


@quiet
@pytest.mark.parametrize("what", ["model", "loss", "call"])
def test_compiled(what: str) -> None:
    """A compiled model or loss inside of the call, and the call inside of a compiled
    function; a smaller last micro-batch among them.
    """
    torch._dynamo.reset()
    model = make_model()
    other = make_model()
    forward = torch.compile(model, backend="aot_eager") if what == "model" else model

    def loss_fn(x):
        return loss_of(forward, x)

    if what == "loss":
        loss_fn = torch.compile(loss_fn, backend="aot_eager")

    def call(x):
        return backward(loss_fn, x * 2, micro_batch_size=24)

    if what == "call":
        call = torch.compile(call, backend="eager")
    loss = call(X)
    expected = loss_of(other, X * 2)
    expected.backward()
    assert_close(loss, expected.detach())
    assert_close(gradients(model), gradients(other), rtol=1e-4, atol=1e-6)


@quiet
@pytest.mark.parametrize("named", [False, True])
def test_compiled_statistics_move_once_or_are_refused(named: bool) -> None:
    """Compiled code may call no hook, by which a coupled loss finds the modules."""
    torch._dynamo.reset()

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))

    model = make()
    other = make()
    compiled = torch.compile(lambda x: model(x), backend="aot_eager")
    compiled(X[:16])
    model.load_state_dict(other.state_dict())
    if not named:
        with pytest.raises(gradaccum.UsageError, match=r"modules=\(model,\)"):
            coupled_backward(compiled, torch.std, X, steps=4)
        return
    coupled_backward(compiled, torch.std, X, steps=4, modules=[model])
    for part in X.chunk(4):
        other(part)
    assert_close([*model.buffers()], [*other.buffers()])
