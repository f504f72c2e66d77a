"""Layers that mix the items of a batch, found by running each layer alone: with all
items, and with half of them.

The innermost layers are named whose outputs of a half differ by more than rounding from
those rows of all outputs. A layer without an item axis (a loss), or that fails alone,
is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.kit import ROUNDING_LIMIT, Layer, leaves_of, with_leaves
from gradaccum_torch.verification.batch import (
    Axis,
    NoAxis,
    axis_between,
    perturbed,
    rows,
)
from gradaccum_torch.verification.draws import Drawing, Recording

PERTURBATIONS = 4
Isolated = Callable[[], Any]
"""A context in which a layer can be run: the user's state, put back at its end."""


@dataclass
class Call:
    """One call of a layer: its arguments in the large batch, and where their items
    stand.
    """

    arguments: Any
    axes: list[Axis | None] = field(default_factory=list)
    complete: bool = False
    """The call was seen in the part of the batch too."""


class Calls:
    """The first call of each layer of `modules`, in the large batch and then in a part
    of it.
    """

    def __init__(self, modules: dict[str, nn.Module], items: int, fewer: int) -> None:
        self._modules = modules
        self._items = items
        self._fewer = fewer
        self.of: dict[str, Call] = {}

    @contextmanager
    def watching(self, *, part: bool) -> Iterator[None]:
        seen: set[str] = set()
        handles = [
            module.register_forward_pre_hook(
                self._hook(name, seen, part), with_kwargs=True, prepend=True
            )
            for name, module in self._modules.items()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, seen: set[str], part: bool) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if name in seen:
                return
            seen.add(name)
            if not part:
                self.of[name] = Call(_copied((args, dict(kwargs))))
            elif name in self.of:
                self._complete(self.of[name], (args, kwargs))

        return note

    def _complete(self, call: Call, arguments: Any) -> None:
        wholes = _tensors(call.arguments)
        parts = _tensors(arguments)
        try:
            call.axes = [
                axis_between(a.shape, b.shape, self._items, self._fewer)
                for a, b in zip(wholes, parts, strict=True)
            ]
        except (NoAxis, ValueError):
            return
        call.complete = any(axis is not None for axis in call.axes)


def mixing_layers(
    modules: dict[str, nn.Module],
    calls: Calls,
    items: int,
    fewer: int,
    epsilon: float,
    isolated: Isolated,
) -> list[Layer]:
    found: list[Layer] = []
    for name in sorted(calls.of, key=lambda path: -path.count(".") - bool(path)):
        inside = [
            layer for layer in found if name == "" or layer.name.startswith(f"{name}.")
        ]
        call = calls.of[name]
        module = modules[name]
        if (
            not inside
            and call.complete
            and _mixes(module, call, items, fewer, epsilon, isolated)
        ):
            in_evaluation = _mixes(
                module, call, items, fewer, epsilon, isolated, evaluation=True
            )
            found.append(Layer(name, type(module).__name__, in_evaluation))
    order = list(modules)
    return sorted(found, key=lambda layer: order.index(layer.name))


def _mixes(
    module: nn.Module,
    call: Call,
    items: int,
    fewer: int,
    epsilon: float,
    isolated: Isolated,
    *,
    evaluation: bool = False,
) -> bool:
    def outputs(chosen: Sequence[int], perturbation: int | None = None) -> list[Tensor]:
        with isolated():
            if evaluation:
                module.eval()
            args, kwargs = _chosen(call, chosen, epsilon, perturbation)
            return [
                tensor.detach()
                for tensor in _tensors(module.forward(*args, **kwargs))
                if tensor.is_floating_point()
            ]

    every = range(items)
    halves = (range(fewer), range(0, items, 2))
    try:
        with Drawing() as drawn_whole:
            whole = outputs(every)
        with Drawing() as drawn_part:
            outputs(halves[0])
        recording = Recording(drawn_whole.draws, drawn_part.draws, items, fewer)
        parts = []
        moved = []
        for half in halves:
            with recording.replayed(half):
                parts.append((half, outputs(half)))
        for number in range(PERTURBATIONS):
            with recording.replayed(every):
                moved.append(outputs(every, number))
    except Exception:  # A layer that cannot be run alone tells nothing.
        return False
    outputs_moved = list(zip(*moved, strict=True))
    return any(
        _apart(*numbers, items, half, epsilon)
        for half, part in parts
        for numbers in zip(whole, part, outputs_moved, strict=False)
    )


def _apart(
    whole: Tensor,
    part: Tensor,
    moved: Sequence[Tensor],
    items: int,
    half: Sequence[int],
    epsilon: float,
) -> bool:
    try:
        axis = axis_between(whole.shape, part.shape, items, len(half))
    except NoAxis:
        return False
    if axis is None:
        return False
    expected = rows(whole, axis, half).double()
    unit = max(
        float((rows(other, axis, half).double() - expected).norm()) for other in moved
    )
    room = ROUNDING_LIMIT * (unit + epsilon * float(expected.norm()))
    return not float((part.double() - expected).norm()) <= room


def _chosen(
    call: Call, items: Sequence[int], epsilon: float, perturbation: int | None
) -> Any:
    chosen = [
        rows(tensor, axis, items)
        for tensor, axis in zip(_tensors(call.arguments), call.axes, strict=True)
    ]
    if perturbation is not None:
        chosen = [perturbed(tensor, epsilon, perturbation) for tensor in chosen]
    return _with_tensors(call.arguments, chosen)


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf.value for leaf in leaves_of(nest) if isinstance(leaf.value, Tensor)]


def _with_tensors(nest: Any, tensors: Sequence[Tensor]) -> Any:
    following = iter(tensors)
    return with_leaves(
        nest,
        iter(
            [
                next(following) if isinstance(leaf.value, Tensor) else leaf.value
                for leaf in leaves_of(nest)
            ]
        ),
    )


def _copied(nest: Any) -> Any:
    return _with_tensors(nest, [tensor.detach().clone() for tensor in _tensors(nest)])
