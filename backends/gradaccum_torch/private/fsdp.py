"""The private names of torch's FSDP2, and what a torch without the name costs the user.

`fully_shard` puts the parameters of a module into a group, which gathers and reduces
together. Here such a group is a `Unit`. A name of an option is needed only where torch
has the public method that sets the option.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.private import names

Private = Any
"""An object of torch that has no public type."""

_FSDP = "torch.distributed.fsdp._fully_shard."
_MODULE, _STATE, _GROUP = (
    f"{_FSDP}_fully_shard:FSDPModule.",
    f"{_FSDP}_fsdp_state:FSDPState.",
    f"{_FSDP}_fsdp_param_group:FSDPParamGroup.",
)
_PARAMETER, _MESH = (
    f"{_FSDP}_fsdp_param:FSDPParam.",
    f"{_FSDP}_fsdp_common:FSDPMeshInfo.",
)
_PASS_END = (
    f"{_STATE}_root_post_backward_final_callback",
    f"{_STATE}_state_ctx",
    f"{_FSDP}_fsdp_state:FSDPStateContext.all_states",
    f"{_FSDP}_fsdp_state:FSDPStateContext.is_last_backward",
)
_MODULES = "torch.distributed._composable_state:_module_state_mapping"
_REDUCES, _POLICY, _PARTIAL = (
    f"{_GROUP}post_backward",
    f"{_PARAMETER}mp_policy",
    f"{_GROUP}_partial_reduce_output",
)
_GROUPS, _ONE_GROUP = f"{_STATE}_fsdp_param_groups", f"{_STATE}_fsdp_param_group"
GLOO_SUMS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
_UNUSED = "set_reduce_scatter_unused_params"
_SYNC = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "reduce_scatter_unused_params": False,
}
"""What FSDP2 keeps of three public methods, and what it does by default."""

_PREFETCHED = "_states_to_backward_prefetch"
"""What a backward pass gathers ahead: by default the unit that ran before, which here
is gathered already, or not yet wanted.
"""
_STAYS = (
    f"{_STATE}{_PREFETCHED}",
    f"{_STATE}_lazy_init",
    f"{_GROUP}post_forward_mesh_info",
    f"{_GROUP}reshard_after_backward",
)

_UNSUPPORTED = "`gradaccum.wrap` refuses parameters of `fully_shard`."
_ONE_MESH = "A module whose parameters lie on several meshes raises."
_NEEDED = (
    f"{_MODULE}_get_fsdp_state",
    f"{_GROUP}fsdp_params",
    f"{_GROUP}mesh_info",
    f"{_PARAMETER}sharded_param",
    f"{_PARAMETER}_unsharded_param",
    f"{_MESH}mesh",
    f"{_MESH}shard_mesh_dim",
)
_OPTIONS = {
    "gradient_divide_factor": "set_gradient_divide_factor",
    "_all_reduce_hook": "set_all_reduce_hook",
}
"""What FSDP2 keeps of an option, by which the sum may be divided, and the public method
that sets it: an older torch has neither.
"""


def lost_in_fsdp() -> dict[str, str]:
    """Return, by private name of FSDP2 (``module:object.attribute``), what the user
    loses without it.
    """
    waiting = (
        '`gradient_sync=` takes no ``"window"`` and no ``"all_reduce_per_window"``.'
    )
    both = names.exists(_GROUPS) and names.exists(_ONE_GROUP)
    return {
        **dict.fromkeys(
            (
                *_NEEDED,
                *(_GROUP + kept for kept, setter in _OPTIONS.items() if _sets(setter)),
            ),
            _UNSUPPORTED,
        ),
        _GROUPS if names.exists(_GROUPS) else _ONE_GROUP: (
            "A module whose parameters lie on several meshes raises."
            if both
            else _UNSUPPORTED
        ),
        **dict.fromkeys(
            _STAYS, "`layered_backward` refuses parameters of `fully_shard`."
        ),
        _REDUCES: waiting,
        _POLICY: waiting,
        _PARTIAL: "`gradaccum.wrap` refuses a mesh of two dimensions.",
        **{
            _GROUP + kept: "A module that is let go reduces."
            for kept in _SYNC
            if kept not in _UNUSED or _sets(_UNUSED)
        },
        **dict.fromkeys(
            _PASS_END,
            "A window that FSDP2 reduces at its end waits for the device, and leaves a"
            " unit's buffer.",
        ),
        _MODULES: (
            "Modules of FSDP2 are looked for through all objects of Python, which is"
            " slower."
        ),
    }


def _groups_name() -> str:
    """Return the attribute of a state with its groups; an older torch has one group or
    none.
    """
    return "_fsdp_param_groups" if names.exists(_GROUPS) else "_fsdp_param_group"


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
        self.group, self.modules = group, modules

    @property
    def parameters(self) -> list[Tensor]:
        return [each.sharded_param for each in self.group.fsdp_params]

    @property
    def shards(self) -> int:
        mesh, dimension = self.group.mesh_info.mesh, self.group.mesh_info.shard_mesh_dim
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
        factor: float | None = self._option("gradient_divide_factor")
        return factor

    @property
    def reduces_by_hook(self) -> bool:
        return self._option("_all_reduce_hook") is not None

    @property
    def sum_dtype(self) -> torch.dtype:
        first = self.group.fsdp_params[0]
        policy, own = first.mp_policy, first.sharded_param.dtype
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
        if _sets(_UNUSED):
            module.set_reduce_scatter_unused_params(sync.unused, recurse=False)

    @property
    def fills_unused(self) -> bool:
        """True if the installed torch can give zeros to a parameter without a
        gradient.
        """
        return _sets(_UNUSED)

    def _option(self, kept: str) -> Any:
        """Return FSDP2's value of an option; None in a torch without the option."""
        return getattr(self.group, kept) if _sets(_OPTIONS[kept]) else None

    def require_waiting(self) -> None:
        """Raise unless the installed torch has the names by which FSDP2 reduces without
        a backward pass.
        """
        for name in (_REDUCES, _POLICY):
            names.require_name(
                name, "gradient_sync", 'Write gradient_sync="micro_batch".'
            )

    def trainable(self) -> Iterator[Private]:
        return (
            each for each in self.group.fsdp_params if each.sharded_param.requires_grad
        )

    def held(self) -> list[Tensor]:
        """Return the unreduced gradients: one for each parameter that has one, or one
        of all.
        """
        found = [
            gradient for each in self.group.fsdp_params for gradient in unreduced(each)
        ]
        partial = self.group._partial_reduce_output if self._has_partial() else None
        return found if partial is None else [*found, partial]

    def _has_partial(self) -> bool:
        if self.copies == 1:
            return False
        names.require_name(
            _PARTIAL, "module", "Call fully_shard with a mesh of one dimension."
        )
        return True

    def drop(self) -> None:
        if self._has_partial():
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

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the parameters gathered inside the block, whatever passes run, and let
        them go after it.
        """
        group, module = self.group, self.modules[0]
        state = module._get_fsdp_state()
        changed = [
            (group, "post_forward_mesh_info", None),
            (group, "reshard_after_backward", False),
            (state, _PREFETCHED, [state]),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
        for owner, name, value in changed:
            setattr(owner, name, value)
        try:
            module.unshard()
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            module.reshard()

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
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return [
        module
        for each in _module_state_mapping.keyrefs()
        if (module := each()) is not None
    ]


def begin(units: Sequence[Unit]) -> None:
    """Let the outermost modules of `units` be roots, as FSDP2 takes the module that
    runs first for one, and then refuses the outer ones.
    """
    for name in _STAYS if units else ():
        names.require_name(
            name,
            "layers",
            "Call gradaccum_torch.backward in place of layered_backward.",
        )
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
    if not all(names.exists(name) for name in _PASS_END):
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return
    for root in {
        id(root): root for state in states for root in state._state_ctx.all_states[:1]
    }.values():
        _reduce_under(root)


def _reduce_under(root: Private) -> None:
    context = root._state_ctx
    found, context.is_last_backward = context.is_last_backward, True
    # from torch 2.15 on: None, unless a backward pass is to be finalized
    if hasattr(context, "manual_backward_finalization_active"):
        context.manual_backward_finalization_active = False
    try:
        root._root_post_backward_final_callback()
    finally:
        context.is_last_backward = found


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

    found = dict[int, Unit]()
    for module in modules:
        if isinstance(module, FSDPModule):
            _require_names()
            groups = getattr(module._get_fsdp_state(), _groups_name())
            for group in groups if isinstance(groups, (list, tuple)) else [groups]:
                if group is not None and group.fsdp_params:
                    found.setdefault(id(group), Unit(group, [])).modules.append(module)
    return list(found.values())


@cache
def _require_names() -> None:
    for name, cost in lost_in_fsdp().items():
        if cost is _UNSUPPORTED:
            names.require_name(
                name,
                "optimizer",
                "Use DistributedDataParallel in place of fully_shard.",
            )


def _sets(setter: str) -> bool:
    return names.exists(_MODULE + setter)
