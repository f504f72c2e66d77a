"""Parameters that the user casts, replaces, freezes or drops between two windows; and
gradients of another dtype or layout.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import loss_of, make_model, rows_of

SMALL = 2.0**-8
"""2048 of these sum to 8. A sum in bfloat16 stops at 1."""


def hooks_on(parameter: torch.Tensor) -> int:
    return len(parameter._post_accumulate_grad_hooks or {})


@pytest.mark.parametrize("when", ["before the first", "later"])
@pytest.mark.parametrize("masters", [False, True])
def test_cast_model_is_summed_in_float32(when: str, masters: bool) -> None:
    """The user casts the model to bfloat16 after wrapping, before its first window or
    later.
    """
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt: Any = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=1.0),
        steps=None,
        reduction="sum",
        master_weights=masters,
    )
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float64),
    ],
)
def test_cast_to_wider_dtype_trains_on(old: torch.dtype, new: torch.dtype) -> None:
    """The model trains as one that was cast before wrapping."""
    model, reference = make_model().to(old), make_model().to(old).to(new)
    opt, other = (
        gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), steps=2)
        for m in (model, reference)
    )
    model.to(new)
    for index in range(4):
        for m, o in ((model, opt), (reference, other)):
            x = torch.ones(2, 3, dtype=new) * index
            o.backward(m(x).square().mean(), weight=0.1 * (index + 1))
            o.step()
    assert opt.result == other.result
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert (
        opt.state_dict()["gradaccum"]["weight"]
        == other.state_dict()["gradaccum"]["weight"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast_in_open_window_is_refused(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    opt: Any = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    for index in range(2):
        if index:
            model.to(torch.float16)
        model(
            torch.ones(2, 3, dtype=next(model.parameters()).dtype)
        ).float().square().mean().backward()
        if not index:
            opt.step()
    with pytest.raises(gradaccum.UsageError, match=r"model\.to\(dtype\)"):
        opt.step()


def test_group_of_another_dtype_loses_nothing() -> None:
    """A group added between backward and step moves the sum out of .grad. The
    micro-batch that is not counted yet moves with it.
    """
    model, last = make_model(), nn.Linear(2, 1).to(torch.bfloat16)
    reference = make_model()
    opt, other = (
        gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), steps=2)
        for m in (model, reference)
    )
    for index in range(2):
        loss_of(model, rows_of(index)).backward()
        loss_of(reference, rows_of(index)).backward()
        if index:
            opt.add_param_group({"params": list(last.parameters())})
            opt.add_param_group(
                {"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]}
            )
        opt.step()
        other.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropped_wrappers_remove_their_hooks(dtype: torch.dtype) -> None:
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
    """Gaussian splatting replaces its points like this, between two updates."""
    points = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    opt: Any = gradaccum.wrap(torch.optim.SGD([points], lr=0.5), steps=2)
    old = []
    for _ in range(5):
        for _ in range(2):
            points.float().square().sum().backward()
            opt.step()
            opt.zero_grad()
        old.append(weakref.ref(points))
        points = opt.param_groups[0]["params"][0] = nn.Parameter(
            torch.cat([points.detach()[:2], torch.ones(2, 3, dtype=dtype)])
        )
    for _ in range(2):
        points.float().square().sum().backward()
        opt.step()
    gc.collect()
    assert opt.result.optimizer_step == 6
    assert [each() is None for each in old] == [True] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unfrozen_parameter_is_watched(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    model[0].requires_grad_(False)
    opt: Any = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    for index in range(6):
        if index == 2:
            model[0].requires_grad_(True)
        model(torch.ones(2, 3, dtype=dtype)).float().sum().backward()
        if index == 5:
            nn.utils.clip_grad_norm_(
                (model[0] if dtype == torch.float32 else model).parameters(), 1e-3
            )
            with pytest.raises(gradaccum.UsageError, match="clip_norm="):
                opt.step()
        else:
            opt.step()


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"),
    reason="this torch has no Tensor.grad_dtype",
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"master_weights": True},
        {"accumulate_dtype": "float64"},
        {"clip_norm": 0.01},
    ],
)
def test_gradients_keep_their_own_dtype(options: dict) -> None:
    """Autograd leaves the gradients of bfloat16 parameters in float32, and the inner
    optimizer gets float32.
    """

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model().to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        return model, torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)

    (model, inner), (reference, bare) = made(), made()
    opt: Any = gradaccum.wrap(inner, steps=2, **options)
    seen: list[torch.dtype] = []
    inner.register_step_pre_hook(
        lambda o, *_: seen.extend(p.grad.dtype for p in o.param_groups[0]["params"])
    )
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


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta state:UserWarning"
)
def test_compressed_parameters_are_refused() -> None:
    """`wrap` refuses a sparse CSR parameter, unless it is frozen."""
    parameter = nn.Parameter(torch.eye(3).to_sparse_csr())
    with pytest.raises(gradaccum.ArgumentTypeError, match="sparse_csr"):
        gradaccum.wrap(torch.optim.SGD([parameter], lr=0.5), steps=2)
    parameter.requires_grad_(False)
    gradaccum.wrap(torch.optim.SGD([parameter], lr=0.5), steps=2)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_dtype": "float64"}, {"on_overflow": "drop_micro_batch"}],
)
@pytest.mark.parametrize("order", ["first", "last"])
def test_zeroed_gradients_keep_momentum_going(options: dict, order: str) -> None:
    """With ``zero_grad(set_to_none=False)`` momentum and weight decay go on for a
    parameter that was used once, as in torch.
    """

    def trained(steps: int) -> torch.Tensor:
        used, once = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        opt: Any = torch.optim.SGD(
            [used, once], lr=0.125, momentum=0.5, weight_decay=0.125
        )
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
