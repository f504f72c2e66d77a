"""Recomputation changes no bit of a gradient, a buffer or a random number, and the memory falls."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradaccum
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_torch.recompute import recompute, run, surroundings

MM = torch.ops.aten.addmm.default


class Average(nn.Module):
    """Normalises by an average that its forward pass reads, and then moves."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(x - self.mean)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return out


class Noise(nn.Module):
    """Draws its own numbers, not in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x, 0.5))


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Tanh(), Average(), nn.Linear(8, 8), Noise(), nn.BatchNorm1d(8)]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).to(dtype)


def data(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 2, 40, dtype=torch.float64).reshape(5, 8).sin().to(dtype)


def state(model: nn.Module) -> list[Tensor]:
    """Gradients, buffers and the place in the random numbers."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def trained(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None, x: Tensor | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    (call or model)(data(next(model.parameters()).dtype) if x is None else x).float().square().sum().backward()
    return state(model)


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "one segment": {"segments": 1},
    "each layer": {"segments": 12},
    "five": {"segments": 5},
    "by name": {"submodules": ["0", "1", "2", "4", "8"]},
    "by module": {"submodules": "children"},
    "policy": {"policy": [MM]},
}


def recomputed(way: str, model: nn.Sequential) -> nn.Module:
    options = dict(WAYS[way])
    if options.get("submodules") == "children":
        options["submodules"] = model.children()
    return recompute(model, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "autocast"])
def test_same_bits(way: str, kind: str) -> None:
    """The input needs no gradient, and the first layer trains."""
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        model = recomputed(way, make(dtype))
        got, expected = trained(model), trained(make(dtype))
    assert same(got, expected)
    assert model[0].weight.grad is not None
    assert [each.num_batches_tracked.item() for each in model if isinstance(each, nn.BatchNorm1d)] == [1, 1]


def test_dropout_is_drawn_anew_without_rng_state() -> None:
    assert not same(trained(recompute(make(), preserve_rng_state=False)), trained(make()))


