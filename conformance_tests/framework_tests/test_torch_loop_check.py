"""The loop check in torch: loops as people write them, none of them wrapped, and ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradaccum
from conformance_tests.framework_tests.torch_large_batch import (
    ITEMS,
    X,
    Y,
    cross_entropy,
    make_model,
)
from gradaccum import UsageError, assert_accumulates, check_loop, recording
from gradaccum_torch.recording import Restoration, _counts_of, weights_of

SIZES = (4, 2, 3, 1)


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    return [*zip(X.to(dtype).split(SIZES), Y.split(SIZES), strict=True)]


def mean_loss(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: cross_entropy(net(x), y)


class Loop(NamedTuple):
    """A loop by hand; the default is right."""

    factor: Callable[[int], float] = lambda items: items / ITEMS
    """What a loss of so many items is multiplied by."""
    after: Callable[[nn.Module], Any] = lambda net: None
    """Run after each backward pass."""
    steps_at: tuple[int, ...] = (3,)
    clears: bool = True

    def run(self, net: nn.Module, optimizer: Any, data: Any) -> None:
        for index, (x, y) in enumerate(data):
            (cross_entropy(net(x), y) * self.factor(len(x))).backward()
            self.after(net)
            if index in self.steps_at:
                optimizer.step()
                if self.clears:
                    optimizer.zero_grad()


def clip(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)


def quarter(items: int) -> float:
    return 0.25


def with_a_penalty(net: nn.Module, optimizer: Any, data: Any) -> None:
    Loop(steps_at=()).run(net, optimizer, data)
    (0.1 * sum(p.square().sum() for p in net.parameters())).backward()
    optimizer.step()


MISTAKES: dict[str, tuple[Any, int | None, set[str]]] = {
    "short tail": (
        Loop(lambda items: 1 / 3, steps_at=(2, 3)),
        3,
        {"mean_of_means", "short_window"},
    ),
    "clipped inside": (Loop(quarter, after=clip), None, {"scaled_inside"}),
    "not cleared": (
        Loop(lambda items: 0.5, steps_at=(1, 3), clears=False),
        2,
        {"leaked", "mean_of_means"},
    ),
    "penalty": (with_a_penalty, None, {"unexplained"}),
    "never": (Loop(steps_at=()), None, {"no_update"}),
    "without gradients": (Loop(after=nn.Module.zero_grad), None, {"no_update"}),
}
"""The loop, its steps, and the kinds of its problems."""


def check(
    loop: Any, dtype: torch.dtype, steps: int | None = None
) -> gradaccum.LoopReport:
    data = batches(dtype)
    net = make_model(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    run = loop.run if isinstance(loop, Loop) else loop
    return check_loop(
        lambda: run(net, optimizer, data),
        optimizer,
        mean_loss(net),
        data,
        steps=steps,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("loop", "steps", "kinds"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_named(
    loop: Any, steps: int | None, kinds: set[str], dtype: torch.dtype
) -> None:
    report = check(loop, dtype, steps)
    assert {problem.kind for problem in report.problems} == kinds, report
    assert not report.right


def test_bfloat16() -> None:
    assert check(Loop(), torch.bfloat16).right
    assert not check(Loop(quarter), torch.bfloat16).right


def epoch(net: nn.Module, opt: Any, data: Any) -> None:
    for x, y in opt.epoch(data):
        opt.backward(cross_entropy(net(x), y), weight=len(x))
        opt.step()
        opt.zero_grad()


def last_in_the_closure(net: nn.Module, optimizer: Any, data: Any) -> None:
    """As Lightning does: the last micro-batch of a window runs inside the step."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y) * len(x) / ITEMS
        loss.backward()
        return loss

    for x, y in data[:-1]:
        run(x, y)
    optimizer.step(lambda: run(*data[-1]))


