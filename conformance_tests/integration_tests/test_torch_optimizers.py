"""Every optimizer of `torch.optim`, in each of its implementations: as on the large batches."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import SUMS, Loop, X, Y, accumulated, assert_equals_large_batches, furthest, large

FOUND = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
OTHER = {"LBFGS": "evaluates the model again and again", "SparseAdam": "takes sparse gradients only"}
"""They have tests of their own, below."""
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
    """A fused kernel divides in float32 by a float32; the windows' divisors, 4 and 2, are such numbers."""
    given = {variant: True} if variant else {}
    loop = Loop(bias=name != "Muon")
    assert_equals_large_batches(lambda model: FOUND[name](model.parameters(), lr=0.01, **given), loop)


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_lbfgs_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"optimizer: .*LBFGS"):
        gradaccum.wrap(torch.optim.LBFGS(Loop().model().parameters()), steps=1, **options)


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_sparse_adam(options: dict[str, Any]) -> None:
    """Rows of an embedding that a window does not touch stay as they are, with their moments."""
    tables = [nn.Embedding(6, 3, sparse=True, dtype=torch.float64) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    mine, bare = tables
    opt = gradaccum.wrap(torch.optim.SparseAdam(mine.parameters(), lr=0.1), steps=2, **options)
    reference = torch.optim.SparseAdam(bare.parameters(), lr=0.1)
    for first, second in (([0, 1, 1], [1, 2, 0]), ([3, 3, 4], [4, 0, 0])):
        for rows in (first, second):
            opt.zero_grad()
            mine(torch.tensor(rows)).square().sum().div(3).backward()
            opt.step()
        reference.zero_grad()
        bare(torch.tensor(first + second)).square().sum().div(6).backward()
        reference.step()
    torch.testing.assert_close(mine.weight, bare.weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_average_of_weights_once_per_update(options: dict[str, Any]) -> None:
    """``opt.result.applied`` says that the parameters moved: SWA and EMA go by it."""
    loop = Loop()

    def averaged(wrapped: bool) -> nn.Module:
        model = loop.model()
        bare = torch.optim.SGD(model.parameters(), lr=0.1)
        opt: Any = gradaccum.wrap(bare, steps=4, **options) if wrapped else bare
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
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


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_short_last_batch_of_a_loader_by_its_weight(options: dict[str, Any]) -> None:
    """Seven rows in batches of two: the last one has a row, and its mean counts for one row."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[:7], Y[:7]), batch_size=2)
    model, bare, unweighted = (Loop().model() for _ in range(3))
    for net, weighs in ((model, True), (unweighted, False)):
        opt = gradaccum.wrap(torch.optim.SGD(net.parameters(), lr=0.1), steps=4, **options)
        for x, y in loader:
            opt.zero_grad()
            opt.backward((net(x) - y).square().mean(), weight=len(x) if weighs else None)
            opt.step()
        assert opt.result.applied
    (bare(X[:7]) - Y[:7]).square().mean().backward()
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    assert furthest(model, bare) < 1e-12
    assert furthest(unweighted, bare) > 1e-3


def test_runs_differ_without_division() -> None:
    """The comparison is one that can fail: a window that is summed and not averaged is another run."""
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)  # noqa: E731
    assert furthest(accumulated(make, reduction="sum"), large(make)) > 1e-3
