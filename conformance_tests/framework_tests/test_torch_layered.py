"""The layered window: the same bits as micro-batch after micro-batch, and one layer's
gradients alive at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.testing import assert_close

import gradaccum
from gradaccum_torch import backward, layered_backward

from .torch_large_batch import Drifting, cross_entropy

X = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(11) % 3
STEPS = 4
"""Of three items each, and a ragged last one of two."""


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))


def make_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (block() for _ in range(4))
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 3)).to(dtype)


def wrap(layers: nn.Module, **options: Any) -> Any:
    inner = SGD(layers.parameters(), lr=0.1, momentum=0.9)
    return gradaccum.wrap(inner, **{"steps": None, "on_overflow": "ignore", **options})


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def layered(
    model: Any, x: Tensor = X, loss_fn: Any = cross_entropy, **options: Any
) -> Any:
    torch.manual_seed(1)
    return layered_backward(model, loss_fn, x, Y, steps=STEPS, **options)


def usual(
    model: Any, x: Tensor = X, loss_fn: Any = cross_entropy, **options: Any
) -> Any:
    torch.manual_seed(1)
    return backward(lambda x, y: loss_fn(model(x), y), x, Y, steps=STEPS, **options)


def require_same(model: nn.Module, other: nn.Module) -> None:
    """Gradients, parameters and buffers, bit for bit."""
    assert all(map(torch.equal, gradients(model), gradients(other)))
    states = model.state_dict().values(), other.state_dict().values()
    assert all(map(torch.equal, *states))


PLACES = {"kept": {"within": "keep"}, "within": {}, "host": {"borders": "host"}}
"""Where the activations are."""
by_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


OPTIONS = {
    "no optimizer": lambda: None,
    "ignore": lambda: {"on_overflow": "ignore"},
    "scaled": lambda: {"on_overflow": "ignore", "loss_scale": 8.0},
    "clip": lambda: {"clip_norm": 0.05},
    "scaler": lambda: {
        "loss_scale": torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    },
}


@by_place
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("half", [False, True])
def test_same_bits_as_without_layers(
    options: Callable[[], dict[str, Any] | None], half: bool, place: dict[str, Any]
) -> None:
    """Three calls, whose gradients come beside what was in .grad, or whose updates are
    by the wrapper's own rules, with master weights in half precision. Inputs get their
    gradient; dropout draws the same numbers, a batch norm sees each micro-batch once,
    and one of weight 0 adds nothing, not even NaN.
    """
    dtype = torch.bfloat16 if half else torch.float32
    outcomes = []
    for run, where in ((usual, {}), (layered, place)):
        model = make_layers(dtype)
        wrapper_options = options()
        opt = None
        if wrapper_options is None:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        else:
            inner = torch.optim.AdamW(model.parameters(), lr=0.1)
            opt = gradaccum.wrap(inner, None, master_weights=half, **wrapper_options)
        x = X.to(dtype, copy=True)
        x[9:] = float("nan")
        x.requires_grad_().grad = torch.ones_like(x)
        losses = [
            run(model, x, weight=[1.0] * 9 + [0.0] * 2, optimizer=opt, **where)
            for _ in range(3)
        ]
        assert all(p.isfinite().all() for p in (*gradients(model), *model.parameters()))
        assert not torch.equal(x.grad, torch.ones_like(x))
        states = model.state_dict(), opt and opt.state_dict()["state"]
        numbers = losses, gradients(model), x.grad, torch.get_rng_state(), states
        outcomes.append((repr(opt and opt.result), numbers))
    assert outcomes[0][0] == outcomes[1][0]
    assert_close(outcomes[1][1], outcomes[0][1], rtol=0, atol=0, equal_nan=True)


class Tied(nn.Module):
    """A parameter in three layers, a frozen layer, activations that are nests, and a
    loss that a layer adds.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def layers(self) -> list[Callable[[Any], Any]]:
        return [
            lambda x: {"h": self.first(x), "whole": (x, "text", None)},
            lambda nest: {**nest, "h": self.middle(nest["h"]).tanh()},
            lambda nest: (self.frozen(nest["h"]), nest["whole"][0]),
            lambda pair: pair[0] @ self.first.weight + pair[1],
            nn.Tanh(),
            lambda h: (h @ self.first.weight.T, self.middle.bias.square().sum()),
        ]


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "sum_per_item"])
def test_equals_the_large_batch(reduction: str, updated: bool) -> None:
    """In float64, weighted by item; each micro-batch's own mean or sum. The other
    outputs of the loss function merge.
    """
    x = X.double()
    y = X.double().square()
    weights = torch.arange(11.0)

    def loss_fn(outputs, targets):
        errors = (outputs[0] - targets[0]).square().mean(1) + outputs[1]
        divisor = targets[1].sum().clamp(min=1) if reduction == "mean" else 1
        return (errors * targets[1]).sum() / divisor, {"outputs": outputs[0]}

    model = Tied().double()
    large = Tied().double()
    loss, aux = layered_backward(
        model.layers(),
        loss_fn,
        x,
        (y, weights),
        steps=5,
        weight=lambda _, targets: targets[1].sum(),
        has_aux=True,
        merge_aux="concatenate",
        reduction=reduction,
        optimizer=wrap(model, reduction=reduction) if updated else None,
    )
    h = x
    for layer in large.layers():
        h = layer(h)
    assert_close(aux["outputs"], h[0], rtol=1e-12, atol=1e-14)
    expected, _ = loss_fn(h, (y, weights))
    expected = expected / (weights.sum() if reduction == "sum_per_item" else 1)
    assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    expected.backward()
    SGD(large.parameters(), lr=0.1 * updated).step()
    for p, q in zip(model.parameters(), large.parameters(), strict=True):
        assert_close(p, q, rtol=1e-12, atol=1e-14)
        if not updated and q.grad is not None:
            assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
    assert model.frozen.weight.grad is None


