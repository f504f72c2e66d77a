"""`gradaccum_torch.verify` names planted mistakes, passes sound models, and leaves
everything of the user's as it was.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradaccum
import gradaccum_torch
from gradaccum.kit import Batch, Conditions
from gradaccum.verification.examination import KINDS
from gradaccum_torch.verification.check import is_array, take
from gradaccum_torch.verification.subject import TorchSubject

from .torch_cases import Case, classes, cross_entropy, inputs, net, one_thread  # noqa: F401
from .torch_mistaken_layers import MISTAKEN_LAYERS
from .torch_mistaken_losses import (
    MISTAKEN_LOSSES,
    info_nce,
    numpy_noise,
)
from .torch_sound_layers import SOUND_LAYERS, dropout
from .torch_sound_losses import SOUND_LOSSES, linear_float32

MISTAKES = {**MISTAKEN_LOSSES, **MISTAKEN_LAYERS}
SOUND = (*SOUND_LOSSES, *SOUND_LAYERS)


def verified(case: Case) -> gradaccum.VerificationReport:
    return gradaccum.verify(case.model, case.loss_fn, case.batch, **case.options)


@pytest.mark.parametrize("make", MISTAKES, ids=lambda make: make.__name__)
def test_mistake_is_named(make: Callable[[], Case]) -> None:
    kinds, where = MISTAKES[make]
    report = verified(make())
    assert not report.equivalent
    assert tuple(cause.kind for cause in report.causes) == kinds
    assert report.causes[0].where == where


@pytest.mark.parametrize("make", SOUND, ids=lambda make: make.__name__)
def test_sound_model_passes(make: Callable[[], Case]) -> None:
    report = verified(make())
    assert report.equivalent, str(report)
    assert report.causes == ()
    assert max(report.errors.values()) < report.limit / 2, "little room is left"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_token_mean_in_any_dtype(dtype: torch.dtype) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    labels = torch.tensor([0, -100, -100, -100, 1, 2, 1, -100])
    report = gradaccum_torch.verify(
        net().to(dtype), loss, (inputs(5).to(dtype), labels)
    )
    assert [(cause.kind, cause.where) for cause in report.causes] == [
        ("weights", "(batch[1] != -100).sum()")
    ]


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-4, 1.0])
def test_float16_underflow_is_no_mistake(size: float) -> None:
    """Gradients of a small loss underflow under autocast without a loss scale."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return cross_entropy(model, x, y).float() * size

    report = gradaccum.verify(net(), loss, (inputs(5), classes()))
    assert report.equivalent, str(report)


@pytest.mark.parametrize("carry_state", [True, False])
def test_parameters_are_perturbed(carry_state: bool) -> None:
    """In float64 too, and where state is put back before each micro-batch."""
    model = net().double()
    subject = TorchSubject(
        model,
        lambda model, y: model[0].weight.square().sum(),
        Batch((classes(),), 0, is_array, take),
        len,
        has_aux=False,
    )
    runs = subject.window(
        [[0, 1]] * 2, Conditions(carry_state=carry_state, perturbation=1)
    )
    moved = [
        (run.gradients["0.weight"] / model[0].weight.detach() / 2 - 1).abs().max()
        for run in runs
    ]
    assert all(1e-16 < each < 5e-16 for each in moved), moved


def test_advised_weight_is_right() -> None:
    """What the report says to write as `weight` is Python, and makes it right."""
    labels = torch.tensor([0, -100, 2, -100, 1, 2, 1, 0])
    wrong = gradaccum.verify(net(), cross_entropy, (inputs(5), labels))
    code = wrong.causes[0].fix.partition("weight=")[2].removesuffix(".")
    assert gradaccum.verify(
        net(), cross_entropy, (inputs(5), labels), weight=eval(code)
    ).equivalent


def test_two_mistakes_are_both_named() -> None:
    labels = torch.tensor([0, -100, 2, -100, 1, 2, 1, 0])
    report = gradaccum.verify(
        net(nn.BatchNorm1d(4)), cross_entropy, (inputs(5), labels)
    )
    assert [cause.kind for cause in report.causes] == [
        "batch_statistics",
        "weights",
    ]
    report = gradaccum.verify(
        net(nn.BatchNorm1d(4)),
        lambda m, x: torch.cdist(m(x), m(x) + 1).mean(),
        (inputs(5),),
    )
    assert [cause.kind for cause in report.causes] == [
        "batch_statistics",
        "coupled",
    ]


def test_noise_that_cannot_be_compared_is_no_wrong_loss() -> None:
    report = verified(numpy_noise())
    assert str(report).startswith(
        "Accumulation cannot be compared for this loss: not_repeatable."
    )


