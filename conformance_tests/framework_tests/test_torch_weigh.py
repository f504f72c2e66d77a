"""The weight of a micro-batch in torch: asked for, given without a backward pass of its
own, or replaced as the window is closed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_model import (
    MAKERS,
    PLACES,
    X,
    Y,
    by_place,
    large_batch_step,
    loss_of,
    make,
    make_model,
)


def test_sum_per_item_asks_for_a_weight_of_every_loop() -> None:
    model, opt = make(reduction="sum_per_item")
    for call in (
        lambda: opt.backward(loss_of(model)),
        lambda: opt.scale(loss_of(model)),
    ):
        with pytest.raises(
            gradaccum.ArgumentTypeError, match="weight: expected the number of items"
        ):
            call()
    loss_of(model).backward()
    with pytest.raises(
        gradaccum.ArgumentTypeError, match="weight: expected the number of items"
    ):
        opt.step()
    opt.weigh(2)
    opt.step()
    assert (opt.result.micro_step, opt.state_dict()["gradaccum"]["weight"]) == (1, 2.0)


def summed(model: nn.Module, rows: slice) -> Tensor:
    return nn.functional.cross_entropy(model(X[rows]), Y[rows], reduction="sum")


CUTS = [slice(0, 3), slice(3, 4), slice(4, 8)]


@by_place
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("loop", ["plain", "scale", "scaler"])
def test_one_backward_pass_feeds_two_optimizers(
    place: str, before: bool, loop: str
) -> None:
    """Each divides by the items that it was given, and clips by itself."""
    models = [make_model(), make_model()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scale = {
        "plain": {},
        "scale": {"loss_scale": 8.0},
        "scaler": {"loss_scale": scaler},
    }[loop]
    options = {"steps": 3, "reduction": "sum_per_item", **PLACES[place], **scale}
    limits = None, 0.01
    opts = [
        gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), clip_norm=c, **options)
        for m, c in zip(models, limits, strict=True)
    ]
    for rows in CUTS:
        counts = rows.stop - rows.start, 10 * (rows.stop - rows.start)
        loss = sum(summed(model, rows) for model in models)
        for opt, n in zip(opts, counts, strict=True):
            if before or loop != "plain":
                opt.weigh(n)
        if loop == "scale":
            for opt in opts:
                opt.scale(loss)
            loss = 8.0 * loss
        (scaler.scale(loss) if loop == "scaler" else loss).backward()
        for opt, n in zip(opts, counts, strict=True):
            if not before and loop == "plain":
                opt.weigh(n)
            scaler.step(opt) if loop == "scaler" else opt.step()
        if loop == "scaler":
            scaler.update()
    for model, opt, factor in zip(models, opts, (1.0, 0.1), strict=True):
        reference = make_model()
        (loss_of(reference) * factor).backward()
        norm = nn.utils.clip_grad_norm_(
            reference.parameters(), 0.01 if factor != 1 else 1e9
        )
        torch.optim.SGD(reference.parameters(), lr=0.5).step()
        assert opt.result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


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


def test_update_that_raised_keeps_the_weight_beside_a_denominator() -> None:
    """The next flush divides by what the window holds, unless it is given a denominator
    of its own.
    """
    model, opt = make(steps=None, reduction="sum_per_item")
    opt.backward(summed(model, slice(0, 8)), weight=8)
    opt.step()
    handle = opt.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opt.flush(denominator=2)
    handle.remove()
    assert opt.state_dict()["gradaccum"]["weight"] == 8
    opt.flush()
    torch.testing.assert_close(
        list(model.parameters()), large_batch_step(MAKERS["sgd"])
    )
