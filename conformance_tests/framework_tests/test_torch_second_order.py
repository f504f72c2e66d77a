"""Optimizers that differentiate ``.grad`` again get the Hessian of the window's loss,
not of the scaled sum.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradaccum

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


class Newton(torch.optim.Optimizer):
    """Keeps the gradient and the Hessian times ones, and moves a little."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        self.gradients = [p.grad.detach().clone() for p in own]
        curved = [p for p in own if p.grad.requires_grad]
        self.hessians = list(
            torch.autograd.grad(
                [p.grad for p in curved], curved, [torch.ones_like(p) for p in curved]
            )
        )
        with torch.no_grad():
            for p in own:
                p.add_(0.125)


def run(
    steps: int, rows: torch.Tensor, wrapped: bool, **options: Any
) -> tuple[Newton, torch.Tensor]:
    """The gradient of the first parameter has a graph, that of the second has none."""
    parameter, linear = (
        nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64)) for _ in range(2)
    )
    inner = Newton([parameter, linear])
    opt: Any = gradaccum.wrap(inner, steps=steps, **options) if wrapped else inner
    for _ in range(2):
        for part in rows.chunk(steps):
            loss = ((parameter**3 + linear) * part).sum(1).mean()
            if wrapped:
                opt.backward(loss, create_graph=True)
            else:
                loss.backward(create_graph=True)
                if "clip_norm" in options:
                    nn.utils.clip_grad_norm_([parameter, linear], options["clip_norm"])
            opt.step()
            opt.zero_grad()
    return inner, parameter.detach()


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1024.0}, {"clip_norm": 0.5}])
@pytest.mark.parametrize("steps", [1, 4])
def test_hessian_equals_large_batch(steps: int, options: dict) -> None:
    rows = torch.arange(16, dtype=torch.float64).reshape(8, 2) / 4
    (mine, at), (bare, expected) = (
        run(steps, rows, True, **options),
        run(1, rows, False, **options),
    )
    torch.testing.assert_close(
        mine.gradients,
        bare.gradients,
        rtol=1e-5 if "clip_norm" in options else 1e-12,
        atol=0,
    )
    torch.testing.assert_close(mine.hessians, bare.hessians, rtol=1e-12, atol=0)
    assert torch.equal(at, expected)


def test_raising_update_keeps_the_graph() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    inner = Newton([parameter])
    opt: Any = gradaccum.wrap(inner, steps=2)

    def fail(*_: object) -> None:
        raise RuntimeError("hook")

    handle = opt.register_step_pre_hook(fail)
    opt.backward((parameter**3).sum(), create_graph=True)
    opt.step()
    opt.backward((parameter**3).sum(), create_graph=True)
    with pytest.raises(RuntimeError, match="hook"):
        opt.step()
    handle.remove()
    opt.flush()
    assert torch.equal(inner.gradients[0], torch.tensor([3.0, 12.0]))
    assert torch.equal(inner.hessians[0], torch.tensor([6.0, 12.0]))
