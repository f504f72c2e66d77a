"""The cost of a call with the large batch, counted: bytes that autograd keeps,
operations, passes. And the same under `torch.compile`.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_operations import Operations
from gradaccum_torch.large_batch import backward, coupled_backward

ITEMS = 64
X = torch.randn(ITEMS, 16, generator=torch.Generator().manual_seed(1))
Y = torch.randn(ITEMS, 16, generator=torch.Generator().manual_seed(2))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)
    )


class Kept:
    """Counts the bytes that autograd keeps for the backward pass, those of parameters
    left out, and their peak.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.now = self.peak = 0

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda box: box[0]
        )
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        # The tensor itself would hold the node that holds the box.
        box = Box([tensor.detach()])
        if tensor.untyped_storage().data_ptr() not in self._own:
            self.now += tensor.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(box, self._free, tensor.nbytes).atexit = False
        return box

    def _free(self, size: int) -> None:
        self.now -= size


class Box(list[Tensor]):
    __slots__ = ("__weakref__",)


def kept(run: Callable[[nn.Module], Any]) -> int:
    model = make_model()
    with Kept(model) as bytes_:
        run(model)
    assert bytes_.now == 0
    return bytes_.peak


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


@pytest.mark.parametrize("steps", [2, 8, 64])
def test_activations_of_one_micro_batch(steps: int) -> None:
    """1 / steps of the large batch's, in `.grad`, in a window and coupled. Aux of one
    micro-batch does not outlive it.
    """
    whole = kept(lambda model: loss_of(model, X, Y).backward())
    assert (
        kept(
            lambda model: backward(functools.partial(loss_of, model), X, Y, steps=steps)
        )
        * steps
        == whole
    )

    def window(model: nn.Module) -> None:
        opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=None)
        backward(functools.partial(loss_of, model), X, Y, steps=steps, optimizer=opt)

    assert kept(window) * steps <= whole * 1.05
    outputs = kept(lambda model: loss_of_outputs(model(X)).backward())
    head = kept(
        lambda model: loss_of_outputs(model(X).detach().requires_grad_()).backward()
    )
    assert kept(
        lambda model: coupled_backward(model, loss_of_outputs, X, steps=steps)
    ) <= max((outputs - head) // steps, head)


def loss_of_outputs(outputs: Tensor) -> Tensor:
    return outputs.std()


def tensors() -> list[Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


@pytest.fixture
def others_frozen() -> Iterator[None]:
    """What other tests have left is not among the garbage collector's objects, which
    may be millions.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("others_frozen")
def test_one_accumulator() -> None:
    """Between two micro-batches nothing of the parameters' size lives but the sums:
    `.grad`, or float32 for half precision.
    """
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model().to(dtype)
        live: list[int] = []
        others = tensors()  # The model's.
        own = set(map(id, others))
        sizes = {p.numel() for p in model.parameters() if p.numel() > 1000}

        def loss_fn(
            x: Tensor,
            live: list[int] = live,
            model: nn.Module = model,
            sizes: set[int] = sizes,
            own: set[int] = own,
        ) -> Tensor:
            found = {
                id(t): t for t in tensors() if id(t) not in own and t.numel() in sizes
            }
            grads = {
                id(p.grad): p.grad
                for p in model.parameters()
                if p.grad is not None and p.numel() in sizes
            }
            live.append(sum(t.nbytes for t in {**found, **grads}.values()))
            return model(x.to(model[0].weight.dtype)).float().square().mean()

        backward(loss_fn, X, steps=4)
        full = sum(p.numel() * 4 for p in model.parameters() if p.numel() in sizes)
        assert live[0] + full == live[1] == live[2] == live[3]


@pytest.mark.parametrize("steps", [4, 16])
def test_fewer_operations_than_the_loop_by_hand(steps: int) -> None:
    """No pass over the gradients, and no operation per micro-batch that the loop does
    not have.
    """
    model = make_model()
    with Operations() as ours:
        backward(functools.partial(loss_of, model), X, Y, steps=steps)
    model.zero_grad()
    with Operations() as by_hand:
        total = torch.zeros(())
        for x, y in zip(X.chunk(steps), Y.chunk(steps), strict=True):
            loss = loss_of(model, x, y) / steps
            loss.backward()
            total = total + loss.detach()
    assert sum(ours.counts.values()) <= sum(by_hand.counts.values()), (
        ours.counts - by_hand.counts
    )
    assert not {"_foreach_div_", "_foreach_mul_", "div_", "mul_"} & set(ours.counts)


def test_loss_function_runs_once_per_micro_batch() -> None:
    """Twice where it is coupled, the first time without a graph; the loss of all
    once.
    """
    model, calls = make_model(), []

    def outputs_fn(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return model(x)

    backward(lambda x: outputs_fn(x).mean(), X, steps=4)
    assert calls == [True] * 4
    calls.clear()
    coupled_backward(outputs_fn, lambda o: (calls.append(None), o.std())[1], X, steps=4)
    assert calls == [False] * 4 + [None] + [True] * 4


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("what", ["model", "loss", "call"])
def test_compiled(what: str) -> None:
    """A compiled model or loss inside of the call, and the call inside of a compiled
    function; a smaller last micro-batch among them.
    """
    torch._dynamo.reset()
    model, other = make_model(), make_model()
    forward = torch.compile(model, backend="aot_eager") if what == "model" else model

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return (forward(x) - y).square().mean()

    if what == "loss":
        loss_fn = torch.compile(loss_fn, backend="aot_eager")

    def call(x: Tensor, y: Tensor) -> Tensor:
        return backward(loss_fn, x * 2, y, micro_batch_size=24)

    if what == "call":
        call = torch.compile(call, backend="eager")
    loss = call(X, Y)
    expected = loss_of(other, X * 2, Y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
