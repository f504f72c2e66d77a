"""The large batch in one call: what it leaves in `.grad`, and the loss it returns,
against one backward pass of the large batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_large_batch import (
    ITEMS,
    X,
    Y,
    assert_close,
    cross_entropy,
    make_model,
    truth,
)
from gradaccum_torch.large_batch import backward, coupled_backward


class Sample(NamedTuple):
    x: Tensor
    extra: Any


@dataclasses.dataclass
class Labels:
    y: Tensor
    names: list[str]


def test_nests_and_axes() -> None:
    """Tuples, dicts, dataclasses, named tuples, lists of texts, arrays, flags, another
    batch axis, and what is given whole.
    """
    model = make_model()
    _, expected = truth(model, lambda: cross_entropy(model(X), Y))
    names = [str(number) for number in range(ITEMS)]
    seen: list[str] = []

    def loss_fn(
        sample: Sample,
        labels: dict[str, Labels],
        scale: Tensor,
        flag: bool,
        missing: None,
    ) -> Tensor:
        assert isinstance(sample, Sample)
        assert flag is True
        assert missing is None
        assert scale.shape == (7,)
        inside = labels["a"]
        seen.extend(inside.names)
        assert sample.extra["array"].shape == (2, len(inside.y))
        assert (
            sample.extra["array"][1] == np.array([int(name) for name in inside.names])
        ).all()
        return cross_entropy(model(sample.x.T), inside.y)

    batch = (
        Sample(
            X.T.contiguous(), {"array": np.stack([np.zeros(ITEMS), np.arange(ITEMS)])}
        ),
        {"a": Labels(Y, names)},
        torch.ones(7),
    )
    axes = (Sample(1, -1), 0, None, 0, 0)
    backward(loss_fn, *batch, True, None, steps=4, axes=axes)
    assert seen == names
    assert_close(model, expected)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("coupled", [False, True])
def test_list_of_items(kind: type, coupled: bool) -> None:
    """Images of several sizes, one dict per image, and as many boxes in each image as
    there are images.
    """
    model, seen = make_model(), list[int]()
    images = kind(x[: 3 + place % 2] for place, x in enumerate(X))
    targets = kind(
        {"boxes": torch.full((ITEMS, 4), place), "label": Y[place]}
        for place in range(ITEMS)
    )

    def outputs_of(images: Any, targets: Any) -> Tensor:
        assert len(images) == len(targets) <= 4
        assert all(target["boxes"].shape == (ITEMS, 4) for target in targets)
        seen.extend(int(target["boxes"][0, 0]) for target in targets)
        padded = torch.stack(
            [nn.functional.pad(image, (0, X.shape[1] - len(image))) for image in images]
        )
        return cross_entropy(
            model(padded),
            torch.stack([target["label"] for target in targets]),
            reduction="none",
        )

    whole = torch.stack(
        [nn.functional.pad(image, (0, X.shape[1] - len(image))) for image in images]
    )
    _, expected = truth(model, lambda: cross_entropy(model(whole), Y))
    if coupled:
        coupled_backward(outputs_of, torch.mean, images, targets, steps=3, axes="items")
    else:
        backward(
            lambda *batch: outputs_of(*batch).mean(),
            images,
            targets,
            steps=3,
            axes=("items", "items"),
        )
    assert seen == [*range(ITEMS)] * (2 if coupled else 1)
    assert_close(model, expected)


def test_user_batch_stays() -> None:
    """Micro-batches are views, so nothing is copied."""
    model, batch = make_model(), {"x": X.clone(), "y": Y}
    before, starts = batch["x"].clone(), []

    def loss_fn(piece: dict[str, Tensor]) -> Tensor:
        starts.append(piece["x"].data_ptr() - batch["x"].data_ptr())
        return cross_entropy(model(piece["x"]), piece["y"])

    backward(loss_fn, batch, steps=5)
    assert starts == [place * 2 * 6 * 8 for place in range(5)]
    assert torch.equal(batch["x"], before)
    assert list(batch) == ["x", "y"]


def test_every_leaf_gets_its_gradient() -> None:
    """A closed-over tensor and the batch itself, like parameters. What only some
    micro-batches use counts, what none uses stays None.
    """
    model, x = make_model(), X.clone().requires_grad_()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    rare, unused = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Linear(2, 2)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x) * scale
        picked = (y == 2) & (x.detach()[:, 0] > 0)
        return (
            cross_entropy(logits + rare, y)
            if picked.any()
            else cross_entropy(logits, y)
        )

    parts = [(x[i : i + 2], Y[i : i + 2]) for i in range(0, ITEMS, 2)]
    inputs = [*model.parameters(), scale, rare, x]
    used = [((y == 2) & (part.detach()[:, 0] > 0)).any() for part, y in parts]
    assert any(used)
    assert not all(used)
    expected = torch.autograd.grad(sum(loss_fn(*part) for part in parts) / 5, inputs)
    backward(loss_fn, x, Y, steps=5)
    for leaf, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-13, atol=1e-15)
    assert unused.weight.grad is None


def test_hooks_see_each_share() -> None:
    """A hook sees the share of every micro-batch, in order, as in a loop by hand with
    the losses weighted.
    """
    models, seen = (make_model(), make_model()), ([], [])
    for model, list_ in zip(models, seen, strict=True):
        model[0].weight.register_hook(lambda g, list_=list_: list_.append(g.clone()))
        model[0].weight.register_post_accumulate_grad_hook(
            lambda p, list_=list_: list_.append(p.grad.clone())
        )
    backward(lambda x, y: cross_entropy(models[0](x), y), X, Y, micro_batch_size=4)
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        (
            cross_entropy(models[1](X[start:stop]), Y[start:stop])
            * ((stop - start) / ITEMS)
        ).backward()
    assert len(seen[0]) == 6
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_model(reentrant: bool) -> None:
    """The parameters behind a reentrant checkpoint are in no graph that could be
    walked.
    """
    model = make_model()
    _, expected = truth(model, lambda: cross_entropy(model(X), Y))
    checkpoint = functools.partial(
        torch.utils.checkpoint.checkpoint, model, use_reentrant=reentrant
    )
    held = [torch.ones_like(p) for p in model.parameters()]
    for p, before in zip(model.parameters(), held, strict=True):
        p.grad = before
    backward(
        lambda x, y: cross_entropy(checkpoint(x.clone().requires_grad_()), y),
        X,
        Y,
        steps=3,
    )
    assert all(
        p.grad is before for p, before in zip(model.parameters(), held, strict=True)
    ), "added to once, at the end"
    assert_close(model, [q + 1 for q in expected])


SEVEN = 7


ROWS = torch.arange(14, dtype=torch.float64).reshape(SEVEN, 2) ** 1.5


TOKENS = torch.tensor([2, 0, 1, 3, 1, 1, 4])


WEIGHT = nn.Parameter(torch.ones(2, dtype=torch.float64))


def loss_of(x: Tensor) -> Tensor:
    return (x * WEIGHT).sum(1).mean()


@pytest.mark.parametrize("division", [{"steps": 3}, {"micro_batch_weight": 4}], ids=str)
def test_nests_and_plain_numbers_merge(division: dict[str, Any]) -> None:
    """A tuple and a list of extremes, and the Python numbers of a logger, whose mean is
    weighted as the loss is; no output keeps its graph.
    """
    means: list[tuple[int, float]] = []

    def loss_fn(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        means.append((len(x), float(x.mean())))
        numbers = {
            "count": len(x),
            "loss": float(x.mean()),
            "large": bool(x.max() > 40),
        }
        return loss_of(x), {
            "extremes": (-x.amax(0) * WEIGHT, [x.amin(0)]),
            "rows": x * WEIGHT,
            "numbers": numbers,
        }

    kinds = {
        "extremes": ("min", ["min"]),
        "rows": "concatenate",
        "numbers": {"count": "sum", "loss": "mean", "large": "sum"},
    }
    loss, aux = backward(loss_fn, ROWS, aux=kinds, weight=TOKENS, **division)
    assert not any(
        each.requires_grad for each in (loss, aux["rows"], aux["extremes"][0])
    )
    assert torch.equal(aux["extremes"][0], -ROWS[-1])
    assert torch.equal(aux["extremes"][1][0], ROWS[0])
    assert torch.equal(aux["rows"], ROWS)
    assert int(aux["numbers"]["count"]) == SEVEN
    expected = 0.0
    start = 0
    for items, mean in means:
        tokens = TOKENS[start : start + items].double().sum()
        expected += mean * float(tokens / TOKENS.double().sum())
        start += items
    assert float(aux["numbers"]["loss"]) == pytest.approx(expected, rel=1e-12)


def test_half_precision_and_booleans_are_widened() -> None:
    """A sum of 4096 ones is 256 in bfloat16. Booleans are counted."""
    rows = torch.ones(4096, 1, dtype=torch.bfloat16)

    def loss_fn(rows: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return (rows * WEIGHT[:1]).mean(), (rows.sum(), (rows > 0).all())

    _, (total, hits) = backward(loss_fn, rows, aux="sum", micro_batch_size=8)
    assert float(total) == 4096
    assert total.dtype == torch.float32
    assert int(hits) == 512


BAD: dict[str, tuple[Any, Any, str]] = {
    "other_structure": (
        {"a": "sum"},
        lambda x: (loss_of(x), {"b": x.sum()}),
        "aux: expected a prefix",
    ),
    "three_returned": (
        "sum",
        lambda x: (loss_of(x), 1, 2),
        "loss_fn: .* got a tuple of 3",
    ),
    "ragged_rows": (
        "concatenate",
        lambda x: (loss_of(x), x[:, : len(x) - 2]),
        "aux: .* to concatenate",
    ),
    "text": (
        "sum",
        lambda x: (loss_of(x), {"a": "text"}),
        "aux\\['a'\\]: expected a tensor or a number",
    ),
    "ragged_sum": ("sum", lambda x: (loss_of(x), x[:, 0]), "aux: expected the shape"),
    "varying": (
        "sum",
        lambda x: (loss_of(x), {str(len(x)): 1}),
        "aux: expected the leaves",
    ),
}


@pytest.mark.parametrize(("declared", "loss_fn", "words"), BAD.values(), ids=BAD)
def test_bad_aux_is_refused(declared: Any, loss_fn: Any, words: str) -> None:
    """By name, and `.grad` is what it was, even where the outputs fail to merge at the
    very end.
    """
    held = WEIGHT.grad = torch.ones(2, dtype=torch.float64)
    state = torch.get_rng_state()
    with pytest.raises(gradaccum.GradAccumError, match=words):
        backward(
            lambda x: (torch.rand(1), loss_fn(x))[1],
            ROWS,
            aux=declared,
            micro_batch_size=4,
        )
    assert WEIGHT.grad is held
    assert bool((held == 1).all())
    assert torch.equal(torch.get_rng_state(), state)


def test_small_half_gradients_do_not_underflow() -> None:
    """Divided by the number of items before the sum, each float16 gradient would be
    0.
    """
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    x = torch.full((4096, 1), 1e-5, dtype=torch.float16)
    backward(lambda x: (x * weight).mean(), x, micro_batch_size=1)
    assert weight.grad is not None
    assert float(weight.grad) == float(x[0])


@pytest.mark.parametrize(
    ("own", "of_loss"), [(torch.float16, torch.float32), (torch.float32, torch.float16)]
)
def test_small_shares_do_not_underflow(own: torch.dtype, of_loss: torch.dtype) -> None:
    """Where the parameter alone or the loss alone is in half precision, a share of 1 /
    2^32 would be 0 there.
    """
    weight = nn.Parameter(torch.ones(1, dtype=own))
    x = torch.full((4, 1), 2.0**14)
    tokens = torch.full((4,), 2.0**30)
    backward(
        lambda x: (x.to(of_loss) * weight.to(of_loss)).sum(),
        x,
        steps=4,
        reduction="sum_per_item",
        weight=tokens,
    )
    assert weight.grad is not None
    assert float(weight.grad) == 2.0**-16


@pytest.mark.parametrize("before", [None, "sparse", "dense"])
def test_sparse_gradients(before: str | None) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
    rows = torch.tensor([1, 1, 2, 5, 6, 1, 0, 2])
    (expected,) = torch.autograd.grad(
        table(rows).square().sum(1).mean(), [table.weight]
    )
    total = expected.to_dense()
    if before:
        ones = torch.ones(7, 3, dtype=torch.float64)
        table.weight.grad = ones.to_sparse(1) if before == "sparse" else ones
        total = total + 1
    backward(lambda rows: table(rows).square().sum(1).mean(), rows, steps=3)
    assert table.weight.grad is not None
    torch.testing.assert_close(
        table.weight.grad.to_dense(), total, rtol=1e-14, atol=1e-14
    )


def test_autocast() -> None:
    """The same as the loop by hand under autocast, to the bit where weights are powers
    of two.
    """
    models = make_model(torch.float32), make_model(torch.float32)
    x = X.float()[:8]

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(model(x), y)

    backward(functools.partial(loss_fn, models[0]), x, Y[:8], steps=4)
    for start in range(0, 8, 2):
        (loss_fn(models[1], x[start : start + 2], Y[start : start + 2]) / 4).backward()
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(*(m.parameters() for m in models), strict=True)
    )
    model = make_model(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(functools.partial(loss_fn, model), x, Y[:8], steps=4)
    for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-4)
