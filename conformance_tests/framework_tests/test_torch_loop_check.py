"""The loop check in torch: loops as people write them, none of them wrapped, and ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradaccum
from gradaccum import assert_accumulates, check_loop, recording

SIZES = (5, 3, 4, 2)


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    items = torch.randn(14, 8, dtype=torch.float64, generator=generator).to(dtype)
    return [(part[:, :6], part[:, 6:]) for part in items.split(SIZES)]


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


class Loop(NamedTuple):
    """A loop by hand; the default is right."""

    factor: Callable[[int], float] = lambda items: items / 14
    """What a loss of so many items is multiplied by."""
    before: Callable[[nn.Module], Any] = lambda net: None
    after: Callable[[nn.Module], Any] = lambda net: None
    """Run before and after each backward pass."""
    steps_at: tuple[int, ...] = (3,)
    clears: bool = True

    def run(self, net: nn.Module, optimizer: Any, data: Any) -> None:
        for index, (x, y) in enumerate(data):
            self.before(net)
            (mse_loss(net(x), y) * self.factor(len(x))).backward()
            self.after(net)
            if index in self.steps_at:
                optimizer.step()
                if self.clears:
                    optimizer.zero_grad()


def halve(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad /= 2


def clip(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.3)


def quarter(items: int) -> float:
    return 0.25


def clipped_alone(net: nn.Module, optimizer: Any, data: Any) -> None:
    total = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for x, y in data:
        optimizer.zero_grad()
        (mse_loss(net(x), y) / len(data)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        for sum_so_far, parameter in zip(total, net.parameters(), strict=True):
            sum_so_far += parameter.grad
    for sum_so_far, parameter in zip(total, net.parameters(), strict=True):
        parameter.grad = sum_so_far
    optimizer.step()


def losses_added_up(net: nn.Module, optimizer: Any, data: Any) -> None:
    total: Any = 0.0
    for x, y in data:
        total = total + mse_loss(net(x), y) / len(data)
        total.backward(retain_graph=True)
    optimizer.step()


def with_a_penalty(net: nn.Module, optimizer: Any, data: Any) -> None:
    Loop(steps_at=()).run(net, optimizer, data)
    (0.1 * sum(p.square().sum() for p in net.parameters())).backward()
    optimizer.step()


MEANS = {"mean_of_means"}
SHORT = {"mean_of_means", "short_window"}
MISTAKES: dict[str, tuple[Any, int | None, set[str]]] = {
    "means": (Loop(quarter), None, MEANS),
    "not divided": (Loop(lambda items: 1), None, {"not_divided"}),
    "cleared inside": (Loop(quarter, nn.Module.zero_grad), None, {"only_last"}),
    "short tail": (Loop(lambda items: 1 / 3, steps_at=(2, 3)), 3, SHORT),
    "halved": (Loop(lambda items: 1, after=halve), None, {"scaled_inside"}),
    "clipped inside": (Loop(quarter, after=clip), None, {"scaled_inside"}),
    "clipped alone": (clipped_alone, None, {"clipped_each"}),
    "off by one": (
        Loop(lambda items: 0.5, steps_at=(0, 2)),
        2,
        {"boundary", "lost", *SHORT},
    ),
    "not cleared": (
        Loop(lambda items: 0.5, steps_at=(1, 3), clears=False),
        2,
        {"leaked", *MEANS},
    ),
    "losses added up": (losses_added_up, None, {"counted_again"}),
    "still scaled": (Loop(lambda items: items / 14 * 65536), None, {"scaled"}),
    "each time": (Loop(lambda items: 1, steps_at=(0, 1, 2, 3)), 4, {"boundary"}),
    "penalty": (with_a_penalty, None, {"unexplained"}),
    "never": (Loop(steps_at=()), None, {"no_update"}),
}
"""The loop, its steps, and the kinds of its problems."""


def check(
    loop: Any, dtype: torch.dtype, steps: int | None = None, data: Any = None
) -> gradaccum.LoopReport:
    data = data or batches(dtype)
    net = model(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    run = loop.run if isinstance(loop, Loop) else loop
    return check_loop(
        lambda: run(net, optimizer, data),
        optimizer,
        lambda x, y: mse_loss(net(x), y),
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


def test_gradients_that_are_alike_are_not_told_apart() -> None:
    report = check(Loop(quarter, steps_at=(1,)), torch.float64, data=batches()[:1] * 2)
    assert report.uncertain
    assert not report.right


def ours(**options: Any) -> Callable[..., None]:
    def train(net: nn.Module, optimizer: Any, data: Any) -> None:
        opt = gradaccum.wrap(optimizer, steps=3, **options)
        for x, y in opt.epoch(data):
            opt.backward(mse_loss(net(x), y), weight=len(x))
            opt.step()
            opt.zero_grad()

    return train


def last_in_the_closure(net: nn.Module, optimizer: Any, data: Any) -> None:
    """As Lightning does: the last micro-batch of a window runs inside the step."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        loss = mse_loss(net(x), y) * len(x) / 14
        loss.backward()
        return loss

    for x, y in data[:-1]:
        run(x, y)
    optimizer.step(lambda: run(*data[-1]))


