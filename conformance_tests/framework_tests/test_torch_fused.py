"""A fused optimizer's kernel divides the window's sum, unless a hook or a patch reads
the gradient. Dividing first gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gradaccum
from conformance_tests.framework_tests.torch_operations import Operations
from conformance_tests.framework_tests.torch_versions import has_torch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "Adam": lambda ps: torch.optim.Adam(
        ps, lr=0.1, fused=True, weight_decay=0.1, maximize=True
    ),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
}


class Reader(torch.optim.SGD):
    """Overrides `step` and reads the gradients in Python."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [
            p.grad.clone() for group in self.param_groups for p in group["params"]
        ]
        return super().step(closure)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, dtype=dtype))
        for shape in ((5, 3), (7,), ())
    ]


def run(
    opt: Any, ps: list[torch.nn.Parameter], weights: tuple[float, ...] = (2.0, 0.5, 1.0)
) -> None:
    for index, weight in enumerate(weights):
        opt.backward(sum(((index + 1) * p.sin()).square().sum() for p in ps), weight)
        opt.step()


@contextmanager
def looked_at(opt: Any, by: str) -> Iterator[list[torch.Tensor]]:
    """A hook reads the first gradient before the update. Yields the list of gradients
    it has read.
    """
    seen: list[torch.Tensor] = []

    def look(optimizer: Any, *_: object) -> None:
        seen.append(optimizer.param_groups[0]["params"][0].grad.clone())

    if by == "global":
        handle = register_optimizer_step_pre_hook(look)
    else:
        handle = (opt if by == "wrapper" else opt.optimizer).register_step_pre_hook(
            look
        )
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.3},
        {"loss_scale": 1024.0},
        {"accumulate_dtype": torch.float32},
    ],
    ids=str,
)
def test_fused_division_equals_dividing_first(
    name: str, options: dict[str, Any]
) -> None:
    """Both make the same parameters, bit for bit."""
    if name == "Adagrad" and not has_torch("2.13"):
        pytest.skip(
            "an older torch's fused Adagrad, 2.6's for one, does not divide by"
            " grad_scale: the division is a pass of its own"
        )
    first, second = parameters(), parameters()
    mine, other = (
        gradaccum.wrap(OPTIMIZERS[name](ps), steps=3, **options)
        for ps in (first, second)
    )
    for _ in range(3):
        with Operations() as ops:
            run(mine, first)
        with looked_at(other, "wrapper"), Operations() as others:
            run(other, second)
        assert "_foreach_div_" not in ops.names
        assert "_foreach_div_" in others.names
    assert all(map(torch.equal, first, second))
    assert not {"grad_scale", "found_inf"} & set(vars(mine.optimizer))


def test_wider_sum_is_divided_before_it_is_narrowed() -> None:
    """The kernel would divide what was rounded to float32 already."""
    first, second = parameters(), parameters()
    mine, other = (
        gradaccum.wrap(OPTIMIZERS["SGD"](ps), steps=3, accumulate_dtype=torch.float64)
        for ps in (first, second)
    )
    for _ in range(3):
        run(mine, first)
        with looked_at(other, "wrapper"):
            run(other, second)
    assert all(map(torch.equal, first, second))


def require_divided(seen: torch.Tensor) -> None:
    """Raise unless it is the first gradient of `run`'s window, by torch alone."""
    ps = parameters()
    total = sum(
        weight * ((index + 1) * ps[0].sin()).square().sum()
        for index, weight in enumerate((2.0, 0.5, 1.0))
    )
    torch.testing.assert_close(seen, torch.autograd.grad(total, ps[0])[0] / 3.5)


@pytest.mark.parametrize("by", ["wrapper", "inner", "global"])
def test_pre_hook_sees_divided_gradient(by: str) -> None:
    ps = parameters()
    opt = gradaccum.wrap(OPTIMIZERS["AdamW"](ps), steps=3)
    with looked_at(opt, by) as seen:
        run(opt, ps)
    require_divided(seen[0])


def test_overridden_step_sees_divided_gradient() -> None:
    ps = parameters()
    inner = Reader(ps, lr=0.1, fused=True)
    run(gradaccum.wrap(inner, steps=3), ps)
    require_divided(inner.seen[0])


def on_the_object(
    inner: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch, wrapped: Any
) -> None:
    inner.step = wrapped(inner.step)  # type: ignore[method-assign]


def on_the_class(
    inner: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch, wrapped: Any
) -> None:
    monkeypatch.setattr(type(inner), "step", wrapped(type(inner).step))


@pytest.mark.parametrize("patch", [on_the_object, on_the_class])
def test_patched_step_sees_divided_gradient(
    patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profilers and libraries patch `step` with `functools.wraps`, which keeps the name
    of torch's module.
    """
    ps = parameters()
    inner, seen = OPTIMIZERS["AdamW"](ps), []

    def wrapped(step: Any) -> Any:
        @functools.wraps(step)
        def looking(*args: Any, **kwargs: Any) -> Any:
            seen.append(ps[0].grad.clone())
            return step(*args, **kwargs)

        return looking

    patch(inner, monkeypatch, wrapped)
    run(gradaccum.wrap(inner, steps=3), ps)
    require_divided(seen[0])


def test_unfused_group_divides_first() -> None:
    ps = parameters()
    inner = torch.optim.AdamW(
        [{"params": ps[:1]}, {"params": ps[1:], "fused": False}], lr=0.1, fused=True
    )
    with Operations() as ops:
        run(gradaccum.wrap(inner, steps=3), ps)
    assert "_foreach_div_" in ops.names


@pytest.mark.parametrize(
    ("weights", "divided_first"), [((2.0, 0.5, 1.0), False), ((0.1, 0.1, 0.1), True)]
)
def test_float64_is_divided_by_float64(
    weights: tuple[float, ...], divided_first: bool
) -> None:
    """The kernel divides by a float32, which can hold 3.5 but not the sum of three
    tenths.
    """
    first, second = parameters(torch.float64), parameters(torch.float64)
    mine, other = (
        gradaccum.wrap(OPTIMIZERS["AdamW"](ps), steps=3) for ps in (first, second)
    )
    with Operations() as ops:
        run(mine, first, weights)
    with looked_at(other, "wrapper"):
        run(other, second, weights)
    assert ("_foreach_div_" in ops.names) == divided_first
    assert all(map(torch.equal, first, second))
