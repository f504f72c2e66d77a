"""float32 masters in torch: the inner optimizer updates them, they cost one copy, and a write into the model overrides them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum

STEP = 2.0**-13
HALF = [torch.float16, torch.bfloat16]
INNER = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=STEP),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=STEP, weight_decay=0.0, fused=True),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=STEP, weight_decay=0.0, foreach=True),
}
by_inner = pytest.mark.parametrize("inner", INNER)
by_dtype = pytest.mark.parametrize("dtype", HALF, ids=str)


def make(dtype: torch.dtype, inner: str = "sgd", **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4)).to(dtype)
    return model, gradaccum.wrap(INNER[inner](model.parameters()), **{"steps": 2, "master_weights": True, **options})


def train(model: nn.Module, opt: Any, micro_batches: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(micro_batches):
        loss = model(torch.randn(4, 8, generator=generator).to(dtype)).float().square().mean()
        opt.scale(loss).backward()
        opt.step()
        opt.zero_grad()


def masters_of(opt: Any) -> list[Tensor]:
    """The tensors that the inner optimizer updates: a master, or the parameter itself if it has none."""
    return [opt.master_weights.get(index, own) for index, own in enumerate(opt._parameters.positions())]


@by_dtype
@by_inner
def test_update_equals_float32_optimizer(dtype: torch.dtype, inner: str) -> None:
    """A float32 optimizer with the same gradients makes the same masters, bit for bit."""
    model, opt = make(dtype, inner)
    twins = [p.detach().float().requires_grad_() for p in model.parameters()]
    bare = INNER[inner](twins)
    seen: list[list[Tensor]] = []
    opt.register_step_pre_hook(lambda *_: seen.append([master.grad.clone() for master in masters_of(opt)]))
    train(model, opt, 12)
    assert len(seen) == 6
    for gradients in seen:
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient
        bare.step()
    for parameter, master, twin in zip(model.parameters(), masters_of(opt), twins, strict=True):
        assert torch.equal(master, twin)
        assert torch.equal(parameter, twin.to(dtype))
    assert {value.dtype for state in opt.state.values() for value in state.values() if isinstance(value, Tensor)} <= {torch.float32}


def test_post_hook_sees_the_rounded_model() -> None:
    model, opt = make(torch.bfloat16, "adamw_fused")
    checked = []

    def hook(*_: object) -> None:
        checked.append(all(torch.equal(p, m.to(p.dtype)) for p, m in zip(model.parameters(), masters_of(opt), strict=True)))

    opt.register_step_post_hook(hook)
    train(model, opt, 4)
    assert checked == [True, True]


def test_sum_is_the_masters_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-precision parameter has one master, whose gradient is the sum itself and no copy."""
    model, opt = make(torch.float16)
    strategy = opt._window.strategy
    given: list[tuple[set[int], set[int], bool]] = []

    def before(*_: object) -> None:
        held = {total.data_ptr() for total in strategy.sums()}
        handed = {master.grad.data_ptr() for master in masters_of(opt)}
        given.append((held, handed, any(p.grad is not None for p in model.parameters())))

    opt.register_step_pre_hook(before)
    train(model, opt, 4)
    for held, handed, model_has_gradients in given:
        assert held == handed
        assert not model_has_gradients
    assert [master.dtype for master in masters_of(opt)] == [torch.float32] * 3
    assert [master.numel() for master in masters_of(opt)] == [p.numel() for p in model.parameters()]
    assert all(tensor.grad is None for tensor in (*model.parameters(), *masters_of(opt)))


@by_dtype
@pytest.mark.parametrize(
    "options", [{"accumulate_dtype": "parameter"}, {"on_overflow": "drop_micro_batch"}, {"accumulate_dtype": "float64"}]
)
def test_place_of_the_sum_changes_nothing(dtype: torch.dtype, options: dict) -> None:
    options = {name: str(dtype).removeprefix("torch.") if value == "parameter" else value for name, value in options.items()}
    model, opt = make(dtype, loss_scale=8.0, **options)
    plain, reference = make(dtype)
    train(model, opt, 4)
    train(plain, reference, 4)
    assert opt.result.applied
    for a, b in zip(masters_of(opt), masters_of(reference), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=STEP * 2.0**-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("inner", ["sgd", "adamw_fused"])
def test_copies_train_alike(copied: Any, stop: int, inner: str) -> None:
    model, opt = make(torch.float16, inner)
    train(model, opt, stop)
    twin, twin_opt = copied((model, opt))
    assert all(a is not b for a, b in zip(masters_of(opt), masters_of(twin_opt), strict=True))
    for m, o in ((model, opt), (twin, twin_opt)):
        train(m, o, 4, seed=1)
    for a, b in zip((*model.parameters(), *masters_of(opt)), (*twin.parameters(), *masters_of(twin_opt)), strict=True):
        assert torch.equal(a, b)


def test_bare_half_state_becomes_float32() -> None:
    model = nn.Linear(4, 2).to(torch.bfloat16)
    bare = torch.optim.SGD(model.parameters(), lr=STEP, momentum=0.9)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    bare.step()
    bare.zero_grad()
    momenta = [bare.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    opt: Any = gradaccum.wrap(bare, steps=1, master_weights=True)
    for parameter, momentum in zip(model.parameters(), momenta, strict=True):
        assert opt.state[parameter]["momentum_buffer"].dtype == torch.float32
        assert torch.equal(opt.state[parameter]["momentum_buffer"], momentum.float())


def test_added_group_has_masters_too() -> None:
    model, opt = make(torch.float16)
    train(model, opt, 1)
    late = torch.ones(2, dtype=torch.float16, requires_grad=True)
    opt.add_param_group({"params": [late]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": (p for p in [late])})
    assert len(opt.param_groups) == 2
    (late.sum() + model(torch.ones(1, 8, dtype=torch.float16)).sum()).backward()
    opt.step()
    assert opt.result.applied
    assert masters_of(opt)[-1].tolist() == [1 - STEP / 2] * 2


def test_rewrapped_optimizer_keeps_its_masters() -> None:
    (model, opt), (other, reference) = make(torch.float16, "adamw_fused"), make(torch.float16, "adamw_fused")
    train(model, opt, 2)
    train(other, reference, 2)
    inner = opt.optimizer
    del opt
    with pytest.raises(gradaccum.ArgumentValueError, match="master_weights=True"):
        gradaccum.wrap(inner, steps=2)
    again = gradaccum.wrap(inner, steps=2, master_weights=True)
    train(model, again, 2, seed=1)
    train(other, reference, 2, seed=1)
    for a, b in zip((*model.parameters(), *masters_of(again)), (*other.parameters(), *masters_of(reference)), strict=True):
        assert torch.equal(a, b)


@by_dtype
def test_zero_grad_clears_model_gradients(dtype: torch.dtype) -> None:
    model, opt = make(dtype, on_overflow="drop_micro_batch")
    for set_to_none in (True, False):
        (1000 * model(torch.ones(1, 8, dtype=dtype)).sum()).backward()
        opt.zero_grad(set_to_none=set_to_none)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
