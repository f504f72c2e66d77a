"""The suite's losses that couple the items of a batch, in torch functions;
`gradaccum_conformance.couplings` defines them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradaccum_conformance import Coupling

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of all left outputs, all right ones and the temperature."""


def contrast(left: Tensor, right: Tensor, temperature: Tensor) -> Tensor:
    scores = temperature.exp() * left @ right.T
    return functional.cross_entropy(scores, torch.arange(len(left)))


def covariance(left: Tensor, right: Tensor, temperature: Tensor) -> Tensor:
    centred = left - left.mean(0)
    c = centred.T @ centred / (len(left) - 1)
    off = c - torch.diag(torch.diag(c))
    return temperature.exp() * off.square().sum() / left.shape[1]


def balance(left: Tensor, right: Tensor, temperature: Tensor) -> Tensor:
    experts = left.shape[1]
    fraction = functional.one_hot(left.argmax(1), experts).to(left.dtype).mean(0)
    return temperature.exp() * experts * (fraction * left.softmax(1).mean(0)).sum()


COUPLINGS: dict[Coupling, Loss] = {
    "contrast": contrast,
    "covariance": covariance,
    "balance": balance,
}
