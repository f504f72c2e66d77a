"""The layered window: the same bits as micro-batch after micro-batch, and one layer's
gradients alive at a time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from gradaccum_torch import backward, layered_backward

cross_entropy, mse = nn.functional.cross_entropy, nn.functional.mse_loss
X, Y = (
    torch.randn(11, 6, generator=torch.Generator().manual_seed(0)),
    torch.arange(11) % 3,
)
STEPS = 4
"""Of three items each, and a ragged last one of two."""


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3)
    )


def make_layers(dtype: torch.dtype = torch.float32, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), *(block() for _ in range(blocks)), nn.Linear(8, 3)
    ).to(dtype)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


PLACES: dict[str, dict[str, Any]] = {
    "kept": {"within": "keep"},
    "within": {},
    "host": {"borders": "host"},
    "borders": {"borders": "recompute"},
}
"""Where the activations are."""
by_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "ignore": lambda: {"on_overflow": "ignore"},
    "scaled": lambda: {"on_overflow": "ignore", "loss_scale": 8.0},
    "sum": lambda: {"on_overflow": "ignore", "reduction": "sum"},
    "skips": dict,
    "clip": lambda: {"clip_norm": 0.05},
    "skip": lambda: {"skip_norm": 1e-6},
    "dynamic": lambda: {"loss_scale": gradaccum.DynamicLossScale(growth_interval=1)},
    "scaler": lambda: {
        "loss_scale": torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    },
}


@by_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_has_the_same_bits(place: dict[str, Any], dtype: torch.dtype) -> None:
    """Beside what was in .grad; dropout draws the same numbers, a batch norm sees each
    micro-batch once.
    """
    usual, layered = make_layers(dtype), make_layers(dtype)
    for model in (usual, layered):
        torch.manual_seed(1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if model is usual:
            loss = backward(
                lambda x, y: cross_entropy(usual(x), y), X.to(dtype), Y, steps=STEPS
            )
            drawn = torch.get_rng_state()
    assert torch.equal(
        loss,
        layered_backward(layered, cross_entropy, X.to(dtype), Y, steps=STEPS, **place),
    )
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(map(torch.equal, gradients(usual), gradients(layered)))
    assert same(usual, layered)


@by_place
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("half", [False, True])
def test_updates_have_the_same_bits(
    place: dict[str, Any], options: Callable[[], dict[str, Any]], half: bool
) -> None:
    """By the wrapper's own rules, with master weights where the model is in half
    precision.
    """
    dtype = torch.bfloat16 if half else torch.float32
    usual, layered = make_layers(dtype), make_layers(dtype)
    opts = [
        gradaccum.wrap(
            torch.optim.AdamW(m.parameters(), lr=0.1),
            None,
            master_weights=half,
            **options(),
        )
        for m in (usual, layered)
    ]
    for window in range(3):
        torch.manual_seed(window)
        backward(
            lambda x, y: cross_entropy(usual(x), y),
            X.to(dtype),
            Y,
            steps=STEPS,
            optimizer=opts[0],
        )
        torch.manual_seed(window)
        layered_backward(
            layered,
            cross_entropy,
            X.to(dtype),
            Y,
            steps=STEPS,
            optimizer=opts[1],
            **place,
        )
        assert repr(opts[0].result) == repr(opts[1].result)
    assert same(usual, layered)
    assert not gradients(layered)
    states = [opt.state_dict()["state"] for opt in opts]
    assert repr(sorted(states[0].items())) == repr(sorted(states[1].items()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "sum_per_item"])
def test_equals_the_large_batch(reduction: str) -> None:
    """In float64, with a parameter in three layers, a frozen layer, and activations
    that are nests.
    """
    x, y, weights = X.double(), X.double().square(), torch.arange(11.0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.middle, self.frozen = (
                nn.Linear(6, 6),
                nn.Linear(6, 6),
                nn.Linear(6, 6).requires_grad_(False),
            )

        def layers(self) -> list[Callable[[Any], Any]]:
            return [
                lambda x: {"h": self.first(x), "whole": (x, "text", None)},
                lambda nest: {**nest, "h": self.middle(nest["h"]).tanh()},
                lambda nest: (self.frozen(nest["h"]), nest["whole"][0]),
                lambda pair: pair[0] @ self.first.weight + pair[1],
                nn.Tanh(),
                lambda h: h @ self.first.weight.T * self.middle.bias,
            ]

    def loss_fn(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Weighted by item; each micro-batch's own mean or sum."""
        errors = (outputs - targets[0]).square().mean(1) * targets[1]
        return (
            errors.sum() / targets[1].sum().clamp(min=1)
            if reduction == "mean"
            else errors.sum()
        )

    def weight(_: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        return targets[1].sum()

    model, large = Tied().double(), Tied().double()
    for optimizer in (None, torch.optim.SGD(model.parameters(), lr=1.0)):
        opt = optimizer and gradaccum.wrap(
            optimizer, None, reduction=reduction, on_overflow="ignore"
        )
        loss = layered_backward(
            model.layers(),
            loss_fn,
            x,
            (y, weights),
            steps=5,
            weight=weight,
            reduction=reduction,
            optimizer=opt,
        )
        h = x
        for layer in large.layers():
            h = layer(h)
        expected = loss_fn(h, (y, weights)) / (
            weights.sum() if reduction == "sum_per_item" else 1
        )
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        expected.backward()
        for p, q in zip(model.parameters(), large.parameters(), strict=True):
            if optimizer is not None and q.grad is not None:
                p, q = p, q - q.grad
                torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
            elif q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
            else:
                assert p.grad is None
        for p in (*model.parameters(), *large.parameters()):
            p.grad = None


def test_one_layer_of_gradients_is_alive() -> None:
    """Counted as each gradient arrives: in .grad of all parameters, and in the sums of
    a half-precision model.
    """
    layers = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
            for _ in range(8)
        )
    )
    opt = gradaccum.wrap(
        torch.optim.AdamW(layers.parameters()), steps=None, on_overflow="ignore"
    )
    alive: list[int] = []

    def note(_: Tensor) -> None:
        alive.append(sum(gradient.nbytes for gradient in gradients(layers)))

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    layered_backward(
        layers, mse, torch.randn(8, 16), torch.randn(8, 16), steps=4, optimizer=opt
    )
    one = sum(p.nbytes for p in layers[0].parameters())
    assert len(alive) == 4 * 32
    assert max(alive) <= 1.1 * one
    assert not gradients(layers)


