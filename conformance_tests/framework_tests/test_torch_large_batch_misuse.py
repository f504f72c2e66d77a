"""Refusals of a call with the large batch, with `.grad` as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_large_batch import X as WIDE_X
from conformance_tests.framework_tests.torch_large_batch import (
    make_model as make_wide_model,
)
from conformance_tests.framework_tests.torch_model import X, Y, make_model
from gradaccum_torch.large_batch import backward, coupled_backward

cross_entropy = nn.functional.cross_entropy


MODEL = make_model()


ERROR = gradaccum.GradAccumError


def loss_fn(x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(MODEL(x), y)


def window(on_overflow: str = "skip_window", **options: Any) -> Any:
    """A wrapped optimizer of another model."""
    inner = torch.optim.SGD(make_model().parameters(), lr=0.5)
    return gradaccum.wrap(inner, steps=None, on_overflow=on_overflow, **options)


BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    "moving_weight": (
        r"weight: expected a weight that stays.*weight\.detach\(\)",
        lambda: backward(
            loss_fn, X, Y, steps=2, weight=lambda x, y: MODEL(x).exp().sum()
        ),
    ),
    "jagged": (
        (
            r"batch\[0\]: expected a dense tensor to split; got a nested one of layout"
            r" torch.jagged"
        ),
        lambda: backward(
            loss_fn,
            torch.nested.nested_tensor([X[:2], X[:3]], layout=torch.jagged),
            steps=2,
        ),
    ),
    "sparse": (
        r"batch\[0\]: .*got a sparse one of layout torch.sparse_coo",
        lambda: backward(loss_fn, X.to_sparse(), Y, steps=2),
    ),
    "items_of_array": (
        r"batch\[1\]: expected a list of items",
        lambda: backward(loss_fn, X, Y, steps=2, axes=(0, "items")),
    ),
    "items_short": (
        r"batch\[2\]: expected 8 items, as batch\[0\] has; got 7",
        lambda: backward(
            loss_fn, X, Y, [{"w": 1.0}] * 7, steps=2, axes=(0, 0, "items")
        ),
    ),
    "graph": (
        r"batch\[0\]: expected a tensor without a graph",
        lambda: backward(loss_fn, MODEL[0](X), Y, steps=2),
    ),
    "int_loss": ("torch.int64", lambda: backward(lambda x, y: y.sum(), X, Y, steps=2)),
    "float_loss": (
        "got a float",
        lambda: backward(lambda x, y: loss_fn(x, y).item(), X, Y, steps=2),
    ),
    "no_graph": (
        "got one without a graph",
        lambda: backward(lambda x, y: loss_fn(x, y).detach(), X, Y, steps=2),
    ),
    "not_callable": ("loss_fn: expected a function", lambda: backward(X, Y, steps=2)),
    "bare_optimizer": (
        "optimizer: expected a wrapped",
        lambda: backward(
            loss_fn, X, Y, steps=2, optimizer=torch.optim.SGD(MODEL.parameters())
        ),
    ),
    "other_reduction": (
        "reduction='sum'",
        lambda: backward(
            loss_fn, X, Y, steps=2, reduction="mean", optimizer=window(reduction="sum")
        ),
    ),
    "coupled_in_part": (
        "skip_window",
        lambda: coupled_backward(
            MODEL, Tensor.std, X, steps=2, optimizer=window("drop_micro_batch")
        ),
    ),
    "coupled_outputs": (
        "outputs_fn: expected a function",
        lambda: coupled_backward(MODEL(X), X, X, steps=2),
    ),
    "coupled_list": (
        "outputs: expected a tensor",
        lambda: coupled_backward(lambda x: len(x), torch.mean, X, steps=2),
    ),
    "coupled_detached": (
        "got one without a graph",
        lambda: coupled_backward(MODEL, lambda o: o.detach().mean(), X, steps=2),
    ),
    "coupled_weight": (
        "to pack by",
        lambda: coupled_backward(MODEL, torch.mean, X, steps=2, weight=[1] * 8),
    ),
    "coupled_structure": (
        "outputs_fn: expected the outputs",
        lambda: coupled_backward(
            lambda x: {str(len(x)): MODEL(x)}, torch.mean, X, micro_batch_size=3
        ),
    ),
}


@pytest.mark.parametrize(("words", "call"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(words: str, call: Callable[[], Any]) -> None:
    for p in MODEL.parameters():
        p.grad = torch.ones_like(p)
    held = [p.grad for p in MODEL.parameters()]
    with pytest.raises(ERROR, match=words):
        call()
    for p, before in zip(MODEL.parameters(), held, strict=True):
        assert p.grad is before
        assert torch.equal(before, torch.ones_like(p))


@pytest.mark.parametrize("precision", [nn.Module.float, nn.Module.bfloat16])
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_own_backward_is_refused(precision: Any, retain: bool, place: int) -> None:
    model, calls = precision(make_model()), []

    def own(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        loss = cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)
        if len(calls) > place:
            loss.backward(retain_graph=retain)
        return loss

    with pytest.raises(
        gradaccum.UsageError,
        match="loss_fn: expected a function that computes the loss",
    ):
        backward(own, X, Y, steps=4)
    assert all(p.grad is None for p in model.parameters())


def test_gradient_penalty_is_no_own_backward() -> None:
    """`torch.autograd.grad` leaves `.grad` alone."""
    model, other = make_model(), make_model()

    def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return cross_entropy(model(x), y) + slope.square().mean()

    backward(lambda x, y: penalised(model, x, y), X, Y, steps=4)
    penalised(other, X, Y).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def test_nested_call_is_refused() -> None:
    model = make_model()

    def nested(x: Tensor, y: Tensor) -> Tensor:
        backward(lambda x, y: cross_entropy(model(x), y), x, y, steps=2)
        return cross_entropy(model(x), y)

    with pytest.raises(gradaccum.UsageError, match="loss_fn"):
        backward(nested, X, Y, steps=2)
    assert all(p.grad is None for p in model.parameters())


def test_other_outputs_in_second_pass_are_refused() -> None:
    """A counter that no buffer holds: the gradient would be of another loss."""
    model, calls = make_model(), []

    def outputs_fn(x: Tensor) -> Tensor:
        calls.append(1)
        return model(x) * (1 + 0.01 * len(calls))

    with pytest.raises(
        gradaccum.UsageError,
        match="outputs_fn: expected the same outputs in both passes",
    ):
        coupled_backward(outputs_fn, lambda o: o.std(), X, steps=2)
    assert all(p.grad is None for p in model.parameters())
    rows = iter([4, 4, 4, 3])
    with pytest.raises(gradaccum.UsageError, match="shape"):
        coupled_backward(
            lambda x: model(x[: next(rows)]), lambda o: o.std(), X, steps=2
        )


def test_wrapped_parameters_need_their_optimizer() -> None:
    """Those of another wrapped optimizer too, unless the loss does not reach them."""
    model, other = make_model(), make_model()
    opts = [
        gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.1), steps=None)
        for m in (model, other)
    ]
    with pytest.raises(gradaccum.UsageError, match="optimizer=opt"):
        backward(lambda x, y: cross_entropy(model(x), y), X, Y, steps=2)
    with pytest.raises(gradaccum.UsageError, match="requires_grad_"):
        backward(
            lambda x, y: cross_entropy(model(x) + other(x), y),
            X,
            Y,
            steps=2,
            optimizer=opts[0],
        )
    assert all(p.grad is None for p in (*model.parameters(), *other.parameters()))
    assert [opt.result.micro_step for opt in opts] == [0, 0]
    backward(
        lambda x, y: cross_entropy(model(x), y) + 0 * len(list(other.parameters())),
        X,
        Y,
        steps=2,
        optimizer=opts[0],
    )
    assert opts[0].result.applied
    half_model = make_model().bfloat16()
    opt = gradaccum.wrap(torch.optim.SGD(half_model.parameters(), lr=0.1), steps=None)
    with pytest.raises(gradaccum.UsageError, match="optimizer=opt"):
        backward(lambda x: half_model(x.bfloat16()).float().mean(), X, steps=2)
    assert opt.result.micro_step == 0


def test_workers_module_needs_an_optimizer(tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        parallel = nn.parallel.DistributedDataParallel(make_model())
        with pytest.raises(gradaccum.UsageError, match="module=module"):
            backward(lambda x, y: cross_entropy(parallel(x), y), X, Y, steps=2)
        with pytest.raises(gradaccum.UsageError, match="module=module"):
            coupled_backward(lambda x: parallel(x), lambda o: o.std(), X, steps=2)
    finally:
        torch.distributed.destroy_process_group()


def variance(outputs: Tensor) -> Tensor:
    return outputs.std(0).sum()


def assert_refused(model: nn.Module, call: Callable[[], Any], own: str) -> None:
    with pytest.raises(gradaccum.UsageError, match=own):
        call()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("temperature", [False, True])
def test_coupled_loss_that_runs_backward(wrapped: bool, temperature: bool) -> None:
    """It would leave a gradient in the outputs, and in a parameter of its own, beside
    the call's.
    """
    model, t = make_wide_model(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    options = (
        {
            "optimizer": gradaccum.wrap(
                torch.optim.SGD([*model.parameters(), t], lr=0.1), steps=None
            )
        }
        if wrapped
        else {}
    )

    def loss_fn(outputs: Tensor) -> Tensor:
        loss = variance(outputs) * (t if temperature else 1.0)
        loss.backward(retain_graph=True)
        return loss

    assert_refused(
        model,
        lambda: coupled_backward(model, loss_fn, WIDE_X, steps=3, **options),
        "backward",
    )


@pytest.mark.parametrize("wrapped", [False, True])
def test_outputs_that_run_backward(wrapped: bool) -> None:
    """The second pass has a graph, so there it is possible."""
    model = make_wide_model()
    options = (
        {
            "optimizer": gradaccum.wrap(
                torch.optim.SGD(model.parameters(), lr=0.1), steps=None
            )
        }
        if wrapped
        else {}
    )

    def outputs_fn(x: Tensor) -> Tensor:
        z = model(x)
        if z.requires_grad:
            z.sum().backward(retain_graph=True)
        return z

    assert_refused(
        model,
        lambda: coupled_backward(outputs_fn, variance, WIDE_X, steps=3, **options),
        "backward",
    )


def test_backward_into_another_module_beside_a_window() -> None:
    """A critic that the window does not sum over gets the large batch's gradient beside
    it.
    """
    model, critic = make_wide_model(), nn.Linear(3, 1, dtype=torch.float64)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=None)

    def loss_fn(x: Tensor) -> Tensor:
        loss = critic(model(x)).mean()
        loss.backward(retain_graph=True, inputs=list(critic.parameters()))
        return loss

    assert_refused(
        critic, lambda: backward(loss_fn, WIDE_X, steps=2, optimizer=opt), "backward"
    )
    assert opt.result.micro_step == 0


class Drifting(nn.Module):
    """The output depends on a buffer that every call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.inner(x) * self.calls


