"""The outputs of all micro-batches as one nest, and the way back: the gradient of each micro-batch's own rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import Leaf, Nest, concatenate_error, explain, leaves_of, with_leaves
from gradaccum_torch.large_batch.checks import touched_error


class Outputs:
    """Filled by the first pass, differentiated as a whole, handed out again in the second pass."""

    def __init__(self) -> None:
        self._nest: Nest = None
        self._paths: list[str] = []
        self._parts: list[list[Tensor]] = []
        """The tensors of each micro-batch, without graphs."""
        self._edges: list[list[int]] = []
        """For each leaf the row at which each micro-batch begins, and the number of rows."""
        self._leaves: list[Tensor] = []
        self._differ: list[Tensor] = []
        """Scalars, bool: a leaf came out differently in the second pass."""

    def add(self, outputs: Nest) -> None:
        """Take the outputs of the next micro-batch: tensors with a leading axis, in any nest.

        Raises:
            ArgumentTypeError, ArgumentValueError: a leaf is none, or the nest has another structure than before.
        """
        leaves = leaves_of(outputs, "outputs")
        if not self._parts:
            self._nest, self._paths = outputs, [leaf.path for leaf in leaves]
        self._require_paths(leaves)
        # Copies: the next micro-batch may write into the same memory, as the replay of a CUDA graph does.
        self._parts.append([_rows(leaf).detach().clone() for leaf in leaves])

    def whole(self) -> Nest:
        """The outputs of all items; those that can have a gradient require one, and what `add` kept is freed."""
        for path, parts in zip(self._paths, zip(*self._parts, strict=True), strict=True):
            lengths = [0, *map(len, parts)]
            self._edges.append([sum(lengths[: place + 1]) for place in range(len(lengths))])
            leaf = _concatenated(path, parts)
            self._leaves.append(leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex()))
        self._parts.clear()
        return with_leaves(self._nest, iter(self._leaves))

    def leaves(self) -> list[Tensor]:
        """The leaves of `whole`."""
        return self._leaves

    def require_untouched(self) -> None:
        """The user's loss function has not differentiated them itself.

        Raises:
            UsageError: it has.
        """
        if any(leaf.grad is not None for leaf in self._leaves):
            raise touched_error()

    def with_gradients(self, place: int, outputs: Nest) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of a micro-batch that have a graph and count in the loss, and their gradients.

        Args:
            place: the number of the micro-batch.
            outputs: what the second pass made of it.

        Raises:
            UsageError: they have another structure or other shapes than in the first pass.
        """
        leaves = leaves_of(outputs, "outputs")
        self._require_paths(leaves)
        tensors, gradients = [], []
        for leaf, whole, edges in zip(leaves, self._leaves, self._edges, strict=True):
            again, rows = _rows(leaf), slice(edges[place], edges[place + 1])
            first = whole.detach()[rows]
            if first.shape != again.shape:
                raise _other_outputs_error(leaf.path, f"shape {tuple(again.shape)} after {tuple(first.shape)}")
            self._differ.append(_differs(first, again.detach()))
            if again.requires_grad and whole.grad is not None:
                tensors.append(again)
                gradients.append(whole.grad[rows].to(again.dtype))
        return tensors, gradients

    def require_same(self) -> None:
        """Both passes gave the same, but for rounding; waits for the device.

        Raises:
            UsageError: they did not.
        """
        differ = torch.stack([each.to(self._differ[0].device) for each in self._differ]).tolist()
        if any(differ):
            raise _other_outputs_error(self._paths[differ.index(True) % len(self._paths)], "values that differ by more than rounding")

    def _require_paths(self, leaves: list[Leaf]) -> None:
        paths = [leaf.path for leaf in leaves]
        if paths != self._paths:
            fix = "Return the same structure for every micro-batch."
            raise explain(ArgumentTypeError, "outputs_fn", expected=f"the outputs {self._paths}", found=f"{paths}", fix=fix)


def _rows(leaf: Leaf) -> Tensor:
    if not isinstance(leaf.value, Tensor):
        fix = "Return tensors with one row per item."
        raise explain(ArgumentTypeError, leaf.path, expected="a tensor", found=f"a {type(leaf.value).__name__}", fix=fix)
    if leaf.value.dim() == 0:
        raise concatenate_error(leaf.path, "a scalar")
    return leaf.value


def _concatenated(path: str, parts: tuple[Tensor, ...]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        raise concatenate_error(path, f"shapes {sorted({tuple(part.shape) for part in parts})}")
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _differs(first: Tensor, again: Tensor) -> Any:
    """Scalar bool: more than half of the digits are lost; not where either is inf or NaN, which a loss scale may make."""
    if not (first.is_floating_point() or first.is_complex()):
        return (first != again).any()
    bound = math.sqrt(torch.finfo(first.dtype).eps)
    wide = torch.promote_types(first.dtype, torch.float32)
    first, again = first.to(wide), again.to(wide)
    return torch.linalg.vector_norm(again - first) > bound * torch.linalg.vector_norm(first)


def _other_outputs_error(path: str, found: str) -> UsageError:
    fix = (
        "Give randomness that both passes can draw: torch's, NumPy's or Python's global generators, or a torch.Generator that the function "
        "closes over; and keep what changes from call to call in buffers of modules that it closes over."
    )
    return explain(UsageError, "outputs_fn", expected=f"the same {path} in both passes", found=found, fix=fix)