def test_shared_parameter_waits_for_its_first_layer() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    steps: list[set[int]] = []
    optimizer = torch.optim.SGD(
        [*embedding.parameters(), *(middle := nn.Linear(4, 4)).parameters()], lr=0.1
    )

    def note(inner: torch.optim.Optimizer, *_: object) -> None:
        steps.append(
            {
                id(p)
                for group in inner.param_groups
                for p in group["params"]
                if p.grad is not None
            }
        )

    optimizer.register_step_pre_hook(note)
    opt = gradaccum.wrap(optimizer, steps=None, on_overflow="ignore")
    layered_backward(
        [embedding, middle, head],
        cross_entropy,
        torch.arange(5),
        torch.arange(5),
        steps=2,
        optimizer=opt,
    )
    assert steps == [
        set(),
        {id(p) for p in middle.parameters()},
        {id(embedding.weight)},
    ]


def test_aux_and_losses_of_layers() -> None:
    """An activation may be a loss that a layer adds; the loss function's other outputs
    merge.
    """
    layer = nn.Linear(6, 3)

    def routed(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer.weight.square().sum()

    def loss_fn(
        outputs: tuple[Tensor, Tensor], y: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return cross_entropy(outputs[0], y) + outputs[1], {
            "logits": outputs[0],
            "right": (outputs[0].argmax(1) == y).sum(),
        }

    kinds = {"logits": "concatenate", "right": "sum"}
    loss, aux = layered_backward([routed], loss_fn, X, Y, steps=STEPS, aux=kinds)
    expected, whole = loss_fn(routed(X), Y)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(aux["logits"], whole["logits"])
    assert int(aux["right"]) == int(whole["right"])


@by_place
def test_buffers_that_two_layers_or_the_loss_share(place: dict[str, Any]) -> None:
    """Each micro-batch finds the statistics as without layers, and leaves the same."""
    models = []
    for is_layered in (False, True):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(6, affine=False)
        model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)

        def loss_fn(outputs: Tensor, y: Tensor, norm: Any = norm) -> Tensor:
            return cross_entropy(outputs * norm.running_var.clone(), y)

        if is_layered:
            layered_backward(model, loss_fn, X, Y, steps=STEPS, **place)
        else:
            backward(
                lambda x, y, model=model, loss_fn=loss_fn: loss_fn(model(x), y),
                X,
                Y,
                steps=STEPS,
            )
        models.append(model)
    assert same(*models)
    assert all(map(torch.equal, *map(gradients, models)))


@by_place
def test_autocast(place: dict[str, Any]) -> None:
    usual, layered = make_layers(), make_layers()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(1)
        backward(lambda x, y: cross_entropy(usual(x).float(), y), X, Y, steps=STEPS)
        torch.manual_seed(1)
        layered_backward(
            layered,
            lambda o, y: cross_entropy(o.float(), y),
            X,
            Y,
            steps=STEPS,
            **place,
        )
    assert all(map(torch.equal, gradients(usual), gradients(layered)))
    assert same(usual, layered)


def test_micro_batch_of_weight_0_adds_nothing() -> None:
    usual, layered = make_layers(), make_layers()
    x, weights = X.clone(), [1.0] * 9 + [0.0] * 2
    x[9:] = float("nan")
    torch.manual_seed(0)
    backward(lambda x, y: cross_entropy(usual(x), y), x, Y, steps=STEPS, weight=weights)
    torch.manual_seed(0)
    layered_backward(layered, cross_entropy, x, Y, steps=STEPS, weight=weights)
    assert all(map(torch.equal, gradients(usual), gradients(layered)))
    assert all(gradient.isfinite().all() for gradient in gradients(layered))


class Failing(nn.Module):
    """Raises as it runs the n-th time."""

    def __init__(self, time: int) -> None:
        super().__init__()
        self.weight, self.left = nn.Parameter(torch.ones(8)), time

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            raise RuntimeError("no memory")
        return x * self.weight


def test_error_before_the_first_update_leaves_everything() -> None:
    layers = nn.Sequential(nn.Linear(6, 8), Failing(2), block(), nn.Linear(8, 3))
    before, state = copy.deepcopy(layers.state_dict()), torch.get_rng_state()
    opt = gradaccum.wrap(
        torch.optim.SGD(layers.parameters(), lr=0.1), steps=None, on_overflow="ignore"
    )
    with pytest.raises(RuntimeError, match="no memory") as error:
        layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)
    assert not getattr(error.value, "__notes__", [])
    assert all(map(torch.equal, before.values(), layers.state_dict().values()))
    assert torch.equal(state, torch.get_rng_state())
    layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)
    assert opt.result.optimizer_step == 1


