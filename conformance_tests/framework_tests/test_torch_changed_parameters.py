"""Parameters that the user casts, replaces, freezes or drops between two windows; and
gradients of another dtype.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import (
    MAKERS,
    clip,
    loss_of,
    make,
    make_model,
    rows_of,
    same,
    train,
    values,
)

SMALL = 2.0**-8
"""2048 of these sum to 8. A sum in bfloat16 stops at 1."""
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_cast_model_is_summed_in_float32(later: bool, masters: bool) -> None:
    """The user casts the model to bfloat16 after wrapping, before its first window or
    later.
    """
    model, opt = make(steps=None, reduction="sum", master_weights=masters)
    if later:
        (loss_of(model) * 0).backward()
        opt.step()
        opt.flush()
    bias = model.to(torch.bfloat16)[2].bias
    nn.init.zeros_(bias)
    for _ in range(2048):
        (bias * SMALL).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.flush()
    assert bias.tolist() == [-4.0, -4.0]


@pytest.mark.parametrize(
    ("old", "new"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
)
def test_cast_to_wider_dtype_trains_on(old: torch.dtype, new: torch.dtype) -> None:
    """The model trains as one that was cast before wrapping."""
    ends = []
    for first in (old, new):
        model, opt = make(dtype=old)
        if first == new:
            model.to(new)
            opt = gradaccum.wrap(MAKERS["sgd"](model.parameters()), steps=4)
        model.to(new)
        for index in range(6):
            opt.backward(loss_of(model, rows_of(index % 4)), weight=0.1 * (index + 1))
            opt.step()
        weight = opt.state_dict()["gradaccum"]["weight"]
        ends.append((opt.result, weight, *(p.tolist() for p in model.parameters())))
    assert ends[0] == ends[1]


@by_dtype
def test_cast_in_open_window_is_refused(dtype: torch.dtype) -> None:
    model, opt = make(dtype=dtype, steps=2)
    train(model, opt, 1)
    model.to(torch.float16)
    loss_of(model).backward()
    with pytest.raises(gradaccum.UsageError, match=r"model\.to\(dtype\)"):
        opt.step()


def test_group_of_another_dtype_loses_nothing() -> None:
    """A group added between backward and step moves the sum out of .grad. The
    micro-batch that is not counted yet moves with it.
    """
    (model, opt), (reference, other) = make(steps=2), make(steps=2)
    for index in range(2):
        loss_of(model, rows_of(index)).backward()
        loss_of(reference, rows_of(index)).backward()
        if index:
            for dtype in (torch.bfloat16, torch.float64):
                parameter = nn.Parameter(torch.ones(2, dtype=dtype))
                opt.add_param_group({"params": [parameter]})
        opt.step()
        other.step()
    torch.testing.assert_close(values(model), values(reference))


@by_dtype
def test_dropped_wrappers_remove_their_hooks(dtype: torch.dtype) -> None:
    model, opt = make(dtype=dtype)
    train(model, opt, 1)
    opt.discard()
    opt = gradaccum.wrap(MAKERS["sgd"](model.parameters()), steps=2)
    assert [len(p._post_accumulate_grad_hooks) for p in model.parameters()] == [1] * 4
    del opt
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@by_dtype
def test_replaced_parameters_are_freed(dtype: torch.dtype) -> None:
    """Gaussian splatting replaces its points like this, between two updates."""
    points = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    opt: Any = gradaccum.wrap(MAKERS["sgd"]([points]), steps=2)
    old = []
    for _ in range(4):
        for _ in range(2):
            points.float().square().sum().backward()
            opt.step()
            opt.zero_grad()
        old.append(weakref.ref(points))
        points = opt.param_groups[0]["params"][0] = nn.Parameter(points.detach()[:4])
    gc.collect()
    assert opt.result.optimizer_step == 4
    assert [each() is None for each in old] == [True] * 3 + [False]


@by_dtype
def test_unfrozen_parameter_is_watched(dtype: torch.dtype) -> None:
    model, opt = make(dtype=dtype, steps=2)
    model[0].requires_grad_(False)
    train(model, opt, 2)
    model[0].requires_grad_(True)
    train(model, opt, 3)
    loss_of(model).backward()
    clip(model[0] if dtype == torch.float32 else model)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        opt.step()


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"),
    reason="this torch has no Tensor.grad_dtype",
)
@pytest.mark.parametrize(
    "options",
    [{"master_weights": True}, {"accumulate_dtype": "float64"}, {"clip_norm": 0.01}],
    ids=str,
)
def test_gradients_keep_their_own_dtype(options: dict[str, Any]) -> None:
    """Autograd leaves the gradients of bfloat16 parameters in float32, and the inner
    optimizer gets float32.
    """
    runs = []
    for _ in range(2):
        model = make_model().to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        runs.append((model, torch.optim.SGD(model.parameters(), 0.5, foreach=False)))
    (model, inner), (reference, bare) = runs
    opt: Any = gradaccum.wrap(inner, steps=2, **options)
    seen: list[torch.dtype] = []
    inner.register_step_pre_hook(
        lambda o, *_: seen.extend(p.grad.dtype for p in o.param_groups[0]["params"])
    )
    for _ in range(2):
        loss_of(model).backward()
        opt.step()
    loss_of(reference).backward()
    if "clip_norm" in options:
        nn.utils.clip_grad_norm_(reference.parameters(), options["clip_norm"])
    bare.step()
    assert set(seen) == {torch.float32}
    torch.testing.assert_close(values(model), values(reference), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("place", ["in .grad", "in float64", "kept apart"])
@pytest.mark.parametrize("order", ["first", "last"])
def test_zeroed_gradients_keep_momentum_going(place: str, order: str) -> None:
    """With ``zero_grad(set_to_none=False)`` momentum and weight decay go on for a
    parameter that was used once, as in torch.
    """
    ends = []
    for steps in (2, 1):
        model, opt = make(
            place,
            steps=steps,
            inner=lambda ps: torch.optim.SGD(
                ps, lr=0.125, momentum=0.5, weight_decay=0.125
            ),
        )
        if steps == 1:
            opt = opt.optimizer
        for index in range(4 * steps):
            if order == "first":
                opt.zero_grad(set_to_none=False)
            (model[0].weight * 2).sum().backward()
            if index < steps:
                (model[0].bias * 3).sum().backward()
            opt.step()
            if order == "last":
                opt.zero_grad(set_to_none=False)
        ends.append(model)
    assert same(*ends)
