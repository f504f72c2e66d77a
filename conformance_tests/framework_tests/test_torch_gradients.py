"""Gradients of every kind: half precision, sparse, complex, huge, not finite."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import PLACES, by_float_place
from gradaccum_torch.arithmetic import measure

SPARSE = {"sgd": torch.optim.SGD, "sparse_adam": torch.optim.SparseAdam}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", SPARSE)
@by_float_place
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_sparse_gradients_equal_the_large_batch(
    name: str, place: str, clip_norm: float | None
) -> None:
    """The second loss of a micro-batch brings rows that the first one had not."""
    model = nn.Embedding(5, 2, sparse=True)
    reference = copy.deepcopy(model)
    opt = gradaccum.wrap(
        SPARSE[name](model.parameters(), lr=0.1),
        steps=2,
        clip_norm=clip_norm,
        **PLACES[place],
    )
    bare = SPARSE[name](reference.parameters(), lr=0.1)
    for words in ([1, 1, 2], [2, 3, 1]):
        for factor, part in ((1.0, words), (2.0, words[1:])):
            (model(torch.tensor(part)) * factor).sum().backward()
            (reference(torch.tensor(part)) * factor / 2).sum().backward()
        opt.step()
        opt.zero_grad()
    gradient = reference.weight.grad.coalesce()
    norm = float(gradient.values().norm())
    reference.weight.grad = gradient * (1.0 if clip_norm is None else clip_norm / norm)
    bare.step()
    assert opt.result.grad_norm == pytest.approx(norm)
    torch.testing.assert_close(model.weight.detach(), reference.weight.detach())


def test_complex_parameters_are_trained() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    opt = gradaccum.wrap(torch.optim.SGD([parameter], lr=1.0), steps=2)
    for _ in range(2):
        (parameter * (3 + 4j)).real.sum().backward()
        opt.step()
    assert opt.result.grad_norm == pytest.approx(math.sqrt(50))
    assert parameter.tolist() == [-3 + 4j] * 2


# The arithmetic alone.


LARGE = torch.full((4,), torch.finfo(torch.float32).max / 4)
TINY = 2.0**-100


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        ([], 0.0),
        ([LARGE, torch.zeros(3), torch.zeros(0)], 2 * float(LARGE[0])),
        ([LARGE, torch.tensor([math.nan])], math.inf),
        ([torch.tensor([0.0, 3.0, 0.0, 4.0]).to_sparse() * TINY], 5 * TINY),
        ([torch.tensor([3 + 4j], dtype=torch.complex64) * TINY], 5 * TINY),
    ],
    ids=["none", "huge", "nan", "sparse", "complex"],
)
def test_norm(gradients: list[torch.Tensor], norm: float) -> None:
    """The squares of huge gradients overflow, and those of tiny ones vanish."""
    assert measure(gradients) == (pytest.approx(norm, rel=1e-6, abs=0), norm < math.inf)