def scaled_by_torch(net: nn.Module, optimizer: Any, data: Any) -> None:
    """A fused kernel gets the gradient undivided, and the scale beside it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in data:
        scaler.scale(cross_entropy(net(x), y) * len(x) / ITEMS).backward()
    scaler.step(optimizer)
    scaler.update()


RIGHT: dict[str, tuple[Callable[..., None], dict[str, Any] | None]] = {
    "by hand": (Loop().run, None),
    "closure": (last_in_the_closure, None),
    "GradScaler": (scaled_by_torch, None),
    "ours": (epoch, {}),
    "clipped": (epoch, {"clip_norm": 0.1}),
    "scaled": (epoch, {"loss_scale": 1024.0}),
    "separate": (epoch, {"separate_sums": True}),
    "masters": (epoch, {"master_weights": True}),
    "autocast": (epoch, {}),
}
"""The loop, and the options of `gradaccum.wrap`, or None."""


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_loop_is_right(name: str, fused: bool) -> None:
    """Where there are master weights, they stand in the optimizer's groups."""
    loop, options = RIGHT[name]
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    data = batches(dtype)
    net = make_model(dtype)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    if options is not None:
        optimizer = gradaccum.wrap(optimizer, steps=3, **options)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
        assert_accumulates(
            lambda: loop(net, optimizer, data),
            optimizer,
            mean_loss(net),
            data,
            clip_norm=(options or {}).get("clip_norm"),
        )
    assert all(map(torch.equal, net.parameters(), before)), "they are put back"


def test_small_float16_gradients_are_not_a_mistake() -> None:
    net = make_model(torch.float32)
    data = batches(torch.float32)
    optimizer = gradaccum.wrap(
        torch.optim.SGD(net.parameters(), lr=0.1), steps=3, loss_scale=4096.0
    )

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return cross_entropy(net(x), y) / 1000

    def train() -> None:
        for x, y in optimizer.epoch(data):
            optimizer.backward(loss(x, y), weight=len(x))
            optimizer.step()

    assert_accumulates(train, optimizer, loss, data)


def test_model_with_two_optimizers() -> None:
    """Neither update moves the point at which the gradients are taken."""
    net = make_model()
    data = batches()
    first, *others = net.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others, lr=0.1)]
    both = SimpleNamespace(
        step=lambda: [each.step() for each in optimizers], zero_grad=net.zero_grad
    )
    windows = Loop(
        {4: 4 / 6, 2: 2 / 6, 3: 3 / 4, 1: 1 / 4}.__getitem__, steps_at=(1, 3)
    )
    for optimizer in optimizers:
        assert_accumulates(
            lambda: windows.run(net, both, data),
            optimizer,
            mean_loss(net),
            data,
        )


def test_step_that_changes_nothing_is_not_undone() -> None:
    """Autograd may have saved the parameter for a backward pass."""
    parameter = nn.Parameter(torch.ones(2))
    restoration = Restoration(torch.optim.SGD([parameter]))
    restoration.step_begins()
    restoration.step_ended()
    assert parameter._version == 0


def test_wrong_loop_fails_an_assertion() -> None:
    net = make_model()
    data = batches()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    loop = Loop(lambda items: 1)
    with pytest.raises(AssertionError, match="The loop is wrong"):
        assert_accumulates(
            lambda: loop.run(net, optimizer, data),
            optimizer,
            mean_loss(net),
            data,
        )


def test_closure_that_runs_again_is_one_update() -> None:
    """The second run is at other parameters, or adds the same gradients again. Nor
    does the step of the base class count, which torch reports too.
    """

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            closure()
            return super().step()

    torch.optim.SGD(make_model().parameters())  # From here on torch reports its steps.
    data = batches()
    net = make_model()
    optimizer = Twice(net.parameters(), lr=0.1)
    with recording(optimizer) as record:
        last_in_the_closure(net, optimizer, data)
    report = record.report(mean_loss(net), data)
    assert len(report.updates) == 1
    assert report.right, report


