"""A whole training step under `torch.compile`, backward pass and ``opt.step()``
included, trains as it does in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import make_model

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning"
)


def make(
    dtype: torch.dtype, options: dict
) -> tuple[nn.Module, Any, Callable[[torch.Tensor], torch.Tensor]]:
    model = make_model().to(dtype)
    opt: Any = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5), steps=2, **options
    )

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return model, opt, train


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.deep), torch.bfloat16]
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.deep),
        {"clip_norm": 0.01},
        {"separate_sums": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("what", ["the step", "the backward pass"])
def test_compiled_training_equals_eager(
    dtype: torch.dtype, options: dict, what: str
) -> None:
    """The batches change in size, so Dynamo makes their shapes symbolic."""
    torch._dynamo.reset()
    model, opt, train = make(dtype, options)
    reference, other, plain = make(dtype, options)
    batches = [torch.ones(2 + index, 3, dtype=dtype) for index in range(6)]
    if what == "the step":
        compiled = torch.compile(train, backend="eager")
        for batch in batches:
            compiled(batch)
    else:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            for batch in batches:
                train(batch)
    for batch in batches:
        plain(batch)
    assert opt.result.optimizer_step == other.result.optimizer_step == 3
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_clip_in_compiled_step_is_refused() -> None:
    torch._dynamo.reset()
    model, opt, _ = make(torch.float32, {})

    def train(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()

    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        torch.compile(train, backend="eager")(torch.ones(2, 3))
