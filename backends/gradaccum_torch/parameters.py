"""Which tensors the model has and which the inner optimizer works on: the same ones, or float32 masters of half-precision parameters.

With ``master_weights=True`` the groups of the inner optimizer hold a float32 master in place of each float16 or bfloat16 parameter, so
that its state and its gradients are float32 too; after each update the model gets the rounded copy. The model is what counts: what
something else wrote into a parameter since (a checkpoint, a swap to averaged weights and not back) is taken over by the master.
torch does not count writes through ``parameter.data``, so those are overwritten by the next update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradaccum import ArgumentValueError, explain

HALF = (torch.float16, torch.bfloat16)

_MODELS = WeakTensorKeyDictionary()
"""The model's parameter of each master that lives, for an inner optimizer that is wrapped again."""


class Parameters:
    """The parameters of a wrapped optimizer, by group and by position.

    Args:
        inner: the optimizer; with `master_weights` its groups and its state are made to hold masters.
        master_weights: whether half-precision parameters have float32 masters.
        model: the model's parameters by position, where `inner` is a copy that holds their masters already.

    Raises:
        ArgumentValueError: `inner` holds masters from an earlier wrapper, and this one is to have none.
    """

    def __init__(self, inner: torch.optim.Optimizer, master_weights: bool, model: Iterable[Tensor] | None = None) -> None:
        self._inner, self._wanted = inner, master_weights
        self._masters: dict[Tensor, Tensor] = {}
        self._models: dict[Tensor, Tensor] = {}
        self._noted: dict[Tensor, int] = {}
        positions = [own for group in inner.param_groups for own in group["params"]]
        for parameter, own in zip(model or map(_model_of, positions), positions, strict=True):
            if parameter is not own:
                self._pair(parameter, own)
        if self._masters and not master_weights:
            raise _has_masters()
        self._replace()

    def groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups as they are now, with the model's parameters in them."""
        return [{**group, "params": [self._models.get(own, own) for own in group["params"]]} for group in self._inner.param_groups]

    def positions(self) -> list[Tensor]:
        """The model's parameters by the index that a saved state calls them by."""
        own = [own for group in self._inner.param_groups for own in group["params"]]
        return [self._models.get(tensor, tensor) for tensor in own] if self._models else own

    def unique(self) -> list[Tensor]:
        """The model's parameters, each once."""
        # By the id, which a tensor hashes by too, at ten times the price.
        return list({id(parameter): parameter for parameter in self.positions()}.values())

    @property
    def has_masters(self) -> bool:
        """Whether any parameter has one."""
        return bool(self._masters)

    def worked_on(self, parameter: Tensor) -> Tensor:
        """What the inner optimizer has in the parameter's place: its master, or itself."""
        return self._masters.get(parameter, parameter)

    def masters(self) -> dict[int, Tensor]:
        """The masters by position; a parameter that is its own master is left out."""
        return {index: self._masters[parameter] for index, parameter in enumerate(self.positions()) if parameter in self._masters}

    def groups_changed(self) -> None:
        """Parameters were added to the inner optimizer.

        Raises:
            ArgumentValueError: one of them was there already; the last group is taken out again.
        """
        groups = self._inner.param_groups
        if any(own in self._masters for group in groups for own in group["params"]):
            groups.pop()
            raise _twice()
        self._replace()

    @torch.no_grad()
    def round(self) -> None:
        """Give the model the rounded masters."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))
            self._noted = {parameter: parameter._version for parameter in self._masters}

    @torch.no_grad()
    def take_over(self) -> None:
        """Let the masters follow what something else wrote into the model, element by element; free where nothing did."""
        for parameter, master in self._masters.items():
            if self._noted.get(parameter) != parameter._version:
                same = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(same, master, parameter))
                self._noted[parameter] = parameter._version

    @torch.no_grad()
    def load(self, masters: Mapping[int, Tensor]) -> None:
        """Make these the masters, by position; where the model turns out to hold something else it still wins."""
        for index, parameter in enumerate(self.positions()):
            if index in masters:
                self._masters[parameter].copy_(masters[index])
        self._noted.clear()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear ``.grad`` of the model and of what the inner optimizer works on."""
        if set_to_none and getattr(self._inner.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad:
            # Not by its own, which takes longer over gradients that the window's end has freed than over others.
            return self.free_gradients()
        self._inner.zero_grad(set_to_none)
        for parameter in self._masters:
            if parameter.grad is not None and not set_to_none:
                parameter.grad.detach().zero_()
            elif set_to_none:
                parameter.grad = None

    def free_gradients(self) -> None:
        """Free ``.grad`` everywhere."""
        for tensor in (*self.positions(), *self._masters.values()):
            tensor.grad = None

    def _replace(self) -> None:
        """Put masters in the place of half-precision parameters; in place, since an optimizer may keep the list."""
        for group in self._inner.param_groups if self._wanted else ():
            group["params"][:] = [self._master_for(own) for own in group["params"]]

    def _master_for(self, parameter: Tensor) -> Tensor:
        if parameter in self._models or parameter.dtype not in HALF:
            return parameter
        if parameter not in self._masters:
            self._pair(parameter, torch.nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad))
            self._move_state(parameter)
        return self._masters[parameter]

    def _pair(self, parameter: Tensor, master: Tensor) -> None:
        self._masters[parameter], self._models[master], _MODELS[master] = master, parameter, parameter

    def _move_state(self, parameter: Tensor) -> None:
        """An optimizer that ran before it was wrapped goes on, with its state in float32."""
        if parameter in self._inner.state:
            state = self._inner.state.pop(parameter)
            self._inner.state[self._masters[parameter]] = {name: _widened(value) for name, value in state.items()}


def _model_of(own: Tensor) -> Tensor:
    """The model's parameter in whose place the inner optimizer has `own`."""
    parameter: Tensor = _MODELS.get(own, own)  # type: ignore[no-untyped-call]
    return parameter


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def _has_masters() -> ArgumentValueError:
    return explain(
        ArgumentValueError,
        "master_weights",
        expected="True for an optimizer whose groups hold master weights already",
        got=False,
        fix="Write master_weights=True, or wrap a new optimizer over the model's parameters.",
    )


def _twice() -> ArgumentValueError:
    return explain(
        ArgumentValueError,
        "param_group",
        expected="parameters that are in no other group",
        got="one that has its master weights in another group",
        fix="Leave it out of the new group.",
    )
