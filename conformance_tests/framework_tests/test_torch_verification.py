"""`gradaccum_torch.verify` names the mistakes of nearly eighty losses, passes sound
models, and leaves everything of the user's as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import gradaccum
from gradaccum import ArgumentValueError, UsageError, VerificationReport, verify

from .torch_invented_losses import ARRAYS, LOSSES
from .torch_sound_models import LABELS, SOUND_MODELS, Case, X, net


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def of_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def kinds_of(report: VerificationReport) -> list[str]:
    return [cause.kind for cause in report.causes]


def test_verify_judges_invented_losses() -> None:
    """Nearly every verdict, and the first cause of nearly all that are wrong. No loss
    that is right is called wrong: at worst it cannot be compared.
    """
    wrong_verdicts: list[str] = []
    wrong_causes: list[str] = []
    for invented in LOSSES:
        report = verify(
            invented.model(), invented.loss, invented.batch, steps=4, **invented.options
        )
        kinds = kinds_of(report)
        if report.equivalent != (not invented.kind):
            wrong_verdicts.append(f"{invented.name}: {report}")
            assert kinds == ["not_repeatable"], report
        elif invented.kind and kinds[0] != invented.kind:
            wrong_causes.append(f"{invented.name}: {kinds}")
        elif invented.where:
            assert report.causes[0].where == invented.where, report
    assert len(LOSSES) >= 78
    assert len(wrong_verdicts) <= 2, wrong_verdicts
    mistakes = sum(bool(invented.kind) for invented in LOSSES)
    assert len(wrong_causes) <= 0.05 * mistakes, wrong_causes


@pytest.mark.parametrize("make", SOUND_MODELS, ids=lambda make: make.__name__)
def test_sound_model_passes(make: Callable[[], Case]) -> None:
    model, loss_fn, batch, axes = make()
    report = verify(model, loss_fn, batch, axes=axes)
    assert report.equivalent, str(report)
    assert max(report.errors.values()) < 2, "little room is left"


def test_advised_weight_is_right() -> None:
    """What the report says to write as `weight` is Python, and makes it right; in
    bfloat16 the mistake is found too.
    """
    y = ARRAYS["missing"]
    wrong = verify(net(), cross_entropy, (X, y))
    weight = eval(wrong.causes[0].fix.partition("weight=")[2].removesuffix("."))
    assert verify(net(), cross_entropy, (X, y), weight=weight).equivalent
    half = verify(net().bfloat16(), cross_entropy, (X.bfloat16(), y))
    assert half.causes[0].where == wrong.causes[0].where == "(batch[1] != -100).sum()"


def test_float16_gradients_that_underflow() -> None:
    """Autocast without a loss scale. The loss is divided, as one of many items is."""

    def loss(divisor: float) -> Any:
        def divided(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return cross_entropy(model(x), y) / divisor

        return divided

    for divisor in (1e5, 1e7):
        report = verify(net(), loss(divisor), (X, LABELS))
        assert report.equivalent, str(report)
        assert max(report.errors.values()) < 2
        assert "multiplied by 256" in report.notes[0]
    assert kinds_of(verify(net(), loss(1e5), (X, ARRAYS["missing"]))) == ["weights"]
    for hook, divisor in (
        (lambda gradient: gradient + 1e-2, 1),
        (lambda gradient: gradient.clamp(-1e-2, 1e-2), 1e5),
        (lambda gradient: gradient.clamp(-1e-3, 1e-3), 1e5),
    ):
        model = net()
        model[0].weight.register_hook(hook)
        report = verify(model, loss(divisor), (X, LABELS))
        assert kinds_of(report) == ["custom_backward"]


def test_float16_gradients_that_a_scale_would_overflow() -> None:
    """That of a micro-batch, not that of the large batch."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return (model(x).flatten() - y).square().mean()

    x = torch.ones(64, 4)
    y = torch.zeros(64)
    y[0] = 400
    report = verify(nn.Linear(4, 1), loss, (x, y), steps=32)
    assert report.equivalent, str(report)


@pytest.mark.parametrize("trains", [True, False])
def test_loss_without_a_gradient_is_refused(trains: bool) -> None:
    model = net().requires_grad_(trains)
    with pytest.raises(ArgumentValueError, match="got a loss whose gradient is 0"):
        verify(model, lambda model, x: model(x).sum() * 0, X)


def test_weight_of_a_dictionary_gets_keywords() -> None:
    batch = {"x": X, "y": ARRAYS["missing"]}
    for weight in (
        lambda x, y: (y != -100).sum(),
        lambda batch: (batch["y"] >= 0).sum(),
        lambda *args, **keywords: (args[0]["y"] >= 0).sum(),
    ):
        assert verify(net(), of_model, batch, weight=weight).equivalent