def test_nearly_equal_weights_are_told() -> None:
    """Counts around 1000 that do not stand in the batch."""
    tokens = torch.tensor([998.0, 1003.0, 1000.0, 1001.0, 997.0, 1002.0, 1000.0, 999.0])

    def loss(model: nn.Module, x: Tensor, places: Tensor) -> Tensor:
        return (model(x)[:, 0].square() * tokens[places]).sum() / tokens[places].sum()

    (cause,) = gradaccum.verify(net(), loss, (inputs(5), torch.arange(8))).causes
    assert cause.kind == "weights"


def test_reentrant_checkpoint_is_refused() -> None:
    """Its parameters would seem to be unused, and a mistake in them to be none."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            checkpoint(model, x.requires_grad_(), use_reentrant=True), y
        )

    with pytest.raises(gradaccum.UsageError, match="use_reentrant=False"):
        gradaccum.verify(net(nn.BatchNorm1d(4)), loss, (inputs(5), classes()))


def test_batch_of_keywords() -> None:
    """A dictionary is passed by keywords if its keys are names of arguments."""
    batch = {"x": inputs(5), "y": classes()}
    for loss_fn in (
        cross_entropy,
        lambda model, **batch: cross_entropy(model, **batch),
        lambda model, batch: cross_entropy(model, batch["x"], batch["y"]),
    ):
        assert gradaccum.verify(net(), loss_fn, batch).equivalent


def test_unused_parameters_are_noted() -> None:
    model = nn.ModuleDict({"used": net(), "unused": nn.Linear(1, 1)})
    report = gradaccum.verify(
        model, lambda m, x, y: cross_entropy(m["used"], x, y), (inputs(5), classes())
    )
    assert report.notes == ("unused.weight, unused.bias: the loss does not reach it.",)


def test_dictionary_for_a_loss_that_closes_over_its_model() -> None:
    """As one argument, or as arguments by name."""
    model, batch = nn.Linear(3, 1), {"x": torch.randn(8, 3), "y": torch.randn(8, 1)}

    def of_names(x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean()

    for loss_fn in (of_names, lambda batch: of_names(**batch)):
        assert gradaccum.verify(model, loss_fn, batch).equivalent


def test_division_by_the_steps_is_noted() -> None:
    """The window divides too: each update would be four times too small."""
    model, x, y = nn.Linear(3, 1), torch.randn(8, 3), torch.randn(8, 1)
    for divisor, notes in ((4, 1), (5, 0)):
        report = gradaccum.verify(
            model,
            lambda model, x, y, n=divisor: (model(x) - y).square().mean() / n,
            (x, y),
            steps=4,
        )
        assert report.equivalent
        assert len(report.notes) == notes


def test_custom_backward_of_clipping_hook() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out.register_hook(lambda gradient: gradient.clamp(max=1e-3))
        return out.square().mean()

    report = gradaccum.verify(net(), loss, (inputs(5),))
    assert [(cause.kind, cause.where) for cause in report.causes] == [
        ("custom_backward", "0.weight, 0.bias, 2.weight, 2.bias")
    ]


def test_works_without_gradients_outside() -> None:
    with torch.no_grad():
        said = str(verified(linear_float32()))
    assert said.startswith(
        "Accumulation is right for this loss: 4 parameters, 6 partitions"
    )


@pytest.mark.parametrize("items", [2, 3, 5, 7])
def test_batches_of_any_size(items: int) -> None:
    for make, right in ((dropout, True), (info_nce, False)):
        case = make()
        small = tuple(tensor[:items] for tensor in case.batch)
        assert (
            gradaccum.verify(case.model, case.loss_fn, small, steps=2).equivalent
            is right
        )


def test_module_that_workers_share_is_verified_bare() -> None:
    class Shared(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            raise AssertionError

    assert gradaccum.verify(
        Shared(net()), cross_entropy, (inputs(5), classes())
    ).equivalent


@pytest.mark.parametrize(
    "loss", [lambda m, x, y: 3.0, lambda m, x, y: m(x).mean().detach(), lambda m: m]
)
def test_wrong_losses_raise(loss: Callable[..., Any]) -> None:
    """The errors of torch itself say why."""
    with pytest.raises((TypeError, RuntimeError, AttributeError)):
        gradaccum.verify(net(), loss, (inputs(5), classes()))


# `gradaccum_torch.verify` leaves everything of the user's as it was, wherever the loss
# raises.


class Everything(nn.Module):
    """State of every kind: buffers, attributes, a mode of its own, hooks, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.calls = 0
        self.register_buffer("mean", torch.zeros(3))
        self.average = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.inner[2].eval()
        self.inner[0].register_forward_hook(lambda *_: None)
        self.inner[0].weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x * 1.0) + torch.randn(3)
        self.calls += 1
        self.mean = self.mean + out.detach().mean(0)
        with torch.no_grad():
            self.average.mul_(0.5).add_(out.mean(0))
        random.random()
        np.random.rand()
        x.zero_()
        return out