def of_self(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return recompute(model.forward)


def of_closure(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return recompute(lambda x: model(x))


def of_partial(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return recompute(functools.partial(lambda layers, x: layers(x), model))


def of_argument(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return functools.partial(recompute(lambda x, model: model(x)), model=model)


def of_hidden(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """Found by nothing but its call."""
    hidden = type("Hidden", (), {"model": model})
    return recompute(lambda x: hidden.model(x))


@pytest.mark.parametrize("way", [of_self, of_closure, of_partial, of_argument, of_hidden])
def test_functions_same_bits(way: Any) -> None:
    model = make()
    assert same(trained(model, way(model)), trained(make()))


def test_function_of_statistics() -> None:
    """torch counts no change of these, and the module is never called."""
    got, expected = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def normalised(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)

    assert same(trained(got, recompute(lambda x: normalised(got, x))), trained(expected, functools.partial(normalised, expected)))


@pytest.mark.parametrize("size", [4, surroundings.SMALL + 1])
def test_changing_buffers_with_several_forwards(size: int) -> None:
    """Two forward passes before two backward passes: each replay finds its own average."""

    def both(make_part: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        model = Average(size)
        part, x = make_part(model), torch.linspace(0, 1, 2 * size).reshape(2, size).requires_grad_()
        losses = [part(x).sum(), part(2 * x).sum()]
        for loss in losses:
            loss.backward()
        assert x.grad is not None
        return [x.grad, model.mean]

    assert same(both(recompute), both(lambda model: model))


def test_written_large_buffer_without_version() -> None:
    class Written(Average):
        def forward(self, x: Tensor) -> Tensor:
            self.mean.data.add_(1)
            return torch.tanh(x - self.mean)

    got, expected = Written(surroundings.SMALL + 1), Written(surroundings.SMALL + 1)
    for model in (recompute(got), expected):
        model(torch.zeros(1, surroundings.SMALL + 1, requires_grad=True)).sum().backward()
    assert torch.equal(got.mean, expected.mean)


def test_buffer_of_two_modules_stays_one() -> None:
    def twins() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[1].running_mean = model[0].running_mean
        return model

    torch.manual_seed(0)
    got = twins()
    expected = copy.deepcopy(got)
    assert same(trained(recompute(got, segments=1)), trained(expected))
    assert got[0].running_mean is got[1].running_mean


def test_retained_graph_and_second_order() -> None:
    def both(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(data()).square().sum()
        loss.backward(retain_graph=True)
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(each.square().sum() for each in first).backward()
        return state(model)

    assert same(both(recompute(make())), both(make()))


def test_mode_and_parameters_are_those_of_the_forward() -> None:
    """``eval()`` comes before ``backward()``, and `torch.func.functional_call` lends the parameters for the forward pass alone."""

    def both(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        lent = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, lent, data()).sum()
        model.eval()
        loss.backward()
        assert not any(each.training for each in model.modules())
        assert all(p.grad is None for p in model.parameters())
        return [each.grad for each in lent.values()] + list(model.buffers())

    assert same(both(recompute(make())), both(make()))


def test_nested_parts() -> None:
    inner = make()
    recompute(inner, submodules=["0", "1", "2", "4"])
    outer = recompute(nn.Sequential(inner), segments=1)
    assert same(trained(outer), trained(make()))


def test_micro_batches_of_a_wrapped_optimizer() -> None:
    """Float32 sums of bfloat16 gradients under a loss scale, in windows of three."""

    def parameters(model: nn.Module) -> list[Tensor]:
        opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=3, loss_scale=1024.0, clip_norm=1.0)
        torch.manual_seed(1)
        for index in range(6):
            opt.backward(model(data(torch.bfloat16) + index).float().square().mean(), weight=index + 1)
            opt.step()
            opt.zero_grad()
        assert opt.result.optimizer_step == 2
        return [p.detach() for p in model.parameters()] + list(model.buffers())

    assert same(parameters(recompute(make(torch.bfloat16))), parameters(make(torch.bfloat16)))


def kept_bytes(model: nn.Module) -> int:
    """What autograd keeps of a forward pass, apart from parameters."""
    own, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(64, 8))
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


def test_memory_falls() -> None:
    """Sixteen times (linear, GELU): the inputs of 6 parts in place of 32 activations."""

    def deep() -> nn.Sequential:
        return nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(8, 8), nn.GELU())])

    one = 64 * 8 * 4
    assert kept_bytes(deep()) == 32 * one
    assert kept_bytes(recompute(deep())) == 6 * one
    assert kept_bytes(recompute(deep(), segments=2)) == 2 * one
    assert kept_bytes(recompute(deep(), segments=1)) == one


def test_no_cost_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = recompute(make()).eval(), make().eval()
    monkeypatch.setattr(run, "checkpoint", None)
    monkeypatch.setattr(surroundings.Surroundings, "__init__", None)
    with torch.no_grad():
        torch.manual_seed(0)
        got = model(data())
        torch.manual_seed(0)
        assert torch.equal(got, expected(data()))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("way", ["default", "by name"])
def test_copies_recompute_themselves(how: Callable[[nn.Module], nn.Module], way: str) -> None:
    model = recomputed(way, make())
    twin, before = how(model), state(model)
    assert same(trained(twin), trained(make()))
    assert same(state(model)[:-1], before[:-1])
    assert kept_bytes(twin) == kept_bytes(model) < kept_bytes(make())


def test_module_stays_as_it_was() -> None:
    model, other = make(), make()
    assert recompute(model, submodules=["0", "4"]) is model
    assert list(model.state_dict()) == list(other.state_dict())
    assert list(map(type, model)) == list(map(type, other))
    model.load_state_dict(other.state_dict())
    assert inspect.signature(model[0].forward) == inspect.signature(other[0].forward)
    assert inspect.signature(recompute(of_self)) == inspect.signature(of_self)


def test_hooks() -> None:
    """Of the part itself once, inside of it in both runs."""
    calls: list[str] = []
    model = make()
    model.register_forward_hook(lambda *_: calls.append("own"))
    model[3].register_forward_hook(lambda *_: calls.append("inside"))
    trained(recompute(model, segments=1))
    assert calls == ["inside", "own", "inside"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled() -> None:
    torch._dynamo.reset()
    model, expected = make(), make()
    model[4] = expected[4] = nn.Identity()
    compiled = torch.compile(recompute(model), backend="aot_eager", fullgraph=True)
    assert same(trained(model, compiled)[:-1], trained(expected)[:-1])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_policy_keeps_some_random_numbers(number: int) -> None:
    """The draw that is kept is not made again, and the later ones have the same numbers all the same."""

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Noise(), nn.Linear(8, 8), Noise(), nn.Tanh(), nn.Linear(8, 8), Noise(), nn.Tanh())

    draws = iter(range(1, 4))

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op is torch.ops.aten.bernoulli.default and next(draws) == number

    assert same(trained(recompute(layers(), segments=1, policy=policy)), trained(layers()))


def test_policy_with_draws_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Noise(), nn.Dropout())
    with pytest.raises(UsageError, match="policy: .*in place"):
        recompute(model, policy=[torch.ops.aten.bernoulli.default], segments=1)(data())


def test_changed_parameter_is_refused() -> None:
    """Also one whose value autograd alone would not need."""
    model = recompute(make())
    loss = model(data()).sum()
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(UsageError, match="'bias' of Linear"):
        loss.backward()
    assert [each.num_batches_tracked.item() for each in model if isinstance(each, nn.BatchNorm1d)] == [1, 1]


def test_changed_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="inplace=False"):
        recompute(nn.ReLU(inplace=True))(2 * data().requires_grad_())
    for call in (lambda f, x, y: f(x, y=y), lambda f, x, y: f(x, [y])):
        y = data()
        loss = call(recompute(lambda x, y: (x * (y[0] if isinstance(y, list) else y)).sum()), data().requires_grad_(), y)
        y.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_lazy_module_is_refused() -> None:
    with pytest.raises(UsageError, match="LazyLinear"):
        recompute(nn.Sequential(nn.LazyLinear(3)))(data())


