"""The weight of a micro-batch in torch: asked for, given without a backward pass of its
own, or replaced as the window is closed.
"""

from __future__ import annotations

import pytest
import torch

import gradaccum

from .torch_model import MAKERS, large_batch_step, loss_of, make


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
    assert opt.result.micro_step == 1
    assert opt.state_dict()["gradaccum"]["weight"] == 2.0


CUTS = [slice(0, 3), slice(3, 4), slice(4, 8)]


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


@pytest.mark.parametrize("kind", ["in .grad", "separate", "written"])
def test_weigh_beside_a_plain_mean_is_refused(kind: str) -> None:
    """A plain backward pass does not multiply the loss by its weight, as the mean over
    items needs; nor does a loop that writes the gradients.
    """
    model, opt = make(separate_sums=kind != "in .grad")
    loss_of(model).backward()
    if kind == "written":
        gradient = model[0].weight.grad
        opt.zero_grad()
        model[0].weight.grad = gradient
    opt.weigh(3)
    with pytest.raises(gradaccum.UsageError, match='reduction="sum_per_item"'):
        opt.step()


def test_weight_of_a_scaled_loss_is_fixed() -> None:
    """Until `discard`, which forgets the weight before it."""
    model, opt = make()
    opt.weigh(3)
    opt.discard()
    opt.scale(loss_of(model))
    for call in (lambda: opt.weigh(3), opt.flush):
        with pytest.raises(gradaccum.UsageError, match=r"weight: expected 1|flush"):
            call()
