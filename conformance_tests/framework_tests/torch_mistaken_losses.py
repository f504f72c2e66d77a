"""Small models, each with one published mistake in what the loss does with the items,
and what `verify` has to say about it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance_tests.framework_tests.torch_cases import (
    ITEMS,
    TOKENS,
    WIDTH,
    Case,
    classes,
    inputs,
    mask,
    net,
)


def ignored_labels() -> Case:
    """`ignore_index` in the labels of a causal model: the loss reads them shifted by
    one.
    """

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    labels = torch.where(mask() == 1, classes()[:, None], -100)
    # The count of all labels is another one.
    labels[:, 0] = torch.tensor([0, -100, 1, 2, -100, 0, 1, -100])
    return Case(net(), loss, (inputs(TOKENS, WIDTH), labels))


class Towers(nn.Module):
    """Two towers with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def features(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(
            self.text(text), dim=-1
        )

    def contrast(self, image: Tensor, text: Tensor) -> Tensor:
        logits = self.logit_scale.exp() * image @ text.T
        places = torch.arange(len(image))
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def open_clip_temperature() -> Case:
    """OpenCLIP's accumulation: features of the whole batch are cached, each micro-batch
    writes its own into them with gradients.
    """
    model = Towers()
    image, text = inputs(WIDTH), inputs(WIDTH).flip(0)
    with torch.no_grad():
        cached = model.features(image, text)

    def loss(
        model: Towers,
        image: Tensor,
        text: Tensor,
        places: Tensor,
        cached_image: Tensor,
        cached_text: Tensor,
    ) -> Tensor:
        own_image, own_text = model.features(image, text)
        return model.contrast(
            cached_image.index_copy(0, places, own_image),
            cached_text.index_copy(0, places, own_text),
        )

    options = {"axes": (0, 0, 0, None, None), "reduction": "sum"}
    return Case(model, loss, (image, text, torch.arange(ITEMS), *cached), options)


def info_nce() -> Case:
    """Negatives come from the micro-batch."""
    return Case(
        Towers(),
        lambda model, a, b: model.contrast(*model.features(a, b)),
        (inputs(WIDTH), inputs(WIDTH).flip(0)),
    )


def grpo_token_denominator() -> Case:
    """GRPO with one denominator for all tokens (DAPO): the mean over the tokens of the
    micro-batch, here as floats in a dict.
    """

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        chosen = F.log_softmax(model(batch["states"]), -1)[..., 0]
        weighed = chosen * batch["advantages"][:, None] * batch["completion_mask"]
        return -weighed.sum() / batch["completion_mask"].sum()

    batch = {
        "states": inputs(TOKENS, WIDTH),
        "advantages": inputs(),
        "completion_mask": mask().float(),
    }
    return Case(net(), loss, (batch,))


def class_weights() -> Case:
    """`cross_entropy(weight=)` divides by the sum of the weights of the classes that
    came.
    """
    weights = torch.tensor([1.0, 2.0, 5.0])
    return Case(
        net(),
        lambda model, x, y: F.cross_entropy(model(x), y, weight=weights),
        (inputs(WIDTH), classes()),
    )


def two_heads() -> Case:
    """A mean over tokens, one over sequences, and parameters that each have one of
    them: each has a right weight, and not the same.
    """

    def loss(model: nn.ModuleDict, x: Tensor, kept: Tensor) -> Tensor:
        return (model["tokens"](x)[..., 0].square() * kept).sum() / kept.sum() + model[
            "sequence"
        ](x[:, 0]).square().mean()

    return Case(
        nn.ModuleDict({"tokens": net(), "sequence": net()}),
        loss,
        (inputs(TOKENS, WIDTH), mask()),
    )


def positives_and_negatives() -> Case:
    """A balanced loss: a mean over the positives of the batch, and one over the
    negatives.
    """

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores, positive = model(x)[:, 0], y.float()
        hit = (F.softplus(-scores) * positive).sum() / positive.sum().clamp(min=1)
        return hit + (F.softplus(scores) * (1 - positive)).sum() / (
            1 - positive
        ).sum().clamp(min=1)

    return Case(net(), loss, (inputs(WIDTH), torch.tensor([0, 1, 0, 1, 1, 0, 0, 0])))


def tokens_and_coupling() -> Case:
    """A mean over tokens with its weight, beside a small coupling: two counts fit it a
    little better than one.
    """

    def loss(model: nn.Module, x: Tensor, kept: Tensor) -> Tensor:
        out = model(x)
        return (
            out[..., 0].square() * kept
        ).sum() / kept.sum() + 1e-3 * out.mean().square()

    return Case(
        net(),
        loss,
        (inputs(TOKENS, WIDTH), mask()),
        {"weight": lambda x, kept: kept.sum()},
    )


def numpy_noise() -> Case:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            model(x + torch.from_numpy(np.random.randn(*x.shape)).float()), y
        )

    return Case(net(), loss, (inputs(WIDTH), classes()))


def python_noise() -> Case:
    """A number for each item, drawn one by one."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (
            model(x).square().mean(1)
            * torch.tensor([random.gauss(1.0, 0.5) for _ in x])
        ).mean()

    return Case(net(), loss, (inputs(WIDTH),))


class Noisy(nn.Module):
    """Noise in training, which evaluation mode switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + torch.from_numpy(np.random.randn(*x.shape)).float()
        return self.inner(x)


def noisy_module_and_counts() -> Case:
    """NumPy's numbers are not noticed as the module's, so that nothing is compared."""
    labels = torch.tensor([0, -100, 2, -100, 1, 2, 1, 0])
    return Case(
        Noisy(),
        lambda model, x, y: F.cross_entropy(model(x), y),
        (inputs(WIDTH), labels),
    )


def dropout_and_counts() -> Case:
    """With the dropout in evaluation mode the other mistake is found."""
    labels = torch.tensor([0, -100, 2, -100, 1, 2, 1, 0])
    return Case(
        net(nn.Dropout(0.5)),
        lambda model, x, y: F.cross_entropy(model(x), y),
        (inputs(WIDTH), labels),
    )


def generator_made_in_the_loss() -> Case:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        noise = np.random.default_rng(0).standard_normal(x.shape)
        return F.cross_entropy(model(x + torch.from_numpy(noise).float()), y)

    return Case(net(), loss, (inputs(WIDTH), classes()))


MISTAKEN_LOSSES: dict[Callable[[], Case], tuple[tuple[str, ...], str]] = {
    ignored_labels: (("weights",), "(batch[1][:, 1:] != -100).sum()"),
    open_clip_temperature: (("weights",), "logit_scale"),
    info_nce: (("coupled",), "the loss"),
    grpo_token_denominator: (
        ("weights",),
        "(batch[0]['completion_mask'] != 0).sum()",
    ),
    class_weights: (("weights",), "the denominator of the loss"),
    two_heads: (("coupled",), "the loss"),
    positives_and_negatives: (("coupled",), "the loss"),
    tokens_and_coupling: (("coupled",), "the loss"),
    numpy_noise: (("not_repeatable",), "the loss"),
    python_noise: (("not_repeatable",), "the loss"),
    noisy_module_and_counts: (("not_repeatable",), "the loss"),
    dropout_and_counts: (("weights",), "(batch[1] != -100).sum()"),
    generator_made_in_the_loss: (("not_repeatable",), "the loss"),
}
"""By case: the kinds of its causes, in order, and the place of the first one."""