def test_error_after_an_update_names_the_layers_and_asks_for_a_load() -> None:
    layers = nn.Sequential(
        nn.Linear(6, 8), Failing(STEPS + 1), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    opt = gradaccum.wrap(
        torch.optim.SGD(layers.parameters(), lr=0.1), steps=None, on_overflow="ignore"
    )
    saved, model = copy.deepcopy(opt.state_dict()), copy.deepcopy(layers.state_dict())
    with pytest.raises(RuntimeError, match="no memory") as error:
        layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)
    assert "the updates of layers[3], layers[2] were made" in error.value.__notes__[0]
    assert [
        torch.equal(model[name], value) for name, value in layers.state_dict().items()
    ] == [True] * 3 + [False] * 4
    assert not gradients(layers)
    for _ in range(2):  # A refusal does not forget it.
        with pytest.raises(gradaccum.UsageError, match="Load the last checkpoint"):
            layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)
    opt.load_state_dict(saved)
    layers.load_state_dict(model)
    layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)
    assert opt.result.optimizer_step == 1


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)


class CountingOnDevice(torch.optim.SGD):
    """Counts in a tensor, in place, as apex' optimizers do under CUDA graphs."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("k", torch.zeros(())).add_(1)
        super().step(closure)


class MovingAll(torch.optim.SGD):
    """Takes a missing gradient for zeros, as Muon does."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = (
                torch.zeros_like(parameter)
                if parameter.grad is None
                else parameter.grad
            )
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        (Counting, r"\['k'\]"),
        (CountingOnDevice, r"\['k'\]"),
        (MovingAll, r"\['parameters without a gradient'\]"),
    ],
)
def test_optimizer_whose_step_is_not_by_parameter(
    kind: type[torch.optim.SGD], moved: str
) -> None:
    layers = make_layers()
    opt = gradaccum.wrap(
        kind(layers.parameters(), lr=0.1, momentum=0.9),
        steps=None,
        on_overflow="ignore",
    )
    opt.param_groups[0]["of_no_use"] = math.nan
    with pytest.raises(gradaccum.UsageError, match=f"one that moves {moved}"):
        layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)
    layers = make_layers()
    opt = gradaccum.wrap(kind(layers.parameters(), lr=0.1, momentum=0.9), steps=None)
    layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)
    assert opt.result.optimizer_step == 1


