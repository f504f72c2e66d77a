"""The large batch as the window of a wrapped optimizer: one call, one update, by the
wrapper's own rules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_large_batch import gradients
from conformance_tests.framework_tests.torch_model import (
    X,
    Y,
    loss_of,
    make_model,
)
from gradaccum_torch.large_batch import backward, coupled_backward

cross_entropy = nn.functional.cross_entropy


def split(model: nn.Module, opt: Any) -> Tensor:
    return backward(
        lambda x, y: cross_entropy(model(x), y), X, Y, steps=3, optimizer=opt
    )


def wrap(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return gradaccum.wrap(inner, None, **options)


@pytest.mark.parametrize(
    "scale",
    [
        lambda: None,
        lambda: 1024.0,
        lambda: torch.amp.GradScaler("cpu", init_scale=64.0),
    ],
)
@pytest.mark.parametrize("coupled", [False, True])
def test_leaves_beside_the_optimizer(scale: Callable[[], Any], coupled: bool) -> None:
    """A critic that the generator's loss goes through gets the large batch's gradient,
    freed of scale and weights, beside what it held.
    """
    generator, critic = make_model(), nn.Linear(2, 1)
    held = critic.weight.grad = torch.ones_like(critic.weight)
    large = copy.deepcopy(nn.Sequential(generator, critic))
    large[1].weight.grad = torch.ones_like(held)
    opt, inner = wrap(generator, loss_scale=scale()), wrap(large[0])

    def outputs_of(x: Tensor) -> Tensor:
        return critic(generator(x))

    if coupled:
        coupled_backward(outputs_of, Tensor.std, X, steps=3, optimizer=opt)
        large(X).std().backward()
    else:
        backward(lambda x: outputs_of(x).square().mean(), X, steps=3, optimizer=opt)
        large(X).square().mean().backward()
    inner.step()
    inner.flush()
    assert critic.weight.grad is held
    pair = gradients(critic), gradients(large[1])
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)
    pair = [*generator.parameters()], [*large[0].parameters()]
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_counted", [False, True])
def test_begun_window_is_refused(is_counted: bool) -> None:
    """And is left as it is."""
    model = make_model()
    opt = wrap(model)
    loss_of(model).backward()
    if is_counted:
        opt.step()
    held = gradients(model)
    values = copy.deepcopy(held)
    with pytest.raises(gradaccum.UsageError, match=r"discard|zero_grad"):
        split(model, opt)
    assert opt.result.micro_step == is_counted
    for parameter, gradient, value in zip(
        model.parameters(), held, values, strict=True
    ):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)