def scaled_by_torch(net: nn.Module, optimizer: Any, data: Any) -> None:
    """A fused kernel gets the gradient undivided, and the scale beside it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in data:
        scaler.scale(mse_loss(net(x), y) * len(x) / 14).backward()
    scaler.step(optimizer)
    scaler.update()


RIGHT = {
    "by hand": Loop().run,
    "closure": last_in_the_closure,
    "GradScaler": scaled_by_torch,
    "ours": ours(),
    "clipped": ours(clip_norm=0.1),
    "scaled": ours(loss_scale=1024.0),
    "separate": ours(separate_sums=True),
}


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("loop", RIGHT.values(), ids=RIGHT)
def test_right_loop_is_right(loop: Callable[..., None], fused: bool) -> None:
    data = batches(torch.float32)
    net = model(torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    assert_accumulates(
        lambda: loop(net, optimizer, data),
        optimizer,
        lambda x, y: mse_loss(net(x), y),
        data,
        clip_norm=0.1,
    )
    assert all(map(torch.equal, net.parameters(), before)), "they are put back"


def test_master_weights() -> None:
    """The optimizer steps float32 copies, which stand in its groups then."""
    data = batches(torch.bfloat16)
    net = model(torch.bfloat16)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    opt = gradaccum.wrap(inner, steps=2, master_weights=True)

    def train() -> None:
        for x, y in opt.epoch(data):
            opt.backward(mse_loss(net(x), y), weight=len(x))
            opt.step()
            opt.zero_grad()

    assert_accumulates(train, opt, lambda x, y: mse_loss(net(x), y), data, steps=2)


def test_closure_that_runs_again_is_one_update() -> None:
    """The second run is at other parameters, or adds the same gradients again. Nor
    does the step of the base class count, which torch reports too.
    """

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            closure()
            return super().step()

    torch.optim.SGD(model().parameters())  # From here on torch reports its steps.
    data = batches()
    net = model()
    optimizer = Twice(net.parameters(), lr=0.1)
    with recording(optimizer) as record:
        last_in_the_closure(net, optimizer, data)
    report = record.report(lambda x, y: mse_loss(net(x), y), data)
    assert len(report.updates) == 1
    assert report.right, report


class WithLoss(nn.Module):
    """A model whose call returns its loss, as those of transformers do: a mean, or its
    part of the mean over a window, as a trainer asks for.
    """

    def __init__(self, output: Callable[..., Any]) -> None:
        super().__init__()
        self.net = model()
        self.output = output

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        loss = mse_loss(self.net(x), labels)
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
            loss_of(x, labels=y, num_items_in_batch=14).backward()
        optimizer.step()
    assert record.report().right, record.report()
    sums = record.report(lambda x, labels: loss_of(x, labels) * len(x), reduction="sum")
    assert [problem.kind for problem in sums.problems] == ["scaled"], sums
