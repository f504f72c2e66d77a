"""The private names of torch's FSDP2.

`fully_shard` puts the parameters of a module into a group, which gathers and reduces
together. Here such a group is a `Unit`.
"""

from __future__ import annotations

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

GLOO_SUMS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
_SYNC = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "reduce_scatter_unused_params": False,
}
"""What FSDP2 keeps of three public methods, and what it does by default."""


class Sync(NamedTuple):
    """The actions of an FSDP2 unit after a backward pass."""

    reduce: bool
    """Reduce the gradients; `FSDPModule.set_requires_gradient_sync`."""
    all_reduce: bool
    """All-reduce what is reduce-scattered, on a mesh of two dimensions;
    `FSDPModule.set_requires_all_reduce`.
    """
    unused: bool
    """A parameter without a gradient takes part, with zeros;
    `FSDPModule.set_reduce_scatter_unused_params`.
    """


class Unit:
    """Parameters that FSDP2 reduces together."""

    def __init__(self, group: Private, modules: list[Any]) -> None:
        self.group = group
        self.modules = modules

    @property
    def parameters(self) -> list[Tensor]:
        return [each.sharded_param for each in self.group.fsdp_params]

    @property
    def shards(self) -> int:
        mesh = self.group.mesh_info.mesh
        dimension = self.group.mesh_info.shard_mesh_dim
        return 1 if dimension is None else int(mesh.size(dimension))

    @property
    def copies(self) -> int:
        return int(self.group.mesh_info.mesh.size()) // self.shards

    @property
    def divide_factor(self) -> float | None:
        """The factor given to `FSDPModule.set_gradient_divide_factor`; None: the number
        of workers.
        """
        if getattr(self.group, "reduce_scatter_reduce_op", None) is not None:
            fix = (
                "Leave set_reduce_scatter_divide_factor out, or install a torch that"
                " has FSDPModule.set_gradient_divide_factor."
            )
            raise explain(
                UsageError,
                "set_reduce_scatter_divide_factor",
                expected="no factor in this torch",
                found="one",
                fix=fix,
            )
        return getattr(self.group, "gradient_divide_factor", None)

    @property
    def reduces_by_hook(self) -> bool:
        return getattr(self.group, "_all_reduce_hook", None) is not None

    @property
    def sum_dtype(self) -> torch.dtype:
        first = self.group.fsdp_params[0]
        policy = first.mp_policy
        own = first.sharded_param.dtype
        # Before torch 2.15 the sum of a policy without reduce_dtype is added up in the
        # computation's dtype, later in the parameter's.
        dtype: torch.dtype = (
            policy.reduce_dtype
            or (policy.param_dtype if _sums_apart(first) else None)
            or own
        )
        return dtype

    @property
    def is_summed_by_gloo(self) -> bool:
        """True if FSDP2 asks gloo for an average in these dtypes and gloo returns the
        sum. Measured: in torch 2.8, not 2.11.
        """
        on_cpu = GLOO_SUMS and self.group.mesh_info.mesh.device_type == "cpu"
        return (
            on_cpu
            and self.shards > 1
            and self.parameters[0].dtype in (torch.float32, torch.bfloat16)
        )

    @property
    def sync(self) -> Sync:
        return Sync(
            *(
                bool(getattr(self.group, kept, default))
                for kept, default in _SYNC.items()
            )
        )

    @sync.setter
    def sync(self, sync: Sync) -> None:
        module = self.modules[0]
        module.set_requires_gradient_sync(sync.reduce, recurse=False)
        module.set_requires_all_reduce(sync.all_reduce, recurse=False)
        if self.fills_unused:
            module.set_reduce_scatter_unused_params(sync.unused, recurse=False)

    @property
    def fills_unused(self) -> bool:
        """True if the installed torch can give zeros to a parameter without a
        gradient.
        """
        return hasattr(self.modules[0], "set_reduce_scatter_unused_params")

    def trainable(self) -> Iterator[Private]:
        return (
            each for each in self.group.fsdp_params if each.sharded_param.requires_grad
        )

    def held(self) -> list[Tensor]:
        """Return the unreduced gradients: one for each parameter that has one, or one
        of all.
        """
        gradients = [
            gradient for each in self.group.fsdp_params for gradient in unreduced(each)
        ]
        partial = None if self.copies == 1 else self.group._partial_reduce_output
        return gradients if partial is None else [*gradients, partial]

    def drop(self) -> None:
        if self.copies > 1:
            self.group._partial_reduce_output = None
        for each in self.group.fsdp_params:
            drop(each)

    def fill(self, parameter: Private) -> None:
        """Add zeros for a parameter without a gradient, because another worker has
        one.
        """
        zeros = torch.zeros_like(parameter._unsharded_param, dtype=self.sum_dtype)
        if _sums_apart(parameter):
            parameter.unsharded_accumulated_grad = zeros
        else:
            parameter._unsharded_param.grad = zeros

    def after_forward(self, hook: Callable[..., None]) -> list[RemovableHandle]:
        """Call `hook` after the forward pass of each of its modules: from the first on,
        `whole_parameters` has them all.
        """
        return [module.register_forward_hook(hook) for module in self.modules]

    def whole_parameters(self) -> list[tuple[Private, Tensor]]:
        """Return the trainable parameters that were gathered once: as FSDP2 has them,
        and whole, as autograd accumulates into them.
        """
        return [
            (each, each._unsharded_param)
            for each in self.trainable()
            if hasattr(each, "_unsharded_param")
        ]


