"""The private names of torch's FSDP2, beside those of `torch_private`, and what breaks if torch drops them.

`fully_shard` puts the parameters of a module into a group, which gathers and reduces together. Here such a group is a `Unit`. `LOST` has
the names that have a fallback. A name of an option is needed only where torch has the public method that sets the option.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradaccum import UsageError
from gradaccum.kit import explain

Private = Any
"""An object of torch that has no public type."""


_MODULES = "torch.distributed._composable_state:_module_state_mapping"
_PASS_END = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback"
LOST: dict[str, str] = {
    _MODULES: "Modules of FSDP2 are looked for through all objects of Python, which is slower.",
    _PASS_END: "A window that FSDP2 reduces at its end waits for the device, and leaves one unit's buffer.",
}
"""By private name (``module:object.attribute``): what the user loses where the installed torch lacks the name."""


class Sync(NamedTuple):
    """What FSDP2 does after a backward pass, of one unit."""

    reduce: bool
    """Reduce the gradients; `FSDPModule.set_requires_gradient_sync`."""
    all_reduce: bool
    """All-reduce what is reduce-scattered, on a mesh of two dimensions; `FSDPModule.set_requires_all_reduce`."""
    unused: bool
    """A parameter without a gradient takes part, with zeros; `FSDPModule.set_reduce_scatter_unused_params`."""


class Unit:
    """Parameters that FSDP2 reduces together.

    Without the private names that its methods use, FSDP2 would have to reduce in each micro-batch, and ``reduction="sum"`` would be the
    average of the workers.
    """

    def __init__(self, group: Private) -> None:
        self.group = group

    @property
    def parameters(self) -> list[Tensor]:
        """The sharded parameters, as the optimizer has them."""
        return [each.sharded_param for each in self.group.fsdp_params]

    @property
    def shards(self) -> int:
        """The workers that share one copy of the parameters."""
        return self._workers_along(self.group.mesh_info.shard_mesh_dim)

    @property
    def copies(self) -> int:
        """The copies of the parameters, of `shards` workers each."""
        return self._workers_along(self.group.mesh_info.replicate_mesh_dim)

    def _workers_along(self, dimension: int | None) -> int:
        """Torch gives None for a dimension that its mesh does not have. A size that torch renames must not look like 1 worker."""
        return 1 if dimension is None else int(self.group.mesh_info.mesh.size(dimension))

    @property
    def divide_factor(self) -> float | None:
        """What `FSDPModule.set_gradient_divide_factor` was given; None: the number of workers.

        Raises:
            UsageError: an older torch was given one, and keeps it where nobody can read it.
        """
        if getattr(self.group, "reduce_scatter_reduce_op", None) is not None:
            fix = "Leave set_reduce_scatter_divide_factor out, or install a torch that has FSDPModule.set_gradient_divide_factor."
            raise explain(UsageError, "set_reduce_scatter_divide_factor", expected="no factor in this torch", found="one", fix=fix)
        factor: float | None = self._option("gradient_divide_factor", "set_gradient_divide_factor")
        return factor

    @property
    def reduces_by_hook(self) -> bool:
        """`FSDPModule.set_all_reduce_hook` was called."""
        return self._option("_all_reduce_hook", "set_all_reduce_hook") is not None

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 adds up the micro-batches that it does not reduce."""
        first = self.group.fsdp_params[0]
        policy, own = getattr(first, "mp_policy", None) or self.group.mp_policy, first.sharded_param.dtype
        # Before torch 2.15 the sum of a policy without reduce_dtype is added up in the computation's dtype, later in the parameter's.
        dtype: torch.dtype = policy.reduce_dtype or (policy.param_dtype if _sums_apart(first) else None) or own
        return dtype

    @property
    def only_sums(self) -> bool:
        """The factor is a division of its own, not a part of the reduction."""
        wide = (torch.float32, torch.bfloat16)
        return bool(self._option("force_sum_reduction_for_comms", "set_force_sum_reduction_for_comms")) or self.sum_dtype not in wide

    @property
    def sync(self) -> Sync:
        """What it does after a backward pass."""
        group = self.group
        return Sync(group.reduce_grads, group.all_reduce_grads, bool(self._option("reduce_scatter_unused_params", _UNUSED)))

    @sync.setter
    def sync(self, sync: Sync) -> None:
        self.group.reduce_grads, self.group.all_reduce_grads, self.group.reduce_scatter_unused_params = sync

    @property
    def fills_unused(self) -> bool:
        """The installed torch can give a parameter without a gradient zeros."""
        return _sets(_UNUSED)

    def _option(self, name: str, setter: str) -> Any:
        """What FSDP2 keeps of an option; None in a torch without the option."""
        return getattr(self.group, name) if _sets(setter) else None

    def trainable(self) -> Iterator[Private]:
        """Its trainable parameters, as FSDP2 has them."""
        return (each for each in self.group.fsdp_params if each.sharded_param.requires_grad)

    def held(self) -> list[Tensor]:
        """The gradients that are not reduced: one for each parameter that has one, or one of all."""
        found = [gradient for each in self.group.fsdp_params for gradient in unreduced(each)]
        partial = self.group._partial_reduce_output
        return found if partial is None else [*found, partial]

    def drop(self) -> None:
        """Forget the gradients that are not reduced."""
        self.group._partial_reduce_output = None
        for each in self.group.fsdp_params:
            drop(each)

    def fill(self, parameter: Private) -> None:
        """Zeros for a gradient of one of its parameters, because another worker has one."""
        zeros = torch.zeros_like(parameter._unsharded_param, dtype=self.sum_dtype)
        if _sums_apart(parameter):
            parameter.unsharded_accumulated_grad = zeros
        else:
            parameter._unsharded_param.grad = zeros

    def after_forward(self, hook: Callable[..., None]) -> list[RemovableHandle]:
        """Have `hook` called after the forward pass of each of its modules: from the first one on `whole_parameters` has them all."""
        return [module.register_forward_hook(hook) for module in self.group.modules]

    def whole_parameters(self) -> list[tuple[Private, Tensor]]:
        """The trainable parameters that were gathered once: as FSDP2 has them, and whole, as autograd accumulates into them."""
        return [(each, each._unsharded_param) for each in self.trainable() if hasattr(each, "_unsharded_param")]


