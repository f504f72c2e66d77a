"""The weight of a micro-batch in torch: asked for, given without a backward pass of its
own, or replaced as the window is closed.
"""

from __future__ import annotations

import pytest
import torch

import gradaccum
from conformance_tests.framework_tests.torch_model import (
    MAKERS,
    large_batch_step,
    loss_of,
    make,
)


def test_sum_per_item_asks_for_a_weight_of_every_loop() -> None:
    model, opt = make(reduction="sum_per_item")
    for call in (
        lambda: opt.backward(loss_of(model)),
        lambda: opt.scale(loss_of(model)),
        lambda: (loss_of(model).backward(), opt.step()),
    ):
        with pytest.raises(
            gradaccum.ArgumentTypeError, match="weight: expected the number of items"
        ):
            call()
    opt.weigh(2)
    opt.step()
    assert (opt.result.micro_step, opt.state_dict()["gradaccum"]["weight"]) == (1, 2.0)


CUTS = [slice(0, 3), slice(3, 4), slice(4, 8)]


@pytest.mark.parametrize("before", [False, True])
def test_one_backward_pass_feeds_two_optimizers(before: bool) -> None:
    """Each divides by the items that it was given."""
    runs = [(*make(steps=3, reduction="sum_per_item"), items) for items in (1, 10)]
    for rows in CUTS:
        loss = sum(loss_of(model, rows, "sum") for model, *_ in runs)
        if not before:
            loss.backward()
        for _, opt, items in runs:
            opt.weigh(items * (rows.stop - rows.start))
        if before:
            loss.backward()
        for _, opt, _ in runs:
            opt.step()
    for model, _, items in runs:
        expected = large_batch_step(lambda ps: torch.optim.SGD(ps, lr=0.5 / items))  # noqa: B023
        torch.testing.assert_close(list(model.parameters()), expected)


def test_weigh_is_the_weight_of_a_loss_too() -> None:
    """It survives `zero_grad`, which comes before the backward pass, and multiplies the
    loss of ``opt.backward``.
    """
    model, opt = make(steps=3)
    for rows in CUTS:
        opt.weigh(rows.stop - rows.start)
        opt.zero_grad()
        opt.backward(loss_of(model, rows))
        opt.step()
    torch.testing.assert_close(
        list(model.parameters()), large_batch_step(MAKERS["sgd"])
    )


def test_weigh_beside_a_plain_mean_is_refused() -> None:
    """A plain backward pass does not multiply the loss by its weight, as the mean over
    items needs.
    """
    model, opt = make()
    loss_of(model).backward()
    opt.weigh(3)
    with pytest.raises(gradaccum.UsageError, match='reduction="sum_per_item"'):
        opt.step()
