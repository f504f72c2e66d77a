"""The float32 master weights of half-precision parameters. The inner optimizer updates
the master weights, and the model contains their rounded copies.

The constructor of a MindSpore optimizer creates the optimizer's moments as clones of
the model's Parameters. So `put_masters_into` changes the optimizer in place: it
replaces each half-precision Parameter with its master weight, wherever the optimizer
and its cells refer to the Parameter. The optimizer's own half-precision state is
converted to float32. The Parameters of this state keep their names and their current
values, which are still rounded to half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any, TypeAlias

import mindspore as ms
from mindspore import Parameter, ParameterTuple, nn, ops
from mindspore.experimental import optim
from mindspore.ops import constexpr

from gradaccum_mindspore.gradient_sum import (
    HALF,
    cast,
    hidden_parameter,
    map_over,
    write,
)

Optimizer: TypeAlias = nn.Optimizer | optim.Optimizer
Replacements = Mapping[int, Parameter]
"""Maps the `id` of a half-precision Parameter to its float32 master weight."""


class MasterWeights(nn.Cell):  # type: ignore[misc]
    """The float32 master weights of the half-precision parameters among `parameters`.
    Calling this object writes the rounded master weights into the model.
    """

    def __init__(self, parameters: Sequence[Parameter], suffix: str) -> None:
        super().__init__(auto_prefix=False)
        halves = [parameter for parameter in parameters if parameter.dtype in HALF]
        self.halves = ParameterTuple(halves)
        self.masters = ParameterTuple(
            [
                hidden_parameter(half.astype(ms.float32), half.name + suffix)
                for half in halves
            ]
        )
        # With a plain assignment, the Cell would turn the list into a tuple.
        object.__setattr__(self, "pointers", [None] * len(halves))
        """The memory address of each half-precision Parameter at the last check for
        loaded weights.
        """
        self.copy_while_compiling = constexpr(
            self.copy_model_into_masters, reuse_result=False
        )

    def construct(self) -> tuple[bool, ...]:
        """Write the rounded master weights into the model."""
        return map_over(_round, self.halves, self.masters)

    def copy_model_into_masters(self) -> bool:
        """Copy the model's weights into the master weights if weights were loaded into
        the model.

        Weights count as loaded if their memory address has changed. MindSpore 2.10
        stores loaded weights at a new address, but MindSpore 2.7 does not. If the
        loaded weights equal the rounded master weights, the master weights are not
        changed.
        """
        for place, half in enumerate(self.halves):
            pointer = half.data_ptr()
            if self.pointers[place] == pointer:
                continue
            self.pointers[place] = pointer
            master = self.masters[place]
            weights = half.astype(ms.float32)
            rounded = master.astype(half.dtype).astype(ms.float32)
            if bool((weights != rounded).any()):
                ops.assign(master, weights)
        return True


def _round(half: Parameter, master: Parameter) -> bool:
    write(half, cast(master, half.dtype))
    return True


def put_masters_into(inner: Optimizer, masters: MasterWeights) -> None:
    pairs = zip(masters.halves, masters.masters, strict=True)
    replacements = {id(half): master for half, master in pairs}
    if not replacements:
        return
    for _, cell in list(nn.Cell.cells_and_names(inner)):
        for attribute, value in list(vars(cell).items()):
            new_value = _with_masters(value, replacements)
            if new_value is not value:
                object.__setattr__(cell, attribute, new_value)
    for parameter in inner.get_parameters():
        if parameter.dtype in HALF:
            parameter.set_dtype(ms.float32)


def _with_masters(value: Any, replacements: Replacements) -> Any:
    """Return a copy of the container `value` in which each half-precision Parameter is
    replaced with its master weight. If `value` contains no half-precision Parameter,
    return `value` itself.
    """
    if isinstance(value, MutableMapping):
        entries = {
            key: _with_masters(part, replacements) for key, part in value.items()
        }
        if all(entries[key] is part for key, part in value.items()):
            return value
        container = copy(value)
        container.clear()
        for key, part in value.items():
            # In a Cell's dict, the key of a Parameter that belongs to a tuple is the
            # Parameter's own name. The key of any other Parameter is the name of the
            # attribute.
            has_own_name = id(part) in replacements and key == part.name
            container[entries[key].name if has_own_name else key] = entries[key]
        return container
    if isinstance(value, (list, tuple)):
        parts = [_with_masters(part, replacements) for part in value]
        if all(new is part for new, part in zip(parts, value, strict=True)):
            return value
        return type(value)(parts)
    return replacements.get(id(value), value)
