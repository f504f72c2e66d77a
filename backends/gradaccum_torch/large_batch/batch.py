"""Types for the options of a call with a large batch, and helpers for the tensors that
the user's functions receive and return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from gradaccum import kit

Weight: TypeAlias = Callable[..., Any] | Sequence[float] | Tensor | None
"""How micro-batches are weighted: by a function that takes a micro-batch and returns
its weight, by a sequence with one number per item, or by their numbers of items (None).
"""
MergeAux: TypeAlias = Callable[[list[Any], list[float]], Any] | str | None
"""How the `aux` values of the micro-batches are combined: by a function of the list of
these values and the list of weights, by ``"concatenate"``, or not at all (None).
"""


def tensors_of(nest: kit.Nest) -> list[Tensor]:
    values = [leaf.value for leaf in kit.leaves_of(nest)]
    return [value for value in values if isinstance(value, Tensor)]


def require_scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise kit.scalar_loss_error(f"an object of type {type(loss).__name__}")
    if loss.dim():
        raise kit.scalar_loss_error(f"a tensor of shape {tuple(loss.shape)}")
    return loss


def map_tensors(change: Callable[[Tensor], object], nest: kit.Nest) -> Any:
    """Return a copy of `nest` in which ``change(tensor)`` replaces each tensor."""
    return kit.mapped(
        lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, nest
    )


def copy_without_graph(tensor: Tensor) -> Tensor:
    """Return a detached copy. The copy is needed because a model that was captured as a
    CUDA graph writes its output to the same memory in each micro-batch.
    """
    return tensor.detach().clone()
