"""Stage 2: the distance of every call to the large batch, in float64."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
import gradaccum_torch
from benchmarks.gpu.problem import (
    FLOAT64_BOUND,
    STEPS,
    MicroBatch,
    cut,
    distance,
    gradient_distance,
    have_equal_bits,
    inner_optimizer,
    joined,
    make_items,
    make_model,
    mean_loss,
    train,
    train_large,
)
from benchmarks.gpu.problem import backward as run_backward
from benchmarks.gpu.records import Check, Measured, Setting

SIZES = (8, 5, 1, 7, 3, 3, 9, 2)
"""The items of two windows' micro-batches."""
CLIP_NORM = 1e-3
"""It clips every window."""


def ragged(setting: Setting) -> list[MicroBatch]:
    return cut(make_items(setting, sum(SIZES)), SIZES)


def windows_of(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return each window as one large batch."""
    starts = range(0, len(micro_batches), STEPS)
    return [joined(micro_batches[start : start + STEPS]) for start in starts]


def wrap(model: nn.Module, **options: Any) -> Any:
    return gradaccum.wrap(inner_optimizer(model), STEPS, **options)


def within(found: float, bare: float | None = None, note: str = "") -> Measured:
    """Return a distance with its bound; `bare`: the distance of the usual loop."""
    bare_text = "" if bare is None else f"{bare:.1e}"
    text = f"{found:.1e}{note}"
    return Measured(found <= FLOAT64_BOUND, text, f"{FLOAT64_BOUND:.0e}", bare_text)


def bare_distance(setting: Setting, expected: nn.Module) -> float:
    """Return the distance of the usual loop, which divides the loss by the number of
    micro-batches.
    """
    model = make_model(setting)
    optimizer = inner_optimizer(model)
    for index, (x, y) in enumerate(ragged(setting)):
        run_backward(mean_loss(model, x, y) / STEPS)
        if (index + 1) % STEPS == 0:
            optimizer.step()
            optimizer.zero_grad()
    return distance(model, expected, make_model(setting))


def ragged_windows(setting: Setting) -> Measured:
    model = make_model(setting)
    train(model, wrap(model), ragged(setting))
    expected = make_model(setting)
    train_large(expected, windows_of(ragged(setting)))
    bare = bare_distance(setting, expected)
    return within(distance(model, expected, make_model(setting)), bare)


def clipped(setting: Setting) -> Measured:
    model = make_model(setting)
    opt = wrap(model, clip_norm=CLIP_NORM)
    train(model, opt, ragged(setting))
    expected = make_model(setting)
    train_large(expected, windows_of(ragged(setting)), CLIP_NORM)
    assert opt.result.grad_norm > CLIP_NORM
    return within(distance(model, expected, make_model(setting)))


def flushed(setting: Setting) -> Measured:
    """Close the second window after two of its micro-batches."""
    micro_batches = ragged(setting)[: STEPS + 2]
    model = make_model(setting)
    opt = wrap(model)
    train(model, opt, micro_batches)
    opt.flush()
    expected = make_model(setting)
    train_large(expected, windows_of(micro_batches))
    return within(distance(model, expected, make_model(setting)))


def skipped(setting: Setting) -> Measured:
    """Let an inf skip the second of three windows: the large batches are the others."""
    micro_batches = ragged(setting)
    bad = list(micro_batches[:STEPS])
    x, y = bad[1]
    bad[1] = (x * float("inf"), y)
    model = make_model(setting)
    opt = wrap(model)
    train(model, opt, micro_batches[:STEPS])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, opt, bad)
    was_skipped = opt.result.skipped and opt.result.overflow
    stayed = all(map(torch.equal, model.parameters(), before))
    train(model, opt, micro_batches[STEPS:])
    expected = make_model(setting)
    train_large(expected, windows_of(micro_batches))
    measured = within(distance(model, expected, make_model(setting)))
    if was_skipped and stayed:
        return measured
    return measured._replace(passed=False, measured="the window was not skipped")


def dropped(setting: Setting) -> Measured:
    """Drop a micro-batch of NaN: the large batch is its window without it."""
    micro_batches = ragged(setting)
    bad = list(micro_batches)
    x, y = bad[2]
    bad[2] = (x * float("nan"), y)
    model = make_model(setting)
    train(model, wrap(model, on_overflow="drop_micro_batch"), bad)
    first = joined([*micro_batches[:2], micro_batches[3]])
    expected = make_model(setting)
    train_large(expected, [first, joined(micro_batches[STEPS:])])
    return within(distance(model, expected, make_model(setting)))


def resumed(setting: Setting) -> Measured:
    """Save in mid-window, load into a new model and optimizer, and go on."""
    micro_batches = ragged(setting)
    middle = STEPS + 2
    model = make_model(setting)
    opt = wrap(model)
    train(model, opt, micro_batches[:middle])
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    train(model, opt, micro_batches[middle:])
    file.seek(0)
    model_state, opt_state = torch.load(file, weights_only=True)
    other = make_model(setting)
    other.load_state_dict(model_state)
    other_opt = wrap(other)
    other_opt.load_state_dict(opt_state)
    train(other, other_opt, micro_batches[middle:])
    expected = make_model(setting)
    train_large(expected, windows_of(micro_batches))
    found = distance(other, expected, make_model(setting))
    if have_equal_bits(model, other):
        return within(found, note=", the bits of the run without a stop")
    return within(found)._replace(passed=False, measured=f"{found:.1e}, other bits")


def backward(setting: Setting) -> Measured:
    x, y = make_items(setting, 29)
    model = make_model(setting)
    gradaccum_torch.backward(lambda x, y: mean_loss(model, x, y), x, y, steps=4)
    expected = make_model(setting)
    run_backward(mean_loss(expected, x, y))
    return within(gradient_distance(model, expected))


def contrastive_loss(outputs: Tensor) -> Tensor:
    """Compare each output with all others, shape ``(items, width)``."""
    similarities = outputs @ outputs.T
    targets = torch.arange(len(outputs), device=outputs.device).roll(1)
    return nn.functional.cross_entropy(similarities, targets)


def coupled_backward(setting: Setting) -> Measured:
    x, _ = make_items(setting, 29)
    model = make_model(setting)
    gradaccum_torch.coupled_backward(model, contrastive_loss, x, steps=4)
    expected = make_model(setting)
    run_backward(contrastive_loss(expected(x)))
    bare = make_model(setting)
    for part in x.chunk(4):
        run_backward(contrastive_loss(bare(part)) / 4)
    usual = gradient_distance(bare, expected)
    return within(gradient_distance(model, expected), usual)


def layered_backward(setting: Setting) -> Measured:
    x, y = make_items(setting, 29)
    loss_fn = nn.functional.mse_loss
    model = make_model(setting)
    optimizer = gradaccum.wrap(inner_optimizer(model), None, on_overflow="ignore")
    for _ in range(2):
        gradaccum_torch.layered_backward(
            model, loss_fn, x, y, steps=4, optimizer=optimizer
        )
    expected = make_model(setting)
    train_large(expected, [(x, y)] * 2)
    return within(distance(model, expected, make_model(setting)))


CHECKS = (
    Check("wrap, ragged micro-batches with weights", ragged_windows),
    Check("wrap, clip_norm", clipped),
    Check("wrap, flush of a short window", flushed),
    Check("wrap, a skipped window", skipped),
    Check("wrap, a dropped micro-batch", dropped),
    Check("wrap, resumed in mid-window", resumed),
    Check("gradaccum_torch.backward", backward),
    Check("gradaccum_torch.coupled_backward", coupled_backward),
    Check("gradaccum_torch.layered_backward", layered_backward),
)
