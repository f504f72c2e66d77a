"""`gradaccum_torch.verify_loss_scaling` names a custom function that ignores its
upstream gradient, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from gradaccum_torch import verify_loss_scaling


class IgnoresUpstream(torch.autograd.Function):
    """x^2, written as if the function were always the last one, with an upstream
    gradient of 1.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x


class Carries(IgnoresUpstream):
    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return upstream * 2 * x


class Clamps(IgnoresUpstream):
    """Linear up to the clamp, which a scaled gradient exceeds."""

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (upstream * 2 * x).clamp(-1.0, 1.0)


class Net(nn.Module):
    def __init__(
        self,
        function: type[torch.autograd.Function],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = (
            nn.Linear(4, 3).to(dtype),
            nn.Linear(3, 1).to(dtype),
            function,
        )
        self.dtype = dtype

    def loss(self) -> Tensor:
        return (
            self.last(
                self.function.apply(self.first(torch.ones(2, 4, dtype=self.dtype)))
            )
            .float()
            .mean()
        )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_linear_loss_passes(dtype: torch.dtype) -> None:
    net = Net(Carries, dtype)
    report = verify_loss_scaling(net.loss, net.named_parameters())
    assert report.linear
    assert report.culprits == ()
    assert set(report.errors) == {
        "first.weight",
        "first.bias",
        "last.weight",
        "last.bias",
    }
    assert isinstance(report, gradaccum.LinearityReport)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("function", [IgnoresUpstream, Clamps])
def test_culprit_is_named(
    function: type[torch.autograd.Function], dtype: torch.dtype
) -> None:
    net = Net(function, dtype)
    report = verify_loss_scaling(lambda: 4 * net.loss(), net.named_parameters())
    assert not report.linear
    assert report.culprits == (function.__name__,)
    assert report.errors["last.weight"] == 0.0, (
        "what lies behind the culprit does scale"
    )
    assert report.errors["first.weight"] > 0.4


def test_functions_before_culprit_are_not_blamed() -> None:
    net = Net(Carries)
    report = verify_loss_scaling(
        lambda: IgnoresUpstream.apply(Carries.apply(net.loss())), net.parameters()
    )
    assert report.culprits == ("IgnoresUpstream",)
    assert set(report.errors) == {"0", "1", "2", "3"}
    assert all(error > 0.9 for error in report.errors.values())


def test_clipping_hook_is_seen() -> None:
    """The loss is not linear, and no function is to blame."""
    weight = torch.full((3,), 2.0, requires_grad=True)

    def loss() -> Tensor:
        hidden = weight * 3
        hidden.register_hook(lambda gradient: gradient.clamp(max=1.0))
        return hidden.sum()

    report = verify_loss_scaling(loss, {"weight": weight})
    assert (report.linear, report.culprits) == (False, ())


def test_usual_layers_are_linear() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64, 3),
    )
    embedding = nn.Embedding(5, 3, sparse=True)
    indices = torch.tensor([0, 1, 1])
    named = {**dict(model.named_parameters()), "embedding": embedding.weight}

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.cross_entropy(
                model(torch.randn(3, 1, 6, 6)) + embedding(indices), indices
            )

    report = verify_loss_scaling(loss, named)
    assert report.linear, str(report)


@pytest.mark.parametrize(
    "loss", [lambda w: (w * math.nan).sum(), lambda w: (w * math.inf).sum()]
)
def test_nonfinite_gradient_is_not_linear(loss: Callable[[Tensor], Tensor]) -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not verify_loss_scaling(lambda: loss(weight), [weight]).linear


def test_float16_overflow_is_no_fault() -> None:
    """These gradients overflow at the large scales of the check."""
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    assert verify_loss_scaling(lambda: (weight.float() * 1000).sum(), [weight]).linear


@pytest.mark.parametrize("size", [1e-9, 3e-8, 1e-4])
def test_float16_underflow_is_no_fault(size: float) -> None:
    """These gradients underflow without a scale."""
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    assert verify_loss_scaling(
        lambda: (weight.float() * size * torch.tensor([1.0, 1.7])).sum(), [weight]
    ).linear
    under_autocast = torch.ones(2, 2, requires_grad=True)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return (under_autocast @ under_autocast).float().sum() * size * 0.7

    assert verify_loss_scaling(loss, [under_autocast]).linear


def test_check_changes_nothing() -> None:
    net = Net(IgnoresUpstream)
    net.loss().backward()
    before = [(p.detach().clone(), p.grad, p.grad.clone()) for p in net.parameters()]
    random = torch.get_rng_state()
    verify_loss_scaling(
        lambda: nn.functional.dropout(net.first(torch.rand(2, 4))).sum(),
        net.parameters(),
    )
    assert torch.equal(torch.get_rng_state(), random)
    for parameter, (value, gradient, copy) in zip(
        net.parameters(), before, strict=True
    ):
        assert torch.equal(parameter, value)
        assert parameter.grad is gradient
        assert torch.equal(gradient, copy)


def test_check_leaves_open_window_alone() -> None:
    net = Net(Carries, torch.float16)
    opt = gradaccum.wrap(torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    net.loss().backward()
    opt.step()
    assert verify_loss_scaling(net.loss, net.parameters()).linear
    assert opt.result.micro_step == 1
    net.loss().backward()
    opt.step()
    assert opt.result.applied


def test_unused_parameters_are_left_out() -> None:
    net, frozen = Net(Carries), torch.ones(2)
    report = verify_loss_scaling(
        net.loss, [*net.parameters(), frozen, torch.ones(1, requires_grad=True)]
    )
    assert report.linear
    assert set(report.errors) == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("loss", "parameters"),
    [
        (lambda: 1.0, [torch.ones(1, requires_grad=True)]),
        (lambda: torch.ones(()), ["weight"]),
    ],
)
def test_wrong_arguments_are_refused(loss: Callable, parameters: list) -> None:
    with pytest.raises(
        (gradaccum.ArgumentTypeError, gradaccum.ArgumentValueError),
        match=r"loss|parameters",
    ):
        verify_loss_scaling(loss, parameters)
