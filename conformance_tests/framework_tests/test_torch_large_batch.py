"""The large batch in one call: what it leaves in `.grad`, and the loss it returns,
against one backward pass of the large batch.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import gradaccum
from gradaccum_torch import backward, coupled_backward

from .torch_large_batch import (
    ITEMS,
    X,
    Y,
    assert_close,
    cross_entropy,
    gradients,
    make_model,
    truth,
)

by_coupling = pytest.mark.parametrize("coupled", [False, True])


@by_coupling
def test_nests_and_axes(coupled: bool) -> None:
    """Arrays of NumPy, another batch axis, texts and flags, and what is passed whole;
    the user's own tensors, in views.
    """
    model = make_model()
    _, expected = truth(model, lambda: cross_entropy(model(X), Y))
    columns = X.T.contiguous()
    sample = {"x": columns, "rows": np.stack([np.zeros(ITEMS), np.arange(ITEMS)])}
    seen = []

    def losses_of(part, y, scale, flag, text):
        assert (scale.shape, flag, text) == ((7,), True, "text")
        assert part["x"].untyped_storage()._cdata == columns.untyped_storage()._cdata
        seen.extend(part["rows"][1].astype(int))
        return cross_entropy(model(part["x"].T), y, reduction="none")

    batch = sample, Y, torch.ones(7), True, "text"
    options = {"steps": 4, "axes": ({"x": 1, "rows": -1}, 0, None, 0, 0)}
    if coupled:
        coupled_backward(losses_of, torch.mean, *batch, **options)
    else:
        backward(lambda *parts: losses_of(*parts).mean(), *batch, **options)
    assert seen == [*range(ITEMS)] * (2 if coupled else 1)
    assert_close(model, expected)


def test_every_leaf_gets_its_gradient() -> None:
    """A closed-over tensor and the batch itself, like parameters. What only some
    micro-batches use counts, what none uses stays None.
    """
    model = make_model()
    x = X.clone().requires_grad_()
    scale = torch.tensor(1.5, dtype=X.dtype, requires_grad=True)
    rare = nn.Parameter(torch.ones(3, dtype=X.dtype))
    unused = nn.Linear(2, 2)

    def loss_fn(x, y):
        bias = rare if y[0] == 2 else 0
        return cross_entropy(model(x) * scale + bias, y)

    inputs = [*model.parameters(), scale, rare, x]
    losses = [loss_fn(*part) for part in zip(x.split(2), Y.split(2), strict=True)]
    expected = torch.autograd.grad(sum(losses) / 5, inputs)
    backward(loss_fn, x, Y, steps=5)
    found = [leaf.grad for leaf in inputs]
    torch.testing.assert_close(found, [*expected], rtol=1e-13, atol=1e-15)
    assert unused.weight.grad is None


@pytest.mark.parametrize("scale", ["none", "static", "scaler"])
@by_coupling
def test_leaves_beside_the_optimizer(scale: str, coupled: bool) -> None:
    """A critic that the generator's loss goes through gets the large batch's gradient,
    freed of scale and weights, beside what it held.
    """
    generator = make_model()
    critic = nn.Linear(3, 1).double()
    held = critic.weight.grad = torch.ones_like(critic.weight)
    large = copy.deepcopy(nn.Sequential(generator, critic))
    large[1].weight.grad = torch.ones_like(held)
    scales = {"static": 1024.0, "scaler": torch.amp.GradScaler("cpu", init_scale=64.0)}
    inner = SGD(generator.parameters(), lr=1.0)
    opt = gradaccum.wrap(inner, steps=None, loss_scale=scales.get(scale))
    loss_of = Tensor.std if coupled else lambda outputs: outputs.square().mean()

    def outputs_of(x):
        return critic(generator(x))

    if coupled:
        coupled_backward(outputs_of, loss_of, X, steps=3, optimizer=opt)
    else:
        backward(lambda x: loss_of(outputs_of(x)), X, steps=3, optimizer=opt)
    loss_of(large(X)).backward()
    SGD(large[0].parameters(), lr=1.0).step()
    assert critic.weight.grad is held
    torch.testing.assert_close(
        [*gradients(critic), *generator.parameters()],
        [*gradients(large[1]), *large[0].parameters()],
        rtol=1e-11,
        atol=1e-14,
    )


def test_reentrant_checkpoint() -> None:
    """Its parameters are in no graph that could be walked: a wrapped optimizer knows
    them.
    """
    model = make_model()
    other = make_model()
    _, expected = truth(model, lambda: cross_entropy(model(X), Y))

    def loss_fn(x, y):
        x = x.clone().requires_grad_()
        return cross_entropy(checkpoint(model, x, use_reentrant=True), y)

    with pytest.raises(gradaccum.UsageError, match="use_reentrant=False"):
        backward(loss_fn, X, Y, steps=3)
    assert all(gradient is None for gradient in gradients(model))
    opt = gradaccum.wrap(SGD(model.parameters(), lr=1.0), steps=None)
    backward(loss_fn, X, Y, steps=3, optimizer=opt)
    moved = [p - q for p, q in zip(other.parameters(), model.parameters(), strict=True)]
    torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-15)


def test_aux_keeps_no_graph() -> None:
    weight = nn.Parameter(torch.ones(1))
    loss, auxes = backward(
        lambda x: ((x * weight).mean(), {"n": len(x), "rows": [x * weight]}),
        torch.arange(6.0)[:, None],
        micro_batch_size=4,
        has_aux=True,
    )
    assert [aux["n"] for aux in auxes] == [4, 2]
    assert not loss.requires_grad
    assert not auxes[0]["rows"][0].requires_grad


HALF = torch.float16
WHOLE = torch.float32


@pytest.mark.parametrize(("own", "of_loss"), [(HALF, WHOLE), (WHOLE, HALF)])
def test_small_shares_do_not_underflow(own: torch.dtype, of_loss: torch.dtype) -> None:
    """Where the parameter alone or the loss alone is in half precision, a share of 1 /
    2^32 would be 0 there.
    """
    weight = nn.Parameter(torch.ones(1, dtype=own))
    backward(
        lambda x: (x.to(of_loss) * weight.to(of_loss)).sum(),
        torch.full((4, 1), 2.0**14),
        steps=4,
        reduction="sum_per_item",
        weight=torch.full((4,), 2.0**30),
    )
    assert weight.grad is not None
    assert float(weight.grad) == 2.0**-16


@pytest.mark.parametrize("before", [None, "sparse", "dense"])
def test_sparse_gradients(before: str | None) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
    rows = torch.tensor([1, 1, 2, 5, 6, 1, 0, 2])

    def loss_fn(rows):
        return table(rows).square().sum(1).mean()

    _, (expected,) = truth(table, lambda: loss_fn(rows))
    ones = torch.ones(7, 3, dtype=torch.float64)
    if before:
        table.weight.grad = ones.to_sparse(1) if before == "sparse" else ones.clone()
    backward(loss_fn, rows, steps=3)
    assert table.weight.grad is not None
    total = expected.to_dense() + (1 if before else 0)
    torch.testing.assert_close(
        table.weight.grad.to_dense(), total, rtol=1e-14, atol=1e-14
    )


@by_coupling
def test_outer_autocast(coupled: bool) -> None:
    """The weights that one pass over a micro-batch has cast are not those of the next
    pass.
    """
    model = make_model(torch.float32)
    other = make_model(torch.float32)
    x = X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if coupled:
            coupled_backward(model, torch.std, x, steps=5)
            _, expected = truth(other, lambda: other(x).std())
        else:
            backward(lambda x: model(x).square().mean(), x, steps=5)
            _, expected = truth(other, lambda: other(x).square().mean())
    assert_close(model, expected, bound=0.1)
