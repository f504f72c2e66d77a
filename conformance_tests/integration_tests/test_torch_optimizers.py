"""Every optimizer of `torch.optim`, in each of its implementations: as on the large
batches.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import (
    SUMS,
    Loop,
    accumulated,
    assert_equals_large_batches,
    furthest,
    large,
)

FOUND = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
OTHER = {
    "LBFGS": "evaluates the model again and again",
    "SparseAdam": "takes sparse gradients only",
}
"""They have tests of their own among the framework's."""
VARIANTS = ("foreach", "fused")
RUN = [
    (name, variant)
    for name in sorted(FOUND.keys() - OTHER.keys())
    for variant in (None, *VARIANTS)
    if variant is None or variant in inspect.signature(FOUND[name]).parameters
]


def test_list_is_torchs() -> None:
    assert FOUND.keys() >= OTHER.keys()
    assert len(RUN) > 25


@pytest.mark.parametrize(("name", "variant"), RUN)
def test_equals_large_batches(name: str, variant: str | None) -> None:
    """A fused kernel divides in float32 by a float32; the windows' divisors, 4 and 2,
    are such numbers.
    """
    given = {variant: True} if variant else {}
    loop = Loop(bias=name != "Muon")
    assert_equals_large_batches(
        lambda model: FOUND[name](model.parameters(), lr=0.01, **given), loop
    )


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_average_of_weights_once_per_update(options: dict[str, Any]) -> None:
    """``opt.result.applied`` says that the parameters moved: SWA and EMA go by it."""
    loop = Loop()

    def averaged(wrapped: bool) -> nn.Module:
        model = loop.model()
        bare = torch.optim.SGD(model.parameters(), lr=0.1)
        opt: Any = gradaccum.wrap(bare, steps=4, **options) if wrapped else bare
        ema = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        size = 2 if wrapped else 8
        for _ in range(2):
            for start in range(0, 16, size):
                opt.zero_grad()
                loop.loss(model, start, size).backward()
                opt.step()
                if not wrapped or opt.result.applied:
                    ema.update_parameters(model)
        assert int(ema.n_averaged) == 4
        return ema.module

    assert furthest(averaged(True), averaged(False)) < 1e-12


def test_runs_differ_without_division() -> None:
    """The comparison is one that can fail: a window that is summed and not averaged is
    another run.
    """
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)  # noqa: E731
    assert furthest(accumulated(make, reduction="sum"), large(make)) > 1e-3
