"""float32 masters in torch: the inner optimizer updates them, they cost one copy, and a
write into the model overrides them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradaccum

from .torch_model import loss_of, same, train, values
from .torch_model import make as make_in

STEP = 2.0**-13
INNER: dict[str, Any] = {
    "sgd": lambda ps: SGD(ps, lr=STEP),
    "momentum": lambda ps: SGD(ps, lr=STEP, momentum=0.9),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=STEP, fused=True),
}


def make(inner: Any = "sgd", **options: Any) -> tuple[nn.Module, Any]:
    return make_in("masters", steps=2, inner=INNER.get(inner, inner), **options)


def masters_of(opt: Any) -> list[Tensor]:
    return list(opt.master_weights.values())


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("inner", INNER)
def test_update_equals_float32_optimizer(inner: str) -> None:
    """A float32 optimizer with the same gradients makes the same masters, bit for
    bit.
    """
    model, opt = make(inner)
    twins = [p.detach().float().requires_grad_() for p in model.parameters()]
    bare = INNER[inner](twins)
    seen: list[list[Tensor]] = []
    opt.register_step_pre_hook(
        lambda *_: seen.append([master.grad.clone() for master in masters_of(opt)])
    )
    train(model, opt, 12)
    assert len(seen) == 6
    for gradients in seen:
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient
        bare.step()
    assert all_equal(masters_of(opt), twins)
    assert same(model, [twin.bfloat16() for twin in twins])


def test_bare_half_state_becomes_float32() -> None:
    parameter = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    bare = INNER["momentum"]([parameter])
    (parameter * 3).sum().backward()
    bare.step()
    bare.zero_grad()
    opt: Any = gradaccum.wrap(bare, steps=1, master_weights=True)
    momentum = opt.state[parameter]["momentum_buffer"]
    assert momentum.dtype == torch.float32
    assert momentum.tolist() == [3.0, 3.0]


def test_added_group_has_masters_too() -> None:
    model, opt = make()
    train(model, opt, 1)
    late = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    opt.add_param_group({"params": [late]})
    (late.sum() + loss_of(model)).backward()
    opt.step()
    assert masters_of(opt)[-1].tolist() == [1 - STEP / 2] * 2


# What something else writes into the model.


def test_write_through_data_reaches_the_masters() -> None:
    """The tensor's version does not count such a write. Elements that it leaves keep
    their masters.
    """
    parameter = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    opt: Any = gradaccum.wrap(INNER["sgd"]([parameter]), steps=1, master_weights=True)
    for index in range(3):
        if index == 1:
            parameter.data[0] = 3.0
        opt.backward(parameter.sum())
        opt.step()
    assert opt.master_weights[0].tolist() == [3 - 2 * STEP, 1 - 3 * STEP, 1 - 3 * STEP]


class ThroughData(SGD):
    parameters: list[Tensor]

    def step(self, closure: Any = None) -> Any:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data -= parameter.grad


def test_optimizer_that_ignores_the_masters_is_refused() -> None:
    parameter = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    inner = ThroughData([parameter])
    opt: Any = gradaccum.wrap(inner, steps=1, master_weights=True)
    inner.parameters = [parameter]
    opt.backward(parameter.sum())
    with pytest.raises(gradaccum.UsageError, match="got ThroughData"):
        opt.step()
    opt.discard()
    inner.parameters = inner.param_groups[0]["params"]
    opt.backward(parameter.sum())
    opt.step()
    assert parameter == 0


class Averaging(SGD):
    """Switches between its weights and their average, as schedulefree's optimizers
    do.
    """

    def eval(self) -> None:
        self._switch(0.5)

    def train(self) -> None:
        self._switch(2.0)

    def _switch(self, factor: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(factor)


def test_switched_weights_reach_the_model() -> None:
    """No bit of the masters is lost, and a method that changes nothing writes nothing:
    autograd would refuse the backward pass after it.
    """
    model, opt = make(inner=lambda ps: Averaging(ps, lr=STEP))
    train(model, opt, 3)
    weights = values(model)
    masters = [master.clone() for master in masters_of(opt)]
    opt.eval()
    assert same(model, [weight * 0.5 for weight in weights])
    opt.train()
    assert same(model, weights)
    assert all_equal(masters_of(opt), masters)
    loss = loss_of(model)
    opt.optimizer.prefetch = lambda: None
    opt.prefetch()
    loss.backward()
    opt.step()
    assert opt.result.optimizer_step == 2
