"""float32 master weights: what the inner optimizer works on while the model holds the rounded copies.

A MindSpore optimizer takes the model's Parameters when it is built, and clones its moments from them. So it is turned to the masters
in place, before its first call here: each half-precision Parameter is replaced by its master wherever the optimizer and its cells
keep it, and their own half-precision state becomes float32 under its old name. Groups, learning rates and weight decay are positions
in lists, and stay. A call compiled before is compiled anew, because the gradients now have another dtype.
State that starts at a number which the half-precision dtype does not hold, such as `nn.Adagrad`'s ``accum=0.1``, was rounded when the
optimizer was built, and starts from there.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from copy import copy
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, nn

from gradaccum_mindspore.checks import HALF
from gradaccum_mindspore.sums import each, write
from gradaccum_mindspore.witness import Witness


class Masters(nn.Cell):  # type: ignore[misc]
    """The masters of some parameters, and the way back into the model.

    Args:
        parameters: the model's parameters; those in float16 and bfloat16 get a float32 master, ``"{name of the parameter}{suffix}"``.
        suffix: what a master's name ends in.
    """

    def __init__(self, parameters: Sequence[Any], suffix: str) -> None:
        super().__init__(auto_prefix=False)
        self.suffix = suffix
        halves = [parameter for parameter in parameters if parameter.dtype in HALF]
        self.halves = ParameterTuple(halves)
        self.masters = ParameterTuple([_master(parameter, suffix) for parameter in halves])

    def construct(self) -> Any:
        """Round every master into the model's parameter."""
        return each(_round, self.halves, self.masters)


class Update(nn.Cell):  # type: ignore[misc]
    """The inner optimizer's call and, if there are masters, the rounding that follows it."""

    def __init__(self, inner: Any, masters: Masters) -> None:
        super().__init__(auto_prefix=False)
        self.inner = inner
        self.masters = masters
        self.rounds = len(masters.masters) > 0
        self.witness = Witness(inner)

    def construct(self, gradients: Any) -> Any:
        self.inner(gradients)
        self.round()
        return True

    def round(self) -> Any:
        """Round the masters, if there are any, into the model's parameters."""
        if self.rounds:
            self.masters()
        return True


def turn_to_masters(inner: Any, masters: Masters) -> None:
    """Make `inner` work on `masters`: its parameters are replaced by them, its half-precision state becomes float32."""
    replacements = {id(half): master for half, master in zip(masters.halves, masters.masters, strict=True)}
    for _, cell in list(nn.Cell.cells_and_names(inner)):
        for attribute, value in list(vars(cell).items()):
            if _holds(value, replacements):
                object.__setattr__(cell, attribute, _replaced(value, replacements))
    for parameter in inner.get_parameters():
        if replacements and parameter.dtype in HALF:
            parameter.set_dtype(ms.float32)


def _round(half: Any, master: Any) -> Any:
    write(half, master.astype(half.dtype))
    return True


def _master(parameter: Any, suffix: str) -> Any:
    return Parameter(parameter.astype(ms.float32), name=parameter.name + suffix, requires_grad=False)


def _holds(value: Any, replacements: dict[int, Any]) -> bool:
    if isinstance(value, MutableMapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return id(value) in replacements
    return any(_holds(part, replacements) for part in value)


def _replaced(value: Any, replacements: dict[int, Any]) -> Any:
    """A copy of a container with masters for parameters; containers that hold none stay the objects they are."""
    if not _holds(value, replacements):
        return value
    if isinstance(value, MutableMapping):
        changed = copy(value)
        changed.clear()
        changed.update((_key(key, part, replacements), _replaced(part, replacements)) for key, part in value.items())
        return changed
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced(part, replacements) for part in value])
    return replacements[id(value)]


def _key(key: Any, part: Any, replacements: dict[int, Any]) -> Any:
    """A Cell lists a Parameter of a tuple by its name, one of its own by the attribute's."""
    return replacements[id(part)].name if id(part) in replacements and key == part.name else key
