"""The float32 master weights of half-precision parameters: the inner optimizer works on
them, and the model holds the rounded copies.

A MindSpore optimizer clones its moments from the model's Parameters when it is built.
So `turn_to_masters` changes it in place: it replaces each half-precision Parameter by
its master wherever the optimizer and its cells keep it, and makes their own
half-precision state float32 under its old name, at its rounded value.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any, TypeAlias

import mindspore as ms
from mindspore import Parameter, ParameterTuple, nn, ops
from mindspore.experimental import optim
from mindspore.ops import constexpr

from gradaccum_mindspore.gradient_sum import HALF, cast, each, write

Optimizer: TypeAlias = nn.Optimizer | optim.Optimizer


Replacements = Mapping[int, Parameter]
"""A master by the `id` of its Parameter."""


class Masters(nn.Cell):  # type: ignore[misc]
    """The masters of some parameters, and the way back into the model."""

    def __init__(self, parameters: Sequence[Parameter], suffix: str) -> None:
        super().__init__(auto_prefix=False)
        self.suffix = suffix
        halves = [parameter for parameter in parameters if parameter.dtype in HALF]
        self.halves = ParameterTuple(halves)
        self.masters = ParameterTuple(
            [_master(parameter, suffix) for parameter in halves]
        )

        # A Cell would make a tuple of it.
        object.__setattr__(self, "memory", [None] * len(halves))
        """Where each half-precision Parameter lay at the last look."""
        self.follow_while_compiling = constexpr(self.follow_model, reuse_result=False)

    def construct(self) -> tuple[bool, ...]:
        return each(_round, self.halves, self.masters)

    def follow_model(self) -> bool:
        """Copy the model's weights where others were loaded into it: MindSpore 2.10
        puts them elsewhere in memory, MindSpore 2.7 does not. Weights that were taken
        out and put back are the masters', rounded.
        """
        pairs = zip(self.halves, self.masters, strict=True)
        for place, (half, master) in enumerate(pairs):
            memory = half.data_ptr()
            if self.memory[place] != memory:
                self.memory[place] = memory
                weights = half.astype(ms.float32)
                rounded = master.astype(half.dtype).astype(ms.float32)
                if bool((weights != rounded).any()):
                    ops.assign(master, weights)
        return True


def turn_to_masters(inner: Optimizer, masters: Masters) -> None:
    replacements = {
        id(half): master
        for half, master in zip(masters.halves, masters.masters, strict=True)
    }
    for _, cell in list(nn.Cell.cells_and_names(inner)):
        for attribute, value in list(vars(cell).items()):
            if _holds(value, replacements):
                object.__setattr__(cell, attribute, _replaced(value, replacements))
    for parameter in inner.get_parameters():
        if replacements and parameter.dtype in HALF:
            parameter.set_dtype(ms.float32)


def _round(half: Parameter, master: Parameter) -> bool:
    write(half, cast(master, half.dtype))
    return True


def _master(parameter: Parameter, suffix: str) -> Parameter:
    return Parameter(
        parameter.astype(ms.float32), name=parameter.name + suffix, requires_grad=False
    )


def _holds(value: object, replacements: Replacements) -> bool:
    if isinstance(value, MutableMapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return id(value) in replacements
    return any(_holds(part, replacements) for part in value)


def _replaced(value: Any, replacements: Replacements) -> Any:
    """Copy a container with masters for parameters; one without parameters stays the
    same object.
    """
    if not _holds(value, replacements):
        return value
    if isinstance(value, MutableMapping):
        changed = copy(value)
        changed.clear()
        changed.update(
            (_key(key, part, replacements), _replaced(part, replacements))
            for key, part in value.items()
        )
        return changed
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced(part, replacements) for part in value])
    return replacements[id(value)]


def _key(key: object, part: Any, replacements: Replacements) -> object:
    """Return the key of `part` in a Cell's dict: a Parameter of a tuple has its name
    there, any other the attribute's.
    """
    return (
        replacements[id(part)].name
        if id(part) in replacements and key == part.name
        else key
    )
