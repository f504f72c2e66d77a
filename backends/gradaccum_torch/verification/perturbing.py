"""Move numbers by one rounding, up or down."""

from __future__ import annotations

import torch
from torch import Tensor


def perturbed(tensor: Tensor, epsilon: float, number: int, *, integers: bool = False) -> Tensor:
    """A copy with each number multiplied by 1 + epsilon or 1 - epsilon, as the perturbation of that `number` has it.

    Args:
        tensor: any dtype; one without fractions is given back as it is.
        epsilon: distance from 1 to the next number of the coarsest dtype in the program.
        number: which perturbation; the user's random state is not drawn from.
        integers: whether a value that is an integer moves too. In a parameter it is a number like any other; in an input it may be a mask
            or a label.
    """
    if not tensor.is_floating_point():
        return tensor
    own = torch.Generator().manual_seed(1000003 * number + tensor.numel())
    signs = (torch.randint(0, 2, tensor.shape, generator=own) * 2 - 1).to(tensor.device)
    moved = (tensor.double() * (1 + epsilon * signs)).to(tensor.dtype)
    return moved if integers else torch.where(tensor == tensor.round(), tensor, moved)