def everything(
    model: Everything, batch: tuple[Tensor, ...]
) -> tuple[list[Any], list[Any]]:
    """(objects whose identity must stay, values)."""
    same: list[Any] = [
        *model.parameters(),
        *model.buffers(),
        *(p.grad for p in model.parameters()),
        model.mean,
    ]
    values: list[Any] = [
        tensor.detach().clone()
        for tensor in (*model.parameters(), *model.buffers(), *batch)
    ]
    values += [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    values += [
        model.calls,
        torch.get_rng_state(),
    ]
    values += [
        random.getstate(),
        np.random.get_state()[1].copy(),
        [module.training for module in model.modules()],
    ]
    values += [
        [list(module._forward_hooks), list(module._forward_pre_hooks)]
        for module in model.modules()
    ]
    values += [parameter._version for parameter in model.inner.parameters()]
    return same, values


def unchanged(
    before: tuple[list[Any], list[Any]], after: tuple[list[Any], list[Any]]
) -> None:
    assert all(a is b for a, b in zip(before[0], after[0], strict=True))
    for a, b in zip(before[1], after[1], strict=True):
        assert (
            torch.equal(a, b)
            if isinstance(a, Tensor)
            else np.array_equal(a, b)
            if isinstance(a, np.ndarray)
            else a == b
        )


@pytest.mark.parametrize("raises_at", [None, 1, 2, 5, 20, 60, 80])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_of_the_users_changes(
    raises_at: int | None, error: type[BaseException]
) -> None:
    torch.manual_seed(1)
    model = Everything()
    batch = (inputs(5), classes())
    cross_entropy(model, batch[0].clone(), batch[1]).backward()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = cross_entropy(model, x, y)
        counter[0] += 1
        if counter[0] == raises_at:
            raise error("in the middle")
        return found

    counter = np.zeros(1, dtype=int)
    before = everything(model, batch)
    if raises_at is None:
        assert not gradaccum.verify(model, loss, batch).equivalent
        assert counter[0] > 80
    else:
        with pytest.raises(error, match="in the middle"):
            gradaccum.verify(model, loss, batch)
    unchanged(before, everything(model, batch))


def test_tensor_that_is_given_whole_is_a_copy() -> None:
    """The loss may write into it."""
    table = torch.zeros(3)

    def loss(model: nn.Module, x: Tensor, y: Tensor, whole: Tensor) -> Tensor:
        whole.add_(1.0)
        return cross_entropy(model, x, y)

    assert gradaccum.verify(
        net(), loss, (inputs(5), classes(), table), axes=(0, 0, None)
    ).equivalent
    assert not table.any()


def test_open_window_is_left_alone() -> None:
    """A wrapped optimizer watches ``.grad`` and its parameters: it must not see
    anything.
    """
    model, (x, y) = net(), (inputs(5), classes())
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    opt.backward(cross_entropy(model, x[:4], y[:4]))
    opt.step()
    assert gradaccum.verify(model, cross_entropy, (x, y)).equivalent
    assert opt.result.micro_step == 1
    opt.backward(cross_entropy(model, x[4:], y[4:]))
    opt.step()
    assert opt.result.applied


# PyTorch's page on `gradaccum.verify`: each of its programs runs, and each kind of
# cause has one that meets it.


PAGE = (Path(gradaccum_torch.__file__).parent / "VERIFY.md").read_text(encoding="utf-8")
PROGRAM = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
PROGRAMS = PROGRAM.findall(PAGE)
LOOP = "A loop that is wrong"
SECTIONS = [
    section
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    if not section.startswith(LOOP)
]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_of_the_page(number: int) -> None:
    assert "assert " in PROGRAMS[number]
    exec(
        compile(PROGRAMS[number], f"VERIFY.md, program {number}", "exec"),
        {"__name__": "__main__"},
    )


def test_each_kind_has_its_program() -> None:
    """Under its name, with the mistake by its kind and the mended loss."""
    assert tuple(section.split("\n", 1)[0] for section in SECTIONS) == KINDS
    for kind, section in zip(KINDS, SECTIONS, strict=True):
        programs = PROGRAM.findall(section)
        assert programs
        for program in programs:
            assert f'"{kind}"' in program
            assert re.search(
                r"^assert gradaccum\.verify\(.*\.equivalent",
                program,
                flags=re.MULTILINE | re.DOTALL,
            )