def test_two_mistakes_are_both_named() -> None:
    model = net(nn.BatchNorm1d(4))
    report = verify(model, cross_entropy, (X, ARRAYS["missing"]))
    assert kinds_of(report) == ["batch_statistics", "weights"]


def test_reentrant_checkpoint_is_refused() -> None:
    """Its parameters would seem to be unused, and a mistake in them to be none."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(
            checkpoint(model, x.requires_grad_(), use_reentrant=True), y
        )

    with pytest.raises(UsageError, match="use_reentrant=False"):
        verify(net(nn.BatchNorm1d(4)), loss, (X, LABELS))


def test_batch_norm_in_evaluation_mode_is_noted() -> None:
    report = gradaccum.verify(net(nn.BatchNorm1d(4)).eval(), of_model, (X, LABELS))
    assert report.equivalent
    assert "put the model in training mode first" in report.notes[0]


def test_notes() -> None:
    """Parameters that the loss does not reach, and a division by the steps: the window
    divides too, so that each update would be four times too small.
    """
    model = nn.ModuleDict({"used": net(), "unused": nn.Linear(1, 1)})
    for divisor, notes in ((1, 1), (4, 2), (5, 1)):
        report = verify(
            model,
            lambda m, x, y, n=divisor: of_model(m["used"], x, y) / n,
            (X, LABELS),
            steps=4,
        )
        assert report.equivalent
        unused = "unused.weight, unused.bias: not reached by the loss."
        assert report.notes[0] == unused
        assert len(report.notes) == notes


def test_module_that_workers_share_is_verified_bare() -> None:
    class Shared(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            raise AssertionError

    with torch.no_grad():  # The caller's mode does not matter.
        assert verify(Shared(net()), of_model, (X, LABELS)).equivalent


class Everything(nn.Module):
    """State of every kind: buffers, attributes, a mode of its own, hooks, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.calls = 0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("least", torch.zeros(0))
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.inner[2].eval()
        self.inner[0].register_forward_hook(lambda *_: None)
        self.inner[0].weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x * 1.0) + torch.randn(4)
        self.calls += 1
        self.mean = self.mean + out.detach().mean(0)
        if not self.least.numel():
            self.least.resize_(4).copy_(out.detach().amin(0))
        with torch.no_grad():
            self.average.mul_(0.5).add_(out.mean(0))
        x.zero_()
        return out


def objects_of(model: Everything) -> list[Any]:
    gradients = [p.grad for p in model.parameters()]
    return [*model.parameters(), *model.buffers(), *gradients]


def values_of(model: Everything, x: Tensor) -> str:
    modules = list(model.modules())
    return repr(
        [
            [None if each is None else each.tolist() for each in objects_of(model)],
            x.tolist(),
            model.calls,
            torch.get_rng_state().tolist(),
            [module.training for module in modules],
            [[*module._forward_hooks] for module in modules],
            [[*module._forward_pre_hooks] for module in modules],
            [parameter._version for parameter in model.inner.parameters()],
        ]
    )


@pytest.mark.parametrize("raises_at", [None, 1, 5, 20, 50])
def test_nothing_of_the_users_changes(raises_at: int | None) -> None:
    """Wherever the loss raises."""
    torch.manual_seed(1)
    model = Everything()
    x = X.clone()
    of_model(model, x.clone(), LABELS).backward()
    model.least.resize_(0)
    calls = 0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = of_model(model, x, y)
        if calls == raises_at:
            raise KeyboardInterrupt
        return value

    objects = objects_of(model)
    values = values_of(model, x)
    if raises_at is None:
        assert not verify(model, loss, (x, LABELS)).equivalent
        assert calls > 50
    else:
        with pytest.raises(KeyboardInterrupt):
            verify(model, loss, (x, LABELS))
    assert all(a is b for a, b in zip(objects, objects_of(model), strict=True))
    assert values_of(model, x) == values


def test_open_window_is_left_alone() -> None:
    """A wrapped optimizer watches ``.grad`` and its parameters: it must not see
    anything.
    """
    model = net()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    opt.backward(of_model(model, X[:6], LABELS[:6]))
    opt.step()
    assert verify(model, of_model, (X, LABELS)).equivalent
    assert opt.result.micro_step == 1
    opt.backward(of_model(model, X[6:], LABELS[6:]))
    opt.step()
    assert opt.result.applied
