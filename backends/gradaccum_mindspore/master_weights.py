"""The float32 master weights of half-precision parameters. The inner optimizer updates
the master weights, and the model contains their rounded copies.

A MindSpore optimizer creates its moments in its constructor, as clones of the model's
Parameters. So `put_masters_into` changes the finished optimizer in place: it replaces
each half-precision Parameter with its master weight, wherever the optimizer and its
cells refer to the Parameter. The optimizer's own half-precision state is converted to
float32. The Parameters of this state keep their names and their current values, which
are still rounded to half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, nn
from mindspore.experimental import optim

from gradaccum_mindspore.gradient_sum import (
    HALF,
    cast,
    hidden_parameter,
    map_over,
    where,
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

    def construct(self) -> tuple[bool, ...]:
        """Write the rounded master weights into the model."""
        return map_over(_round, self.halves, self.masters)

    def compiled_copy(self) -> tuple[bool, ...]:
        """Do the same as `copy_model_into_masters`, in compiled code."""
        return map_over(_copy_changed, self.halves, self.masters)

    def copy_model_into_masters(self) -> None:
        """If a weight was changed in the model, copy it into its master weight.

        After an update, the model contains exactly the rounded master weights. So a
        weight was changed if it differs from the rounded master weight. All other
        master weights keep their full precision. NaN differs from everything, so a
        weight that is NaN is copied too.
        """
        for half, master in zip(self.halves, self.masters, strict=True):
            is_unchanged = half.device == "CPU" and _are_equal(half, master)
            if not is_unchanged:
                _copy_changed(half, master)


def _round(half: Parameter, master: Parameter) -> bool:
    write(half, cast(master, half.dtype))
    return True


def _copy_changed(half: Parameter, master: Parameter) -> bool:
    weights = cast(half, ms.float32)
    rounded = cast(cast(master, half.dtype), ms.float32)
    write(master, where(weights == rounded, master, weights))
    return True


def _are_equal(half: Parameter, master: Parameter) -> bool:
    """True if `half` is exactly the rounded `master`. NumPy compares them, because the
    operators of `_copy_changed` would take a hundred times as long for a small tensor.
    """
    weights = half.asnumpy()
    with np.errstate(over="ignore"):
        rounded = master.asnumpy().astype(weights.dtype)
    return np.array_equal(weights, rounded)


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
