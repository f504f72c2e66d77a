"""What happens to parameters between two windows: cast, replaced, frozen, dropped; and gradients of dtypes and layouts of their own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import loss_of, make_model, rows_of

SMALL = 2.0**-8
"""2048 of these are 8, and 1 where bfloat16 adds them."""


def hooks_on(parameter: torch.Tensor) -> int:
    return len(parameter._post_accumulate_grad_hooks or {})


@pytest.mark.parametrize("when", ["before the first", "later"])
@pytest.mark.parametrize("masters", [False, True])
def test_a_model_cast_after_wrapping_is_summed_in_float32(when: str, masters: bool) -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt: Any = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=1.0), steps=None, reduction="sum", master_weights=masters)
    if when == "later":
        (model(torch.ones(1, 4)).sum() * 0).backward()
        opt.step()
        opt.flush()
    model.to(torch.bfloat16)
    for _ in range(2048):
        model(torch.full((1, 4), SMALL, dtype=torch.bfloat16)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.flush()
    assert torch.equal(model.weight, torch.full_like(model.weight, -8.0))


@pytest.mark.parametrize(("old", "new"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.bfloat16, torch.float64)])
def test_a_model_cast_to_a_wider_dtype(old: torch.dtype, new: torch.dtype) -> None:
    model, reference = make_model().to(old), make_model().to(old).to(new)
    opt, other = (gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), steps=2) for m in (model, reference))
    model.to(new)
    for index in range(4):
        for m, o in ((model, opt), (reference, other)):
            x = torch.ones(2, 3, dtype=new) * index
            o.backward(m(x).square().mean(), weight=0.1)
            o.step()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert opt.state_dict()["gradaccum"]["weight"] == other.state_dict()["gradaccum"]["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_in_an_open_window_is_refused(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    opt: Any = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    for index in range(2):
        if index:
            model.to(torch.float16)
        model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
        if not index:
            opt.step()
    with pytest.raises(gradaccum.UsageError, match=r"model\.to\(dtype\)"):
        opt.step()


def test_a_group_of_another_dtype_added_under_way_loses_nothing() -> None:
    """The sum moves out of .grad, and the micro-batch that has not been counted moves with it."""
    model, last = make_model(), nn.Linear(2, 1).to(torch.bfloat16)
    reference = make_model()
    opt, other = (gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), steps=2) for m in (model, reference))
    for index in range(2):
        loss_of(model, rows_of(index)).backward()
        loss_of(reference, rows_of(index)).backward()
        if index:
            opt.add_param_group({"params": list(last.parameters())})
            opt.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
        opt.step()
        other.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropped_wrappers_take_their_hooks_along(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    for _ in range(20):
        opt: Any = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
        model(torch.ones(2, 3, dtype=dtype)).float().sum().backward()
        opt.step()
        opt.discard()
    assert [hooks_on(parameter) for parameter in model.parameters()] == [1] * 4
    del opt
    assert [hooks_on(parameter) for parameter in model.parameters()] == [0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaced_parameters_are_freed(dtype: torch.dtype) -> None:
    """As Gaussian splatting replaces its points between two updates."""
    points = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    opt: Any = gradaccum.wrap(torch.optim.SGD([points], lr=0.5), steps=2)
    old = []
    for _ in range(5):
        for _ in range(2):
            points.float().square().sum().backward()
            opt.step()
            opt.zero_grad()
        old.append(weakref.ref(points))
        points = opt.param_groups[0]["params"][0] = nn.Parameter(torch.cat([points.detach()[:2], torch.ones(2, 3, dtype=dtype)]))
    for _ in range(2):
        points.float().square().sum().backward()
        opt.step()
    gc.collect()
    assert opt.result.optimizer_step == 6
    assert [each() is None for each in old] == [True] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unfrozen_parameter_is_watched(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    model[0].requires_grad_(False)
    opt: Any = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    for index in range(6):
        if index == 2:
            model[0].requires_grad_(True)
        model(torch.ones(2, 3, dtype=dtype)).float().sum().backward()
        if index == 5:
            nn.utils.clip_grad_norm_((model[0] if dtype == torch.float32 else model).parameters(), 1e-3)
            with pytest.raises(gradaccum.UsageError, match="clip_norm="):
                opt.step()
        else:
            opt.step()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"accumulate_dtype": "float64"}, {"clip_norm": 0.01}])
def test_gradients_of_a_dtype_of_their_own(options: dict) -> None:
    """bfloat16 parameters whose gradients autograd leaves in float32, which is what the inner optimizer gets."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model().to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        return model, torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)

    (model, inner), (reference, bare) = made(), made()
    opt: Any = gradaccum.wrap(inner, steps=2, **options)
    seen: list[torch.dtype] = []
    inner.register_step_pre_hook(lambda o, *_: seen.extend(p.grad.dtype for p in o.param_groups[0]["params"]))
    for _ in range(2):
        model(torch.ones(2, 3, dtype=torch.bfloat16)).float().square().mean().backward()
        opt.step()
    reference(torch.ones(2, 3, dtype=torch.bfloat16)).float().square().mean().backward()
    if "clip_norm" in options:
        nn.utils.clip_grad_norm_(reference.parameters(), options["clip_norm"])
    bare.step()
    assert set(seen) == {torch.float32}
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=2**-7)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_compressed_parameters_are_refused_at_wrap() -> None:
    parameter = nn.Parameter(torch.eye(3).to_sparse_csr())
    with pytest.raises(gradaccum.ArgumentTypeError, match="sparse_csr"):
        gradaccum.wrap(torch.optim.SGD([parameter], lr=0.5), steps=2)
    parameter.requires_grad_(False)
    gradaccum.wrap(torch.optim.SGD([parameter], lr=0.5), steps=2)


@pytest.mark.parametrize("options", [{}, {"accumulate_dtype": "float64"}, {"on_overflow": "drop_micro_batch"}])
@pytest.mark.parametrize("order", ["first", "last"])
def test_zeroed_gradients_keep_momentum_going(options: dict, order: str) -> None:
    """With ``zero_grad(set_to_none=False)`` a parameter that was used once goes on by momentum and weight decay, as in torch."""

    def trained(steps: int) -> torch.Tensor:
        used, once = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        opt: Any = torch.optim.SGD([used, once], lr=0.125, momentum=0.5, weight_decay=0.125)
        opt = gradaccum.wrap(opt, steps=steps, **options) if steps > 1 else opt
        for index in range(4 * steps):
            if order == "first":
                opt.zero_grad(set_to_none=False)
            (used * 2).sum().backward()
            if index < steps:
                (once * 3).sum().backward()
            opt.step()
            if order == "last":
                opt.zero_grad(set_to_none=False)
        return torch.stack([used, once]).detach()

    assert torch.equal(trained(2), trained(1))