def units_of(module: nn.Module) -> list[Unit]:
    return _units(module.modules())


def units_holding(parameters: Sequence[Tensor]) -> list[Unit]:
    own = set(map(id, parameters))
    return [
        unit
        for unit in _units(_modules())
        if any(id(each) in own for each in unit.parameters)
    ]


def _modules() -> list[nn.Module]:
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    modules = [reference() for reference in _module_state_mapping.keyrefs()]
    return [module for module in modules if module is not None]


def begin(units: Sequence[Unit]) -> None:
    """Let the outermost modules of `units` be roots, as FSDP2 takes the module that
    runs first for one, and then refuses the outer ones.
    """
    own = {id(module) for unit in units for module in unit.modules}
    modules = [module for module in _modules() if hasattr(module, "_get_fsdp_state")]
    inside = {
        id(each)
        for module in modules
        for each in module.modules()
        if each is not module
    }
    for module in modules:
        if id(module) not in inside and any(
            id(each) in own for each in module.modules()
        ):
            module._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def reduce(units: Sequence[Unit]) -> None:
    """Reduce what `units` hold into ``.grad``, as FSDP2 does for a module that a
    backward pass did not reach.

    Without ``post_backward`` only a last backward pass could reduce the sum, and nobody
    knows which is last.
    """
    for unit in reversed(units):
        unit.group.post_backward()
    # The first state of a module that has run is the outermost one, whose pass ends
    # those of all in it.
    states = [unit.modules[0]._get_fsdp_state() for unit in units]
    for root in {
        id(root): root for state in states for root in state._state_ctx.all_states[:1]
    }.values():
        _reduce_under(root)


def _reduce_under(root: Private) -> None:
    context = root._state_ctx
    was_last_backward = context.is_last_backward
    context.is_last_backward = True
    # from torch 2.15 on: None, unless a backward pass is to be finalized
    if hasattr(context, "manual_backward_finalization_active"):
        context.manual_backward_finalization_active = False
    try:
        root._root_post_backward_final_callback()
    finally:
        context.is_last_backward = was_last_backward


def unreduced(parameter: Private) -> list[Tensor]:
    whole = getattr(parameter, "_unsharded_param", None)
    both = (
        None if whole is None else whole.grad,
        parameter.unsharded_accumulated_grad if _sums_apart(parameter) else None,
    )
    return [gradient for gradient in both if gradient is not None]


def drop(parameter: Private) -> None:
    if _sums_apart(parameter):
        parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


def _sums_apart(parameter: Private) -> bool:
    """True if FSDP2 keeps the sum of micro-batches apart; from torch 2.15 on it is the
    whole parameter's ``.grad``.
    """
    return "unsharded_accumulated_grad" in vars(parameter)


def _units(modules: Iterable[nn.Module]) -> list[Unit]:
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    units = dict[int, Unit]()
    for module in modules:
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # An older torch has one group or none.
            groups = [state._fsdp_param_group]
        for group in groups:
            if group is not None and group.fsdp_params:
                unit = units.setdefault(id(group), Unit(group, []))
                unit.modules.append(module)
    return list(units.values())
