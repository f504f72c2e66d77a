"""The loop check in torch: loops as people write them, none of them wrapped, and ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradaccum
from gradaccum import assert_accumulates, check_loop, recording

SIZES = (5, 3, 4, 2)
loss_fn = torch.nn.functional.mse_loss


def batches(dtype: Any = torch.float64) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, 6, dtype=torch.float64, generator=generator).to(dtype),
            torch.randn(size, 2, dtype=torch.float64, generator=generator).to(dtype),
        )
        for size in SIZES
    ]


def model(dtype: Any = torch.float64) -> Any:
    torch.manual_seed(1)
    layers = torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)
    return torch.nn.Sequential(*layers).to(dtype)


def right(net: Any, optimizer: Any, data: Any) -> None:
    total = sum(len(x) for x, _ in data)
    for x, y in data:
        (loss_fn(net(x), y) * len(x) / total).backward()
    optimizer.step()


def mean_of_means(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        (loss_fn(net(x), y) / len(data)).backward()
    optimizer.step()


def not_divided(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        loss_fn(net(x), y).backward()
    optimizer.step()


def cleared_inside(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        optimizer.zero_grad()
        (loss_fn(net(x), y) / len(data)).backward()
    optimizer.step()


def short_tail(net: Any, optimizer: Any, data: Any) -> None:
    for i, (x, y) in enumerate(data):
        (loss_fn(net(x), y) / 3).backward()
        if (i + 1) % 3 == 0 or i == len(data) - 1:
            optimizer.step()
            optimizer.zero_grad()


def lost_tail(net: Any, optimizer: Any, data: Any) -> None:
    for i, (x, y) in enumerate(data):
        (loss_fn(net(x), y) / 3).backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


def halved(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        loss_fn(net(x), y).backward()
        for parameter in net.parameters():
            parameter.grad /= 2
    optimizer.step()


def doubled(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2
        (loss_fn(net(x), y) / len(data)).backward()
    optimizer.step()


def clipped_inside(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        (loss_fn(net(x), y) / len(data)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()


def clipped_alone(net: Any, optimizer: Any, data: Any) -> None:
    total = None
    for x, y in data:
        optimizer.zero_grad()
        (loss_fn(net(x), y) / len(data)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        gradients = [parameter.grad.clone() for parameter in net.parameters()]
        pairs = zip(total or [0] * len(gradients), gradients, strict=True)
        total = [before + gradient for before, gradient in pairs]
    for parameter, gradient in zip(net.parameters(), total, strict=True):
        parameter.grad = gradient
    optimizer.step()


def off_by_one(net: Any, optimizer: Any, data: Any) -> None:
    for i, (x, y) in enumerate(data):
        (loss_fn(net(x), y) / 2).backward()
        if i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def not_cleared(net: Any, optimizer: Any, data: Any) -> None:
    for i, (x, y) in enumerate(data):
        (loss_fn(net(x), y) / 2).backward()
        if i % 2:
            optimizer.step()


def losses_added_up(net: Any, optimizer: Any, data: Any) -> None:
    total = 0.0
    for x, y in data:
        total = total + loss_fn(net(x), y) / len(data)
        total.backward(retain_graph=True)
    optimizer.step()


def divided_twice(net: Any, optimizer: Any, data: Any) -> None:
    total = sum(len(x) for x, _ in data)
    for x, y in data:
        (loss_fn(net(x), y) * len(x) / total / len(data)).backward()
    optimizer.step()


def still_scaled(net: Any, optimizer: Any, data: Any) -> None:
    total = sum(len(x) for x, _ in data)
    for x, y in data:
        (loss_fn(net(x), y) * len(x) / total * 65536).backward()
    optimizer.step()


def step_each_time(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        loss_fn(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def first_alone(net: Any, optimizer: Any, data: Any) -> None:
    for i, (x, y) in enumerate(data):
        outputs = net(x) if i == 0 else net(x).detach().requires_grad_()
        (loss_fn(outputs, y) / len(data)).backward()
    optimizer.step()


def one_twice(net: Any, optimizer: Any, data: Any) -> None:
    total = sum(len(x) for x, _ in data)
    for x, y in [*data, data[1]]:
        (loss_fn(net(x), y) * len(x) / total).backward()
    optimizer.step()


def running_mean(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.9
        (loss_fn(net(x), y) * 0.1).backward()
    optimizer.step()


def with_a_penalty(net: Any, optimizer: Any, data: Any) -> None:
    total = sum(len(x) for x, _ in data)
    for x, y in data:
        (loss_fn(net(x), y) * len(x) / total).backward()
    (0.1 * sum(p.square().sum() for p in net.parameters())).backward()
    optimizer.step()


def never(net: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        loss_fn(net(x), y).backward()


MISTAKES: dict[Callable[..., None], tuple[int | None, set[str]]] = {
    mean_of_means: (None, {"mean_of_means"}),
    not_divided: (None, {"not_divided"}),
    cleared_inside: (None, {"only_last"}),
    short_tail: (3, {"mean_of_means", "short_window"}),
    lost_tail: (3, {"lost", "mean_of_means"}),
    halved: (None, {"scaled_inside"}),
    doubled: (None, {"scaled_inside"}),
    running_mean: (None, {"scaled_inside"}),
    clipped_inside: (None, {"scaled_inside"}),
    clipped_alone: (None, {"clipped_each"}),
    off_by_one: (2, {"boundary", "lost", "mean_of_means", "short_window"}),
    not_cleared: (2, {"leaked", "mean_of_means"}),
    losses_added_up: (None, {"counted_again"}),
    divided_twice: (None, {"scaled"}),
    still_scaled: (None, {"scaled"}),
    step_each_time: (4, {"boundary"}),
    first_alone: (None, {"lost"}),
    one_twice: (None, {"weights"}),
    with_a_penalty: (None, {"unexplained"}),
    never: (None, {"no_update"}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("loop", MISTAKES, ids=lambda loop: loop.__name__)
def test_mistake_is_named(loop: Callable[..., None], dtype: Any) -> None:
    steps, kinds = MISTAKES[loop]
    data = batches(dtype)
    net = model(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    report = check_loop(
        lambda: loop(net, optimizer, data),
        optimizer,
        lambda x, y: loss_fn(net(x), y),
        data,
        steps=steps,
    )
    assert {problem.kind for problem in report.problems} == kinds, report
    assert not report.right


def ours(net: Any, optimizer: Any, data: Any, **options: Any) -> None:
    opt = gradaccum.wrap(optimizer, steps=3, **options)
    for x, y in opt.epoch(data):
        opt.backward(loss_fn(net(x), y), weight=len(x))
        opt.step()
        opt.zero_grad()


def ours_clipped(net: Any, optimizer: Any, data: Any) -> None:
    ours(net, optimizer, data, clip_norm=0.1)


def ours_scaled(net: Any, optimizer: Any, data: Any) -> None:
    ours(net, optimizer, data, loss_scale=1024.0)


def ours_apart(net: Any, optimizer: Any, data: Any) -> None:
    ours(net, optimizer, data, separate_sums=True)


def last_in_the_closure(net: Any, optimizer: Any, data: Any) -> None:
    """As Lightning does: the last micro-batch of a window runs inside the step."""
    total = sum(len(x) for x, _ in data)

    def run(x: Any, y: Any) -> Any:
        loss = loss_fn(net(x), y) * len(x) / total
        loss.backward()
        return loss

    for x, y in data[:-1]:
        run(x, y)
    optimizer.step(lambda: run(*data[-1]))


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "loop",
    [right, last_in_the_closure, ours, ours_clipped, ours_scaled, ours_apart],
    ids=lambda loop: loop.__name__,
)
def test_right_loop_is_right(
    loop: Callable[..., None], dtype: Any, fused: bool
) -> None:
    data = batches(dtype)
    net = model(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    assert_accumulates(
        lambda: loop(net, optimizer, data),
        optimizer,
        lambda x, y: loss_fn(net(x), y),
        data,
    )
    for parameter, start in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, start), "the parameters are put back"


def test_bfloat16() -> None:
    data = batches(torch.bfloat16)
    for loop, is_right in ((right, True), (mean_of_means, False)):
        net = model(torch.bfloat16)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        report = check_loop(
            lambda net=net, optimizer=optimizer, loop=loop: loop(net, optimizer, data),
            optimizer,
            lambda x, y, net=net: loss_fn(net(x), y),
            data,
        )
        assert report.right == is_right, report


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_grad_scaler(fused: bool) -> None:
    """A fused kernel gets the gradient undivided, and the scale beside it."""
    data = batches(torch.float32)
    net = model(torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train() -> None:
        total = sum(SIZES)
        for x, y in data:
            scaler.scale(loss_fn(net(x), y) * len(x) / total).backward()
        scaler.step(optimizer)
        scaler.update()

    assert_accumulates(train, optimizer, lambda x, y: loss_fn(net(x), y), data)


def test_master_weights() -> None:
    """The optimizer steps float32 copies, which stand in its groups then."""
    data = batches(torch.bfloat16)
    net = model(torch.bfloat16)
    opt = gradaccum.wrap(
        torch.optim.AdamW(net.parameters(), lr=1e-2), steps=2, master_weights=True
    )

    def train() -> None:
        for x, y in opt.epoch(data):
            opt.backward(loss_fn(net(x), y), weight=len(x))
            opt.step()
            opt.zero_grad()

    assert_accumulates(train, opt, lambda x, y: loss_fn(net(x), y), data, steps=2)


def test_assertion_shows_the_report() -> None:
    data = batches()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(AssertionError, match="weigh each by its items"):
        assert_accumulates(
            lambda: mean_of_means(net, optimizer, data),
            optimizer,
            lambda x, y: loss_fn(net(x), y),
            data,
        )


class WithLoss(torch.nn.Module):
    """A model whose call returns its loss, as those of transformers do."""

    def __init__(self, output: Callable[..., Any] = SimpleNamespace) -> None:
        super().__init__()
        self.net = model()
        self.output = output

    def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        """A mean, or its part of the mean over a window, as a trainer asks for."""
        loss = loss_fn(self.net(x), labels)
        if num_items_in_batch is not None:
            loss = loss * len(x) / num_items_in_batch
        return self.output(loss=loss)


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
    report = check_loop(
        lambda: last_in_the_closure(net, optimizer, data),
        optimizer,
        lambda x, y: loss_fn(net(x), y),
        data,
    )
    assert len(report.updates) == 1
    assert report.right, report


def test_step_that_raised_is_said() -> None:
    data = batches()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with recording(optimizer) as record, pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    with pytest.raises(gradaccum.UsageError, match="a step that raised"):
        record.report(lambda x, y: loss_fn(net(x), y), data)


@pytest.mark.parametrize("output", [SimpleNamespace, dict])
def test_model_that_returns_its_loss_is_recorded(output: Any) -> None:
    data = batches()
    net = WithLoss(output)

    def loss_of(*arguments: Any, **keywords: Any) -> Any:
        returned = net(*arguments, **keywords)
        return returned["loss"] if output is dict else returned.loss

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with recording(optimizer, net) as record:
        for x, y in data:
            loss_of(x, labels=y, num_items_in_batch=14).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = record.report()
    assert report.right, report
    sums = record.report(lambda x, labels: loss_of(x, labels) * len(x), reduction="sum")
    assert [problem.kind for problem in sums.problems] == ["scaled"], sums
    with recording(optimizer, net) as record:
        for x, y in data:
            (loss_of(x, labels=y) / 4).backward()
        optimizer.step()
    report = record.report()
    assert [problem.kind for problem in report.problems] == ["mean_of_means"], report
    with recording(optimizer) as empty, pytest.raises(gradaccum.UsageError):
        empty.report()


def test_gradients_that_are_alike_are_not_told_apart() -> None:
    x, y = batches()[0]
    data = [(x, y), (x, y)]
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    report = check_loop(
        lambda: mean_of_means(net, optimizer, data),
        optimizer,
        lambda x, y: loss_fn(net(x), y),
        data,
    )
    assert report.uncertain
    assert not report.right


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer"):
        recording(model())
