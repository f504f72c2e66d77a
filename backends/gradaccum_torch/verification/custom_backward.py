"""`verify_loss_scaling`: a check that a loss carries its incoming gradient through all
of its parts, so that it can be scaled.

It compares the gradients of s x loss with s x those of the loss, for s from 2^0 to
2^16, and finds each `torch.autograd.Function` that does not return s times as much.
With float16 in the graph it compares the largest scale with finite gradients with the
next three below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, LinearityReport
from gradaccum.kit import (
    ROUNDINGS,
    SCALES,
    comparable,
    explain,
    linearity_report,
    relative_error,
)
from gradaccum_torch.checks import require_loss
from gradaccum_torch.torch_private.names import Node, input_dtypes


def verify_loss_scaling(
    loss_fn: Callable[[], Tensor],
    parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
) -> LinearityReport:
    """Check that grad(s x loss) = s x grad(loss), and name the custom functions that
    are to blame.

    Parameters, ``.grad`` and the random state are as before. The loss is computed once,
    and moves a batch norm's buffers once.

    Args:
        loss_fn: computes the loss, a scalar tensor, shape ``()``.
        parameters: those to differentiate by, any shapes and floating-point dtypes:
            ``model.parameters()`` or ``model.named_parameters()``.

    Raises:
        ArgumentTypeError: `loss_fn` returns no tensor, or `parameters` holds something
            else.
    """
    named = _named(parameters)
    devices = sorted(
        {
            parameter.device.index or 0
            for parameter in named.values()
            if parameter.device.type == "cuda"
        }
    )
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        loss = require_loss(loss_fn())
    trainable = {
        name: parameter for name, parameter in named.items() if parameter.requires_grad
    }
    if not loss.requires_grad or not trainable:
        return linearity_report([], [], 0.0, _norm)
    culprits: list[str] = []
    with _Passes(loss, trainable) as passes:
        compared = comparable(
            map(passes.run, SCALES),
            _Pass.is_finite,
            float16=torch.float16 in passes.dtypes,
        )
        epsilon = max(torch.finfo(dtype).eps for dtype in passes.dtypes)
        return linearity_report(_unscaled(compared, culprits), culprits, epsilon, _norm)


class _Pass(NamedTuple):
    scale: float
    gradients: dict[str, Tensor]
    calls: dict[Any, tuple[Any, Any]]
    """What each custom function was handed and what it gave, by its node."""

    def is_finite(self) -> bool:
        return all(
            bool(torch.isfinite(gradient).all()) for gradient in self.gradients.values()
        )

    def unscaled(self) -> dict[str, Tensor]:
        return {
            name: _wide(gradient) / self.scale
            for name, gradient in self.gradients.items()
        }

    def culprits(self, other: _Pass) -> list[str]:
        factor = other.scale / self.scale
        return [
            type(node).__name__.removesuffix("Backward")
            for node in self.calls
            if node in other.calls and not self._scales(node, other, factor)
        ]

    def _scales(self, node: Any, other: _Pass, factor: float) -> bool:
        (received, given), (received_after, given_after) = (
            self.calls[node],
            other.calls[node],
        )
        # If what it was handed does not scale, something else is to blame.
        return not _all_scaled(received, received_after, factor) or _all_scaled(
            given, given_after, factor
        )


def _unscaled(
    passes: Iterator[_Pass], culprits: list[str]
) -> Iterator[dict[str, Tensor]]:
    reference = next(passes)
    yield reference.unscaled()
    for other in passes:
        culprits += reference.culprits(other)
        yield other.unscaled()


class _Passes:
    """The backward passes through one loss's graph, with hooks on its custom
    functions.
    """

    def __init__(self, loss: Tensor, parameters: Mapping[str, Tensor]) -> None:
        self._loss = loss
        self._parameters = parameters
        self._nodes = graph_of(loss)
        self._calls: dict[Any, tuple[Any, ...]] = {}
        self._hooks: list[Any] = []
        self.dtypes = set().union(*map(input_dtypes, self._nodes))
        """The dtypes of everything that is differentiated: parameters, and the copies
        that autocast made of them.
        """

    def __enter__(self) -> _Passes:
        self._hooks.extend(
            node.register_hook(self._note(node))
            for node in self._nodes
            if isinstance(node, torch.autograd.function.BackwardCFunction)
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def run(self, scale: float) -> _Pass:
        self._calls.clear()
        upstream = torch.full_like(self._loss, scale)
        tensors = list(self._parameters.values())
        found = torch.autograd.grad(
            self._loss, tensors, upstream, retain_graph=True, allow_unused=True
        )
        pairs = zip(self._parameters, found, strict=True)
        return _Pass(
            scale,
            {
                name: _dense(gradient)
                for name, gradient in pairs
                if gradient is not None
            },
            dict(self._calls),
        )

    def _note(self, node: Any) -> Callable[[Any, Any], None]:
        def hook(given: Any, received: Any) -> None:
            # Copies: the next pass may write into the same memory, as the replay of a
            # CUDA graph does.
            self._calls[node] = tuple(
                [None if each is None else each.clone() for each in tensors]
                for tensors in (received, given)
            )

        return hook


def _named(parameters: Any) -> dict[str, Tensor]:
    entries = list(
        parameters.items() if isinstance(parameters, Mapping) else parameters
    )
    pairs = [
        entry if isinstance(entry, tuple) and len(entry) == 2 else (str(index), entry)
        for index, entry in enumerate(entries)
    ]
    for _, value in pairs:
        if not isinstance(value, Tensor):
            fix = "Write verify_loss_scaling(loss_fn, model.named_parameters())."
            raise explain(
                ArgumentTypeError,
                "parameters",
                expected="torch tensors",
                got=value,
                fix=fix,
            )
    return dict(pairs)


def graph_of(loss: Tensor) -> list[Node]:
    waiting: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
    nodes = dict.fromkeys(waiting)
    for node in waiting:  # It grows meanwhile.
        new = dict.fromkeys(
            following
            for following, _ in node.next_functions
            if following is not None and following not in nodes
        )
        nodes |= new
        waiting += new
    return list(nodes)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _wide(gradient: Tensor) -> Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float64))


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient))


def _all_scaled(before: Iterable[Any], after: Iterable[Any], factor: float) -> bool:
    pairs = [
        (_dense(a), _dense(b))
        for a, b in zip(before, after, strict=True)
        if a is not None and b is not None
    ]
    return all(
        relative_error(_wide(b) / factor, _wide(a), _norm)
        <= ROUNDINGS * torch.finfo(a.dtype).eps
        for a, b in pairs
    )