REFUSED: dict[str, tuple[type[Exception], str, Callable[[nn.Sequential], Any]]] = {
    "no function": (ArgumentTypeError, "function: ", lambda _: recompute(3)),
    "too many": (ArgumentValueError, "segments: expected 1 to 12", lambda model: recompute(model, segments=13)),
    "none": (ArgumentValueError, "segments: ", lambda model: recompute(model, segments=0)),
    "bool": (ArgumentTypeError, "segments: ", lambda model: recompute(model, segments=True)),
    "no sequence": (ArgumentTypeError, "segments: .*submodules=", lambda model: recompute(model[0], segments=1)),
    "of a function": (ArgumentTypeError, "segments: ", lambda _: recompute(len, segments=2)),
    "both": (ArgumentValueError, "segments, submodules: ", lambda model: recompute(model, segments=2, submodules=["0"])),
    "unknown": (ArgumentValueError, r"submodules\[1\]: .*got 'head'", lambda model: recompute(model, submodules=["0", "head"])),
    "foreign": (ArgumentValueError, r"submodules\[0\]: .*no part", lambda model: recompute(model, submodules=[nn.Linear(1, 1)])),
    "no module": (ArgumentTypeError, r"submodules\[1\]: ", lambda model: recompute(model, submodules=["0", 1])),
    "a name": (ArgumentTypeError, "submodules: ", lambda model: recompute(model, submodules="0")),
    "empty": (ArgumentValueError, "submodules: ", lambda model: recompute(model, submodules=[])),
    "again": (ArgumentValueError, r"submodules\[1\]: ", lambda model: recompute(model, submodules=["0", model[0]])),
    "container": (ArgumentTypeError, "function: .*container", lambda model: recompute(nn.ModuleList(model))),
    "policy": (ArgumentTypeError, "policy: ", lambda model: recompute(model, policy=["mm"])),
    "flag": (ArgumentTypeError, "preserve_rng_state: ", lambda model: recompute(model, preserve_rng_state=1)),
    "twice": (UsageError, "recomputed yet", lambda model: recompute(recompute(copy.deepcopy(model)))),
    "function twice": (UsageError, "recomputed yet", lambda _: recompute(recompute(abs))),
    "parallel": (UsageError, "DistributedDataParallel", lambda _: recompute(object.__new__(Parallel))),
}


class Parallel(nn.parallel.DistributedDataParallel):
    """Of no process group."""

    __init__ = nn.Module.__init__


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    """And nothing is replaced."""
    kind, words, call = REFUSED[what]
    model = make()
    with pytest.raises(kind, match=words):
        call(model)
    assert all("forward" not in each.__dict__ for each in model.modules())
    assert same(trained(model), trained(make()))