@pytest.mark.parametrize("kept", [1, 0])
def test_imaginary_part_counts(kept: int) -> None:
    parameter: Any = nn.Parameter(torch.ones(6, dtype=torch.complex128))
    optimizer = torch.optim.SGD([parameter])

    def loss_fn(x: Tensor) -> Any:
        return (x @ parameter.conj() + 1j).abs().mean()

    def train() -> None:
        loss_fn(data[0]).backward()
        parameter.grad.imag.mul_(kept)
        optimizer.step()

    data = [X + 2j * X]
    assert check_loop(train, optimizer, loss_fn, data).right == kept


def test_loop_that_ends_frozen_in_evaluation() -> None:
    """The micro-batches are measured as they were in the loop."""
    net = nn.Sequential(make_model(), nn.BatchNorm1d(3, dtype=torch.float64))
    optimizer = torch.optim.SGD(net.parameters())
    data = batches()[:3]

    def train() -> None:
        Loop(lambda items: items / 9, steps_at=(2,)).run(net, optimizer, data)
        net.eval().requires_grad_(False)

    assert_accumulates(train, optimizer, mean_loss(net), data)
    assert not any(module.training for module in net.modules())
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_change_of_the_parameters_is_refused() -> None:
    net = make_model()
    optimizer = torch.optim.SGD(net.parameters())
    for change in (
        lambda _: net[0].requires_grad_(False),
        lambda _: optimizer.add_param_group({"params": X.clone()}),
    ):
        loop = Loop(after=change, steps_at=(1, 3))
        with recording(optimizer), pytest.raises(UsageError, match="added, frozen"):
            loop.run(net, optimizer, batches())


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda x: (x.sum(), x), "an object of type tuple"),
        (
            lambda x: checkpoint(torch.sum, x, use_reentrant=True),
            "use_reentrant=False",
        ),
    ],
)
def test_loss_without_a_measurable_gradient(loss_fn: Any, message: str) -> None:
    parameter = torch.ones(1, requires_grad=True)
    with pytest.raises(gradaccum.GradAccumError, match=message):
        check_loop(lambda: None, torch.optim.SGD([parameter]), loss_fn, [parameter])


class WithLoss(nn.Module):
    """A model whose call returns its loss, as those of transformers do: a mean, or its
    part of the mean over a window, as a trainer asks for.
    """

    def __init__(self, output: Callable[..., Any]) -> None:
        super().__init__()
        self.net = make_model()
        self.output = output

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        loss = cross_entropy(self.net(x), labels)
        if num_items_in_batch is not None:
            loss = loss * len(x) / num_items_in_batch
        return self.output(loss=loss)


@pytest.mark.parametrize("output", [SimpleNamespace, dict])
def test_model_that_returns_its_loss_is_recorded(output: Any) -> None:
    net = WithLoss(output)

    def loss_of(*arguments: Any, **keywords: Any) -> Any:
        returned = net(*arguments, **keywords)
        return returned["loss"] if output is dict else returned.loss

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with recording(optimizer, net) as record:
        for x, y in batches():
            loss_of(x, labels=y, num_items_in_batch=ITEMS).backward()
        optimizer.step()
    assert record.report().right, record.report()
    sums = record.report(lambda x, labels: loss_of(x, labels) * len(x), reduction="sum")
    assert [problem.kind for problem in sums.problems] == ["scaled"], sums
    with recording(optimizer, net) as record:
        pass
    with pytest.raises(gradaccum.ArgumentValueError, match="an empty list"):
        record.report()


def test_labels_are_counted_where_all_models_agree() -> None:
    """A causal model leaves out the first label of each sequence."""
    labels = torch.tensor([[-100, 1, 2], [-100, 3, -100]])
    calls = [((), {"labels": labels[:1]}), ((), {"labels": labels})]
    assert weights_of(_counts_of(calls)) == [2, 3]
    labels[1, 0] = 4
    with pytest.raises(UsageError, match="weight: expected a function"):
        weights_of(_counts_of(calls))
