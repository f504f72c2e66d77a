"""A whole training step under `torch.compile`, backward pass and ``opt.step()``
included, trains as it does in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum

from .torch_model import clip, make, same

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning"
)


def training(
    place: str, clips: bool = False
) -> tuple[nn.Module, Any, Callable[[Tensor], None]]:
    torch._dynamo.reset()
    model, opt = make(place, steps=2)

    def train(x: Tensor) -> None:
        model(x).float().square().mean().backward()
        if clips:
            clip(model)
        opt.step()
        opt.zero_grad()

    return model, opt, train


@pytest.mark.parametrize(
    "place", [pytest.param("half precision", marks=pytest.mark.slow), "separate"]
)
@pytest.mark.parametrize("what", ["the step", "the backward pass"])
def test_compiled_training_equals_eager(place: str, what: str) -> None:
    """The batches change in size, so Dynamo makes their shapes symbolic. It compiles no
    hook.
    """
    (model, opt, train), (reference, other, plain) = training(place), training(place)
    dtype = model[0].weight.dtype  # type: ignore[index]
    batches = [torch.ones(2 + index, 3, dtype=dtype) for index in range(4)]
    step = train
    context: Any = nullcontext()
    if what == "the step":
        step = torch.compile(train, backend="eager")
    else:
        compiler = torch.compile(backend="eager")
        context = torch._dynamo.compiled_autograd._enable(compiler)
    with context:
        for batch in batches:
            step(batch)
    for batch in batches:
        plain(batch)
    assert opt.result.optimizer_step == other.result.optimizer_step == 2
    assert same(model, reference)
    compiled = torch._dynamo.utils.get_compilation_metrics()
    assert not any("gradient_watch" in str(each.co_filename) for each in compiled)


def test_clip_in_compiled_step_is_refused() -> None:
    *_, train = training("in .grad", clips=True)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        torch.compile(train, backend="eager")(torch.ones(2, 3))
