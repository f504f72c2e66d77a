"""The large batch in one call: what it leaves in `.grad`, and the loss it returns, against one backward pass of the large batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

from conformance_tests.framework_tests.torch_large_batch import ITEMS, X, Y, assert_close, cross_entropy, make_model, truth
from gradaccum_torch.large_batch import backward, coupled_backward


def test_gradients_there_before_are_added_to() -> None:
    """Once, at the end, and into the same tensor."""
    model = make_model()
    _, expected = truth(model, lambda: cross_entropy(model(X), Y))
    held = []
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
        held.append(p.grad)
    backward(lambda x, y: cross_entropy(model(x), y), X, Y, steps=3)
    assert all(p.grad is before for p, before in zip(model.parameters(), held, strict=True))
    assert_close(model, [q + 3 for q in expected])


class Sample(NamedTuple):
    x: Tensor
    extra: Any


@dataclasses.dataclass
class Labels:
    y: Tensor
    names: list[str]


def test_nests_and_axes() -> None:
    """Tuples, dicts, dataclasses, named tuples, lists of texts, arrays, flags, another batch axis, and what is given whole."""
    model = make_model()
    _, expected = truth(model, lambda: cross_entropy(model(X), Y))
    names = [str(number) for number in range(ITEMS)]
    seen: list[str] = []

    def loss_fn(sample: Sample, labels: dict[str, Labels], scale: Tensor, flag: bool, missing: None) -> Tensor:
        assert isinstance(sample, Sample)
        assert flag is True
        assert missing is None
        assert scale.shape == (7,)
        inside = labels["a"]
        seen.extend(inside.names)
        assert sample.extra["array"].shape == (2, len(inside.y))
        assert (sample.extra["array"][1] == np.array([int(name) for name in inside.names])).all()
        return cross_entropy(model(sample.x.T), inside.y)

    batch = Sample(X.T.contiguous(), {"array": np.stack([np.zeros(ITEMS), np.arange(ITEMS)])}), {"a": Labels(Y, names)}, torch.ones(7)
    axes = (Sample(1, -1), 0, None, 0, 0)
    backward(loss_fn, *batch, True, None, steps=4, axes=axes)
    assert seen == names
    assert_close(model, expected)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("coupled", [False, True])
def test_list_of_items(kind: type, coupled: bool) -> None:
    """Images of several sizes, one dict per image, and as many boxes in each image as there are images."""
    model, seen = make_model(), list[int]()
    images = kind(x[: 3 + place % 2] for place, x in enumerate(X))
    targets = kind({"boxes": torch.full((ITEMS, 4), place), "label": Y[place]} for place in range(ITEMS))

    def outputs_of(images: Any, targets: Any) -> Tensor:
        assert len(images) == len(targets) <= 4
        assert all(target["boxes"].shape == (ITEMS, 4) for target in targets)
        seen.extend(int(target["boxes"][0, 0]) for target in targets)
        padded = torch.stack([nn.functional.pad(image, (0, X.shape[1] - len(image))) for image in images])
        return cross_entropy(model(padded), torch.stack([target["label"] for target in targets]), reduction="none")

    whole = torch.stack([nn.functional.pad(image, (0, X.shape[1] - len(image))) for image in images])
    _, expected = truth(model, lambda: cross_entropy(model(whole), Y))
    if coupled:
        coupled_backward(outputs_of, torch.mean, images, targets, steps=3, axes="items")
    else:
        backward(lambda *batch: outputs_of(*batch).mean(), images, targets, steps=3, axes=("items", "items"))
    assert seen == [*range(ITEMS)] * (2 if coupled else 1)
    assert_close(model, expected)


def test_own_split_of_nested_tensors() -> None:
    model = make_model()
    _, expected = truth(model, lambda: cross_entropy(model(X), Y))

    def split(x: Tensor, y: Tensor) -> Any:
        return [(torch.nested.as_nested_tensor(list(x[part]), layout=torch.jagged), y[part]) for part in (slice(5), slice(5, None))]

    backward(lambda x, y: cross_entropy(model(torch.stack(x.unbind())), y), X, Y, split=split)
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
    """A closed-over tensor and the batch itself, like parameters. What only some micro-batches use counts, what none uses stays None."""
    model, x = make_model(), X.clone().requires_grad_()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    rare, unused = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Linear(2, 2)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x) * scale
        picked = (y == 2) & (x.detach()[:, 0] > 0)
        return cross_entropy(logits + rare, y) if picked.any() else cross_entropy(logits, y)

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
    """A hook sees the share of every micro-batch, in order, as in a loop by hand with the losses weighted."""
    models, seen = (make_model(), make_model()), ([], [])
    for model, list_ in zip(models, seen, strict=True):
        model[0].weight.register_hook(lambda g, list_=list_: list_.append(g.clone()))
        model[0].weight.register_post_accumulate_grad_hook(lambda p, list_=list_: list_.append(p.grad.clone()))
    backward(lambda x, y: cross_entropy(models[0](x), y), X, Y, micro_batch_size=4)
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        (cross_entropy(models[1](X[start:stop]), Y[start:stop]) * ((stop - start) / ITEMS)).backward()
    assert len(seen[0]) == 6
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_model(reentrant: bool) -> None:
    """The parameters behind a reentrant checkpoint are in no graph that could be walked."""
    model = make_model()
    _, expected = truth(model, lambda: cross_entropy(model(X), Y))
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=reentrant)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    backward(lambda x, y: cross_entropy(checkpoint(x.clone().requires_grad_()), y), X, Y, steps=3)
    assert_close(model, [q + 1 for q in expected])