@pytest.mark.parametrize("name", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks(name: str) -> None:
    """A hook sees all gradients and each window once, or is refused."""
    seen: list[int] = []
    for options in ({"on_overflow": "ignore"}, {}):
        layers = make_layers()
        opt = gradaccum.wrap(
            torch.optim.SGD(layers.parameters(), lr=0.1), None, **options
        )
        getattr(opt, name)(
            lambda *_, layers=layers: seen.append(len(gradients(layers)))
        )
        if options:
            with pytest.raises(gradaccum.UsageError, match="one with a step hook"):
                layered_backward(
                    layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt
                )
        else:
            layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)
    assert seen == [len([*make_layers().parameters()])]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no_layers": (
        lambda: layered_backward([], mse, X, X, steps=2),
        "layers: expected at least one layer",
    ),
    "a_module": (
        lambda: layered_backward(nn.Linear(6, 6), mse, X, X, steps=2),
        "expected an nn.Sequential or a list of callables",
    ),
    "a_string": (
        lambda: layered_backward([nn.Linear(6, 6), "relu"], mse, X, X, steps=2),
        "layers: expected a function",
    ),
    "no_graph": (
        torch.inference_mode()(
            lambda: layered_backward([nn.Linear(6, 6)] * 2, mse, X, X, steps=2)
        ),
        "outside of torch.no_grad",
    ),
    "borders": (
        lambda: layered_backward([nn.Linear(6, 6)], mse, X, X, steps=2, borders="disk"),
        "borders: expected one of",
    ),
    "both": (
        lambda: layered_backward(
            [nn.Linear(6, 6)], mse, X, X, steps=2, borders="host", within="keep"
        ),
        "hold the borders",
    ),
    "reduction": (
        lambda: layered_backward(
            [nn.ReLU()],
            mse,
            X,
            X,
            optimizer=gradaccum.wrap(torch.optim.SGD([X], lr=1), None),
            reduction="max",
            steps=2,
        ),
        "reduction: expected one of",
    ),
    "auto": (
        lambda: layered_backward([nn.Linear(6, 6)], mse, X, X, micro_batch_size="auto"),
        "expected a number of items",
    ),
    "in_place": (
        lambda: layered_backward(
            [nn.Linear(6, 6), nn.ReLU(inplace=True)], mse, X, X, steps=2
        ),
        r"layers\[1\]: .* wrote into",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(gradaccum.GradAccumError, match=message):
        call()


@pytest.mark.parametrize(
    "options",
    [
        {"on_overflow": "drop_micro_batch"},
        {"separate_sums": True},
        {"steps": 2},
    ],
)
def test_optimizer_that_looks_at_micro_batches_is_refused(
    options: dict[str, Any],
) -> None:
    layers = make_layers()
    opt = gradaccum.wrap(
        torch.optim.SGD(layers.parameters(), lr=0.1), **{"steps": None, **options}
    )
    with pytest.raises(gradaccum.GradAccumError, match=r"optimizer: expected"):
        layered_backward(layers, cross_entropy, X, Y, steps=STEPS, optimizer=opt)


class Counted(nn.Module):
    """Returns a buffer that its next call writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.inner(x), self.calls


def doubled_loss(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    with torch.no_grad():
        outputs[0].mul_(2)
    return cross_entropy(outputs[1], y)


WRITTEN: dict[str, tuple[list[Any], Callable[[Any, Any], Tensor]]] = {
    "buffer": ([Counted(), lambda pair: pair[0].tanh() * pair[1]], cross_entropy),
    "loss_fn": ([nn.Linear(6, 3), lambda h: (h, h.tanh())], doubled_loss),
}


@pytest.mark.parametrize("place", [{}, {"borders": "host"}], ids=["within", "host"])
@pytest.mark.parametrize(("layers", "loss_fn"), WRITTEN.values(), ids=WRITTEN)
def test_border_that_something_writes_into_is_refused(
    layers: list[Any], loss_fn: Any, place: dict[str, Any]
) -> None:
    with pytest.raises(
        gradaccum.UsageError,
        match=r"layers\[1\]: expected an input that stays as it is",
    ):
        layered_backward(layers, loss_fn, X, Y, steps=STEPS, **place)


def test_layer_may_write_into_what_is_kept() -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    other = copy.deepcopy(layers)
    layered_backward(layers, cross_entropy, X, Y, steps=2, within="keep")
    backward(lambda x, y: cross_entropy(other(x), y), X, Y, steps=2)
    assert all(map(torch.equal, gradients(layers), gradients(other)))


@pytest.mark.parametrize(
    "options", [None, {"on_overflow": "ignore", "loss_scale": 8.0}, {"clip_norm": 0.1}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_get_their_gradient(
    options: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    """Beside what was in .grad, and freed of the window's weight and scale."""
    given: list[Tensor] = []
    for is_layered in (False, True):
        layers, x = (
            make_layers(dtype, 1).eval(),
            X.to(dtype, copy=True).requires_grad_(),
        )
        x.grad = torch.ones_like(x)
        opt = (
            None
            if options is None
            else gradaccum.wrap(
                torch.optim.SGD(layers.parameters(), lr=0.1), None, **options
            )
        )
        if is_layered:
            layered_backward(layers, cross_entropy, x, Y, steps=STEPS, optimizer=opt)
        else:
            backward(
                lambda x, y, layers=layers: cross_entropy(layers(x), y),
                x,
                Y,
                steps=STEPS,
                optimizer=opt,
            )
        given.append(x.grad)
    assert torch.equal(*given)
    assert not torch.equal(given[0], torch.ones_like(given[0]))
