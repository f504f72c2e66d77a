"""The private names of torch's FSDP2.

`fully_shard` puts the parameters of a module into a group, which is called a `Unit`
here. FSDP2 gathers all parameters of a group together, and reduces all their gradients
together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Private = Any
"""A torch object whose type is not public."""


class Unit:
    """A group of parameters that FSDP2 gathers together, and whose gradients FSDP2
    reduces together.
    """

    def __init__(self, group: Private, modules: list[Any]) -> None:
        self.group = group
        self.modules = modules

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter.sharded_param for parameter in self.group.fsdp_params]

    @property
    def workers(self) -> int:
        """The number of workers over which FSDP2 averages gradients."""
        return int(self.group.mesh_info.mesh.size())

    @property
    def divisor(self) -> float:
        """The number by which FSDP2 divides the sum of the workers' gradients. It is
        the number of workers, unless the user has called
        ``set_gradient_divide_factor``.
        """
        factor = getattr(self.group, "gradient_divide_factor", None)
        return float(self.workers if factor is None else factor)

    @property
    def sum_dtype(self) -> torch.dtype:
        parameter = self.group.fsdp_params[0]
        policy = parameter.mp_policy
        dtype: torch.dtype = parameter.sharded_param.dtype
        # If a policy has no reduce_dtype, versions of torch before 2.15 add up
        # gradients in the dtype of the computation. Later versions add them up in the
        # parameter's dtype.
        if has_separate_sum(parameter):
            dtype = policy.param_dtype or dtype
        return policy.reduce_dtype or dtype

    def set_reduces(self, reduces: bool) -> None:
        self.modules[0].set_requires_gradient_sync(reduces, recurse=False)

    def trainable(self) -> list[Private]:
        return [
            parameter
            for parameter in self.group.fsdp_params
            if parameter.sharded_param.requires_grad
        ]

    def has_unreduced(self) -> bool:
        """True if there are gradients that FSDP2 has not reduced yet."""
        # On a two-dimensional mesh, gradients may have been reduced over only one
        # dimension.
        has_part = getattr(self.group, "_partial_reduce_output", None) is not None
        return has_part or any(map(has_gradient, self.group.fsdp_params))

    def drop(self) -> None:
        if hasattr(self.group, "_partial_reduce_output"):
            self.group._partial_reduce_output = None
        for parameter in self.group.fsdp_params:
            if has_separate_sum(parameter):
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    def fill(self, parameter: Private) -> None:
        """Set the unreduced gradient of `parameter` to zeros. This is needed if another
        worker has a gradient for this parameter, but this worker has none.
        """
        zeros = torch.zeros_like(parameter._unsharded_param, dtype=self.sum_dtype)
        if has_separate_sum(parameter):
            parameter.unsharded_accumulated_grad = zeros
        else:
            parameter._unsharded_param.grad = zeros

    def gathered_parameters(self) -> list[Tensor]:
        """Return the unsharded tensors of the trainable parameters that FSDP2 has
        gathered. Autograd accumulates into these tensors.
        """
        return [
            parameter._unsharded_param
            for parameter in self.trainable()
            if hasattr(parameter, "_unsharded_param")
        ]


def has_gradient(parameter: Private) -> bool:
    """True if `parameter` has a gradient that FSDP2 has not reduced yet."""
    gathered_parameter = getattr(parameter, "_unsharded_param", None)
    if gathered_parameter is not None and gathered_parameter.grad is not None:
        return True
    return (
        has_separate_sum(parameter) and parameter.unsharded_accumulated_grad is not None
    )


def has_separate_sum(parameter: Private) -> bool:
    """True if FSDP2 stores unreduced gradients in a separate attribute. Since torch
    2.15 it stores them in the ``.grad`` of the unsharded parameter instead.
    """
    return "unsharded_accumulated_grad" in vars(parameter)


def units_of(module: nn.Module) -> list[Unit]:
    return units_among(module.modules())


def units_holding(parameters: Sequence[Tensor]) -> list[Unit]:
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    ids = set(map(id, parameters))
    return [
        unit
        for unit in units_among(list(_module_state_mapping))
        if not ids.isdisjoint(map(id, unit.parameters))
    ]


def units_among(modules: Iterable[nn.Module]) -> list[Unit]:
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    units: dict[int, Unit] = {}
    for module in modules:
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # Older versions of torch have at most one group.
            groups = [state._fsdp_param_group]
        for group in groups:
            if group is not None and group.fsdp_params:
                unit = units.setdefault(id(group), Unit(group, []))
                unit.modules.append(module)
    return list(units.values())


def reduce(units: Sequence[Unit]) -> None:
    """Reduce the gradients of `units` that FSDP2 has not reduced yet, and add the
    results to ``.grad``.

    This function calls ``post_backward`` after the window's last backward pass. FSDP2
    itself calls ``post_backward`` only during a backward pass, and would have to know
    in advance which pass is the last.
    """
    roots: dict[int, Private] = {}
    for unit in reversed(units):
        unit.group.post_backward()
        # If the module has run, the first entry of `all_states` is the state of the
        # outermost module. Ending the outermost module's backward pass also ends the
        # passes of all inner modules.
        states = unit.modules[0]._get_fsdp_state()._state_ctx.all_states
        for root in states[:1]:
            roots[id(root)] = root
    for root in roots.values():
        context = root._state_ctx
        was_last_backward = context.is_last_backward
        context.is_last_backward = True
        # Since torch 2.15, this attribute is None unless a backward pass must still be
        # finalized.
        if hasattr(context, "manual_backward_finalization_active"):
            context.manual_backward_finalization_active = False
        try:
            root._root_post_backward_final_callback()
        finally:
            context.is_last_backward = was_last_backward
