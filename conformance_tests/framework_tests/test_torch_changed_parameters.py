"""Parameters that the user casts, replaces, freezes or drops between two windows; and
gradients of another dtype or layout.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_model import (
    loss_of,
    make_model,
    rows_of,
    same,
    values,
)

SMALL = 2.0**-8
"""2048 of these sum to 8. A sum in bfloat16 stops at 1."""
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def wrap(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    return gradaccum.wrap(inner, **{"steps": 2, **options})


def ones_loss(model: nn.Module, factor: float = 1.0) -> Tensor:
    x = torch.full((2, 3), factor, dtype=next(model.parameters()).dtype)
    return model(x).float().square().mean()


@pytest.mark.parametrize("when", ["before the first", "later"])
@pytest.mark.parametrize("masters", [False, True])
def test_cast_model_is_summed_in_float32(when: str, masters: bool) -> None:
    """The user casts the model to bfloat16 after wrapping, before its first window or
    later.
    """
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = wrap(model, steps=None, reduction="sum", master_weights=masters)
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
    assert torch.equal(model.weight, torch.full_like(model.weight, -4.0))


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
    opt, other = wrap(model), wrap(reference)
    model.to(new)
    for index in range(4):
        for m, o in ((model, opt), (reference, other)):
            o.backward(ones_loss(m, index), weight=0.1 * (index + 1))
            o.step()
    assert opt.result == other.result
    assert same(model, reference)
    weights = [each.state_dict()["gradaccum"]["weight"] for each in (opt, other)]
    assert weights[0] == weights[1]


@by_dtype
def test_cast_in_open_window_is_refused(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    opt = wrap(model)
    ones_loss(model).backward()
    opt.step()
    model.to(torch.float16)
    ones_loss(model).backward()
    with pytest.raises(gradaccum.UsageError, match=r"model\.to\(dtype\)"):
        opt.step()


def test_group_of_another_dtype_loses_nothing() -> None:
    """A group added between backward and step moves the sum out of .grad. The
    micro-batch that is not counted yet moves with it.
    """
    model, reference = make_model(), make_model()
    opt, other = wrap(model), wrap(reference)
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
    model = make_model().to(dtype)

    def hooks() -> list[int]:
        return [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]

    for _ in range(20):
        opt = wrap(model)
        ones_loss(model).backward()
        opt.step()
        opt.discard()
    assert hooks() == [1] * 4
    del opt
    assert hooks() == [0] * 4


@by_dtype
def test_replaced_parameters_are_freed(dtype: torch.dtype) -> None:
    """Gaussian splatting replaces its points like this, between two updates."""
    points = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    opt: Any = gradaccum.wrap(torch.optim.SGD([points], lr=0.5), steps=2)
    old = []
    for window in range(6):
        if window:
            old.append(weakref.ref(points))
            grown = torch.cat([points.detach()[:2], torch.ones(2, 3, dtype=dtype)])
            points = opt.param_groups[0]["params"][0] = nn.Parameter(grown)
        for _ in range(2):
            points.float().square().sum().backward()
            opt.step()
            opt.zero_grad()
    gc.collect()
    assert opt.result.optimizer_step == 6
    assert [each() is None for each in old] == [True] * 5


@by_dtype
def test_unfrozen_parameter_is_watched(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    model[0].requires_grad_(False)
    opt = wrap(model)
    for index in range(5):
        if index == 2:
            model[0].requires_grad_(True)
        ones_loss(model).backward()
        opt.step()
    ones_loss(model).backward()
    clipped = model[0] if dtype == torch.float32 else model
    nn.utils.clip_grad_norm_(clipped.parameters(), 1e-3)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
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
    ids=str,
)
def test_gradients_keep_their_own_dtype(options: dict[str, Any]) -> None:
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
        ones_loss(model).backward()
        opt.step()
    ones_loss(reference).backward()
    if "clip_norm" in options:
        nn.utils.clip_grad_norm_(reference.parameters(), options["clip_norm"])
    bare.step()
    assert set(seen) == {torch.float32}
    torch.testing.assert_close(values(model), values(reference), rtol=2**-7, atol=2**-7)


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
    ids=str,
)
@pytest.mark.parametrize("order", ["first", "last"])
def test_zeroed_gradients_keep_momentum_going(
    options: dict[str, Any], order: str
) -> None:
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