def units_of(module: nn.Module) -> list[Unit]:
    """The units of `module` and of what is in it."""
    return _units(_states(module.modules()))


def units_holding(parameters: Sequence[Tensor]) -> list[Unit]:
    """The units that have any of `parameters`, whatever the module."""
    own = set(map(id, parameters))
    return [unit for unit in _units(_states(_modules())) if any(id(each) in own for each in unit.parameters)]


def _modules() -> list[nn.Module]:
    """All modules that live and that FSDP2 may have."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return [module for each in _module_state_mapping.keyrefs() if (module := each()) is not None]


def reduce(units: Sequence[Unit]) -> None:
    """Reduce what `units` hold into ``.grad``, as FSDP2 does for a module that a backward pass did not reach.

    Without ``post_backward`` the sum of a window could be reduced only by a backward pass, which must know that it is the last one.
    """
    for unit in reversed(units):
        unit.group.post_backward()
    # The first state of a module that has run is the outermost one, whose pass ends those of all in it.
    modules = (module for unit in units for module in unit.group.modules)
    for root in {id(root): root for state in _states(modules) for root in state._state_ctx.all_states[:1]}.values():
        if hasattr(root, "_root_post_backward_final_callback"):
            _reduce_under(root)
        elif torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _reduce_under(root: Private) -> None:
    context = root._state_ctx
    found, context.is_last_backward = context.is_last_backward, True
    if hasattr(context, "manual_backward_finalization_active"):  # from torch 2.15 on: None, unless a backward pass is to be finalized
        context.manual_backward_finalization_active = False
    try:
        root._root_post_backward_final_callback()
    finally:
        context.is_last_backward = found


def unreduced(parameter: Private) -> list[Tensor]:
    """What FSDP2 holds of the gradient of one of its parameters."""
    whole = getattr(parameter, "_unsharded_param", None)
    both = None if whole is None else whole.grad, parameter.unsharded_accumulated_grad if _sums_apart(parameter) else None
    return [gradient for gradient in both if gradient is not None]


def drop(parameter: Private) -> None:
    """Forget it."""
    if _sums_apart(parameter):
        parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


def _sums_apart(parameter: Private) -> bool:
    """True where FSDP2 keeps the sum of micro-batches apart; from torch 2.15 on it is the whole parameter's ``.grad``."""
    return not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def _units(states: Iterable[Private]) -> list[Unit]:
    groups = {id(group): group for state in states for group in _groups(state)}
    return [Unit(group) for group in groups.values() if group.fsdp_params]


def _groups(state: Private) -> list[Private]:
    """The groups of a module, of which an older torch has one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Private] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


_UNUSED = "set_reduce_scatter_unused_params"


def _sets(setter: str) -> bool:
    """True if FSDP2 of the installed torch has the option of this public method."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, setter)


def _states(modules: Iterable[nn.Module]) -> Iterator[Private]:
    from torch.distributed.fsdp import FSDPModule

    return (module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule))