@by_place
def test_buffers_that_two_layers_and_the_loss_share(place: dict[str, Any]) -> None:
    """Each micro-batch finds the statistics as without layers, and leaves the same;
    under autocast too.
    """
    models = []
    for run, options in ((usual, {}), (layered, place)):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(6, affine=False)
        model = nn.Sequential(nn.Linear(6, 6), norm, Drifting(), nn.Linear(6, 6), norm)

        def loss_fn(outputs, y, norm=norm):
            return cross_entropy(outputs.float() * norm.running_var.clone(), y)

        run(model, X, loss_fn, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(model, X, loss_fn, **options)
        models.append(model)
    require_same(*models)


def fail_at(layer: nn.Module, time: int) -> None:
    """Raise as the layer runs the n-th time."""
    times = iter(range(1, 99))

    def fail(*_: object) -> None:
        if next(times) == time:
            raise RuntimeError("no memory")

    layer.register_forward_pre_hook(fail)


def test_error_before_the_first_update_leaves_everything() -> None:
    layers = make_layers()
    before = copy.deepcopy(layers)
    opt = wrap(layers)
    fail_at(layers[1], 2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no memory") as error:
        layered(layers, optimizer=opt)
    assert not getattr(error.value, "__notes__", [])
    require_same(layers, before)
    assert torch.equal(state, torch.get_rng_state())
    layered(layers, optimizer=opt)
    assert opt.result.optimizer_step == 1


def test_error_after_an_update_names_the_layers_and_asks_for_a_load() -> None:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    fail_at(layers[1], STEPS + 1)
    opt = wrap(layers)
    saved = copy.deepcopy(opt.state_dict())
    model = copy.deepcopy(layers.state_dict())
    with pytest.raises(RuntimeError, match="no memory") as error:
        layered(layers, optimizer=opt)
    assert "layers [3, 2] were updated" in error.value.__notes__[0]
    assert [
        torch.equal(model[name], value) for name, value in layers.state_dict().items()
    ] == [True] * 4 + [False] * 4
    assert not gradients(layers)
    for _ in range(2):  # A refusal does not forget it.
        with pytest.raises(gradaccum.UsageError, match="Load the last checkpoint"):
            layered(layers, optimizer=opt)
    opt.load_state_dict(saved)
    layers.load_state_dict(model)
    layered(layers, optimizer=opt)
    assert opt.result.optimizer_step == 1


class MovingAll(SGD):
    """Takes a missing gradient for zeros, as Muon does."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().step(closure)


class Counting(SGD):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)


@pytest.mark.parametrize("kind", [MovingAll, Counting])
def test_optimizer_whose_step_is_not_by_parameter(kind: type[SGD]) -> None:
    """Layer by layer it would move the other layers too, or count each layer."""
    layers = make_layers()
    inner = kind(layers.parameters(), lr=0.1, momentum=0.9)
    opt = gradaccum.wrap(inner, steps=None, on_overflow="ignore")
    with pytest.raises(
        gradaccum.UsageError, match="neither parameters without a gradient nor"
    ):
        layered(layers, optimizer=opt)


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


ONE = nn.Linear(6, 3)


def by_an_optimizer(**options: Any) -> Any:
    return layered([ONE], optimizer=wrap(ONE, **options))


def hooked(kind: str, **options: Any) -> Any:
    opt = wrap(ONE, **options)
    getattr(opt, f"register_step_{kind}_hook")(lambda *_: None)
    return layered([ONE], optimizer=opt)


def penalized(output: Tensor, y: Tensor) -> Tensor:
    """A backward pass of its own, in the loss."""
    ONE.weight.square().sum().backward()
    return cross_entropy(output, y)


REFUSED = {
    "backward in the loss": (
        lambda: layered_backward([ONE], penalized, X, Y, steps=1),
        "loss_fn: expected a function that only computes",
    ),
    "own forward": (lambda: layered(Reversed(ONE)), "with its own forward method"),
    "step hook": (lambda: hooked("pre", on_overflow="ignore"), "with a step hook"),
    "later step hook": (
        lambda: hooked("post", on_overflow="ignore"),
        "with a step hook",
    ),
    "written input": (
        lambda: layered([ONE, nn.ReLU(inplace=True)]),
        r"layers\[1\]: .* modified in place",
    ),
    **{
        str(options): (lambda o=options: by_an_optimizer(**o), "optimizer: expected")
        for options in (
            {"on_overflow": "drop_micro_batch"},
            {"separate_sums": True},
            {"steps": 2},
        )
    },
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(gradaccum.GradAccumError, match=message):
        call()