def test_replaced_buffer_in_both_passes() -> None:
    """Micro-batch i finds the buffer as in one pass over the micro-batches, and the
    buffer ends as after that pass.
    """
    torch.manual_seed(0)
    model = Drifting()
    factors = torch.arange(1.0, 6, dtype=torch.float64).repeat_interleave(2)[:, None]
    expected = torch.autograd.grad(
        variance(model.inner(WIDE_X) * factors), list(model.inner.parameters())
    )
    coupled_backward(model, variance, WIDE_X, steps=5)
    for p, q in zip(model.inner.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, q, rtol=1e-13, atol=1e-13)
    assert float(model.calls) == 5


def test_error_puts_the_replaced_buffer_back() -> None:
    """The very tensor: somebody else may hold it."""
    model = Drifting()
    held = model.calls

    def loss_fn(x: Tensor) -> Tensor:
        if float(model(x).detach().sum()) and float(model.calls) == 3:
            raise ZeroDivisionError
        return model(x).sum()

    with pytest.raises(ZeroDivisionError):
        backward(loss_fn, WIDE_X, steps=5)
    assert model.calls is held
    assert float(held) == 0


def test_half_gradients_are_left_to_autograd_after_the_call() -> None:
    """Nothing of the call takes what a later plain backward pass delivers."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    backward(
        lambda x: (x * weight).sum(), torch.ones(4, 2, dtype=torch.bfloat16), steps=2
    )
    weight.grad = None
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
