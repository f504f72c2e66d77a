"""The private names of torch that this package uses.

A new torch is checked here, in one place; `lacking` tells `gradaccum doctor` which names it lacks. Such a name raises where it is used. The
call that needs it refuses it where torch would say nothing. A name used for each parameter or micro-batch is bound as it is, without a
Python function around it. Three names that torch looks for on the wrapped optimizer stand elsewhere: ``_step_supports_amp_scaling`` of
`AccumulatingOptimizer`, and ``grad_scale`` and ``found_inf``, which a scaler sets.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import unwrap
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradaccum import UsageError
from gradaccum.kit import explain

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
Node = Any
"""A node of autograd's graph, for which torch has no common type."""
LocalVariables = Mapping[str, Any]
"""The local variables of a function of torch that is running."""

USED = {
    "every window": (
        *("torch:Tensor._version", "torch:_C._storage_Use_Count", "torch:UntypedStorage._cdata", "torch._C._dynamo:eval_frame"),
        *(f"torch:_foreach_{each}" for each in ("norm", "div_", "mul_", "sub_", "copy_")),
        *("torch.autograd:Variable._execution_engine.queue_callback", "torch.amp:GradScaler._unscale_grads_"),
    ),
    "sparse gradients": ("torch:Tensor._values",),
    "recompute, backward and coupled_backward": ("torch.nn:Module._parameters", "torch.nn:Module._buffers"),
    "verify": ("torch.utils._python_dispatch:TorchDispatchMode", "torch:_C._functions.AccumulateGrad._input_metadata"),
    "fused=True": ("torch.optim:Adam._step_supports_amp_scaling",),
    "loss_scale=GradScaler()": tuple(
        f"torch.amp:GradScaler.{each}"
        for each in ("_step_supports_amp_scaling", "_growth_tracker", "_get_scale_async", "_per_optimizer_states", "_found_inf_per_device")
    ),
    "torch.distributed.checkpoint": tuple(
        f"torch.distributed.checkpoint.state_dict:{each}" for each in ("_get_optim_state_dict", "_init_optim_state")
    ),
    "module=DistributedDataParallel()": (
        *(f"torch.nn.parallel:DistributedDataParallel.{each}" for each in ("_comm_hooks", "_sync_buffers")),
        *("torch.distributed.algorithms.join:Joinable._join_config", "torch.distributed.fsdp._common_utils:FSDP_FLATTENED"),
    ),
}
"""By what needs them: private names, as ``module:object.attribute``."""


def lacking() -> dict[str, str]:
    """Return the private names that the installed torch lacks, each with what fails without it."""
    used = {**USED, "fully_shard": fsdp_names()}
    return {name: f"{use} fails." for use, names in used.items() for name in names if not exists(name)}


@cache
def exists(name: str) -> bool:
    """True if the installed torch has `name`; an attribute of an instance exists if a method of its class names it."""
    try:
        resolve_name(name)
    except ImportError:
        return False
    except AttributeError:
        owner, _, attribute = name.rpartition(".")
        return ":" in owner and exists(owner) and any(attribute in names for names in _names_in(resolve_name(owner)))
    return True


def _names_in(owner: Any) -> Iterator[tuple[Any, ...]]:
    for each in (owner, *vars(owner).values()):
        code = getattr(unwrap(each) if callable(each) else each, "__code__", None)
        if code is not None:
            yield code.co_names + code.co_consts


def require_name(name: str, argument: str, fix: str) -> None:
    """Raise unless the installed torch has `name`, without which `argument` would be silently wrong."""
    if not exists(name):
        found = f"torch {torch.__version__}, which lacks it"
        raise explain(UsageError, argument, expected=f"a torch that has {name.replace(':', '.')}", found=found, fix=fix)


version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written into. Nothing else tells an outside change of ``.grad``, nor how far an update came that raised."""


foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm
foreach_div_, foreach_mul_ = torch._foreach_div_, torch._foreach_mul_
foreach_sub_, foreach_copy_ = torch._foreach_sub_, torch._foreach_copy_

parameters_of: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""A module's own table."""


DIVIDES_BY_GRAD_SCALE = "_step_supports_amp_scaling"
"""True on an optimizer whose ``step`` divides by ``optimizer.grad_scale``, as a fused one's does."""


def is_leaf_node(node: Node) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def storage_users(storage: Any) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def keep_own(leaf: Tensor) -> None:
    """Copy the ``.grad`` of `leaf` if somebody else may write into its memory.

    Autograd takes over the tensor that the first backward pass returns. A CUDA graph returns the same memory each time, and its replay
    would overwrite the sum. Memory that torch cannot resize is such a graph's, or another library's, such as NumPy's.
    """
    gradient = leaf.grad
    if gradient is None:
        return
    if type(gradient) is Tensor:
        storage = None if gradient.is_sparse else gradient.untyped_storage()
        own = storage is not None and storage.resizable() and storage_users(storage) <= 2  # The gradient and `storage`.
    else:  # FSDP's shards are parts of one tensor that nobody else writes.
        own = not is_sharded(gradient) or local(gradient).untyped_storage().resizable()
    # torch.compile loads this module for graphs. Those that it warms up or records return memory that looks like any other.
    if not own or (gradient.is_cuda and "torch._inductor.cudagraph_trees" in sys.modules):
        leaf.grad = gradient.clone()


def elements(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient as a dense tensor that shares its memory; a sparse gradient's entries.

    Public ``values()`` refuses a sum that torch has not marked as coalesced.
    """
    return gradient._values() if gradient.is_sparse else gradient


def is_sharded(tensor: Tensor) -> bool:
    """True if `tensor` is a `DTensor`, whose version does not count what torch writes into many tensors at once."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a `DTensor` in this process, without a graph, or the tensor itself."""
    if not is_sharded(tensor):
        return tensor
    whole: Any = tensor
    with torch.no_grad():  # With gradients ``to_local`` gives a view that is not the part itself.
        part: Tensor = whole.to_local()
    return part


def mesh_of(tensor: Tensor) -> Any:
    split: Any = tensor
    return split.device_mesh


def at_the_end_of_backward(function: Callable[[], None]) -> bool:
    """Schedule a callback for the end of the current backward pass; False outside of autograd's engine, which would never call it.

    FSDP calls the hooks of what it reduces after the backward pass, and a compiled backward pass runs outside of the engine.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and getattr(compiled, "in_compiled_autograd_region", True):
        return False
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)  # Torch forgets it if the pass raises.
    except RuntimeError:
        return False
    return True


def untraced(function: Callable[..., object]) -> None:
    """Keep Dynamo from compiling `function` and what it calls.

    `torch.compiler.disable` does the same, but imports all of the compiler, and puts a frame around every call.
    """
    if hasattr(eval_frame, "_FrameExecStrategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    else:
        eval_frame.skip_code(function.__code__)  # type: ignore[attr-defined]


def untraced_within(function: _F) -> _F:
    """Return `function`, kept from Dynamo with all that it calls; before torch 2.8 the function alone."""
    if hasattr(eval_frame, "_FrameExecStrategy"):
        untraced(function)
        return function

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        compiles = "torch._dynamo" in sys.modules
        return (torch.compiler.disable(function) if compiles else function)(*args, **kwargs)  # type: ignore[no-untyped-call]

    untraced(outside)
    return cast(_F, outside)


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    optimizer._opt_called = True  # type: ignore[attr-defined]


def tracker_of(scaler: torch.amp.GradScaler) -> Tensor:
    """Return the scaler's growth tracker, int32, shape ``()``."""
    tracker = scaler._growth_tracker
    assert tracker is not None
    return tracker


def scale_of(scaler: torch.amp.GradScaler) -> Tensor:
    """Return the scaler's scale on its device, float32, shape ``()``; public ``get_scale()`` waits for the device."""
    scale = scaler._get_scale_async()
    assert scale is not None
    return scale


def pending_update(scaler: torch.amp.GradScaler) -> Mapping[int, Any]:
    return scaler._per_optimizer_states


def found_inf_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Collection[Tensor]:
    return scaler._found_inf_per_device(optimizer).values()


def scaler_state(scaler: torch.amp.GradScaler, scale: float, tracker: int) -> dict[str, Any]:
    return {
        "scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": tracker,
    }


def unscaling_caller(frames: int) -> LocalVariables | None:
    """Return the local variables of ``GradScaler._unscale_grads_`` if it runs `frames` frames above."""
    frame = sys._getframe(frames)
    return frame.f_locals if frame.f_code.co_name == _UNSCALES else None


_UNSCALES = torch.amp.GradScaler._unscale_grads_.__name__


_MODEL_STATE = "torch.distributed.checkpoint.state_dict"


def model_state_caller(function: str, frames: int) -> LocalVariables | None:
    """Return the local variables of ``_get_optim_state_dict`` or ``_init_optim_state`` of torch's checkpoints, `frames` frames above."""
    frame = sys._getframe(frames)
    if frame.f_globals.get("__name__") != _MODEL_STATE:
        return None
    require_name(f"{_MODEL_STATE}:{function}", _MODEL_STATE, "Save opt.state_dict() of each worker, and load it by opt.load_state_dict().")
    return frame.f_locals if frame.f_code.co_name == function else None


def initialize_state(inner: torch.optim.Optimizer) -> None:
    """Make the state of `inner` as torch does before it reads or loads one: by a step of zeros, at a learning rate of 0."""
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if inner.state or any(parameter.grad is not None for parameter in parameters):
        return
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    rates = [group.get("lr") for group in inner.param_groups]
    for group, rate in zip(inner.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    inner.step()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    inner.zero_grad()


def is_sequence_calling(frames: int) -> bool:
    return isinstance(sys._getframe(frames).f_locals.get("self"), torch.optim.lr_scheduler.SequentialLR)


def input_dtypes(node: Node) -> set[torch.dtype]:
    """Return the dtypes of a node's outputs, and so of its incoming gradients."""
    return {meta.dtype for meta in node._input_metadata}


_STATIC = "torch.nn.parallel:DistributedDataParallel._static_graph_delay_allreduce_enqueued"


def leave_reduction_out(module: DistributedDataParallel, hook_error: Callable[[], Exception]) -> None:
    """Keep `module` from reducing gradients, also where the user's loop sets ``require_backward_grad_sync``.

    DDP would never call a communication hook then, so `hook_error` is raised if one is registered. With ``static_graph=True`` the first
    backward pass reduces unless a flag is set that the installed torch may lack.
    """
    if module.static_graph:
        require_name(_STATIC, "module", "Leave static_graph=True out.")

    def refuse(*_: object, **__: object) -> None:
        raise hook_error()

    _wait(module)
    module.register_forward_pre_hook(_wait)
    module._static_graph_delay_allreduce_enqueued = True
    vars(module)["register_comm_hook"] = refuse


def _wait(module: torch.nn.Module, *_: object) -> None:
    module.require_backward_grad_sync = False  # type: ignore[assignment]


_TENSOR_PARALLEL = "torch.distributed.tensor.parallel.ddp"
_WAS_SHARDED = f"{_TENSOR_PARALLEL}:_reconstruct_dtensor._st_info"


def were_sharded(parameters: Iterable[Tensor]) -> bool:
    """True if ``_pre_dp_module_transform`` made, or may have made, some of a `DTensor` for `DistributedDataParallel`."""
    if _TENSOR_PARALLEL not in sys.modules:
        return False
    return not exists(_WAS_SHARDED) or any(hasattr(parameter, "_st_info") for parameter in parameters)


def send_buffers(module: DistributedDataParallel) -> None:
    """Send the first worker's buffers to all, as a forward pass of `module` would, and keep forward passes from it; collective.

    A forward pass is no meeting of all workers: another worker may be at the end of its window.
    """
    module.require_forward_param_sync = True
    if module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        module._sync_buffers()  # type: ignore[no-untyped-call]
    module.require_forward_param_sync = False


def is_in_join(module: DistributedDataParallel) -> bool:
    """True if a loop runs under ``module.join()``, which answers collectives of the module alone."""
    return bool(module._join_config.enable)


def reduced_by(module: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters that `module` does not ignore."""
    return [parameter for name, parameter in module.module.named_parameters() if name not in module.parameters_to_ignore]


def are_flattened(parameters: Collection[Tensor]) -> bool:
    """True if some of `parameters` are FSDP1's, whose norm would be that of each worker's part."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp._common_utils")
    return fsdp is not None and any(getattr(parameter, fsdp.FSDP_FLATTENED, False) for parameter in parameters)


def module_averaging(parameters: Iterable[Tensor]) -> DistributedDataParallel | None:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    own = set(map(id, parameters))
    modules = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return next((module for module in modules if not own.isdisjoint(map(id, reduced_by(module)))), None)


def registered_comm_hooks(module: DistributedDataParallel) -> Collection[object]:
    return module._comm_hooks


# The private names of torch's FSDP2.
#
# `fully_shard` puts the parameters of a module into a group, which gathers and reduces together. Here such a group is a `Unit`. A name of
# an option is needed only where torch has the public method that sets the option.


Private = Any
"""An object of torch that has no public type."""

_FSDP = "torch.distributed.fsdp._fully_shard."
_MODULE, _STATE, _GROUP = f"{_FSDP}_fully_shard:FSDPModule.", f"{_FSDP}_fsdp_state:FSDPState.", f"{_FSDP}_fsdp_param_group:FSDPParamGroup."
_PARAMETER, _CONTEXT = f"{_FSDP}_fsdp_param:FSDPParam.", f"{_FSDP}_fsdp_state:FSDPStateContext."
_GROUPS = f"{_STATE}_fsdp_param_groups"
GLOO_SUMS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
_NEEDED = (
    *("torch.distributed._composable_state:_module_state_mapping", f"{_MODULE}_get_fsdp_state"),
    *(_GROUP + each for each in ("fsdp_params", "mesh_info", "post_backward", "_partial_reduce_output", "reduce_grads")),
    *(_PARAMETER + each for each in ("sharded_param", "_unsharded_param", "mp_policy")),
    *(f"{_FSDP}_fsdp_common:FSDPMeshInfo.{each}" for each in ("mesh", "shard_mesh_dim")),
    *(_STATE + each for each in ("_root_post_backward_final_callback", "_state_ctx")),
    *(_CONTEXT + each for each in ("all_states", "is_last_backward")),
)
_OPTIONS = {"gradient_divide_factor": "set_gradient_divide_factor", "_all_reduce_hook": "set_all_reduce_hook"}
"""What FSDP2 keeps of an option, by which the sum may be divided, and the public method that sets it: an older torch has neither."""


def fsdp_names() -> tuple[str, ...]:
    """Return the private names of FSDP2 that this package needs of the installed torch."""
    return *_NEEDED, _STATE + _groups_name(), *(_GROUP + kept for kept, setter in _OPTIONS.items() if _sets(setter))


def _groups_name() -> str:
    """Return the attribute of a state with its groups; an older torch has one group or none."""
    return "_fsdp_param_groups" if exists(_GROUPS) else "_fsdp_param_group"


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
        """The factor given to `FSDPModule.set_gradient_divide_factor`; None: the number of workers."""
        if getattr(self.group, "reduce_scatter_reduce_op", None) is not None:
            fix = "Leave set_reduce_scatter_divide_factor out, or install a torch that has FSDPModule.set_gradient_divide_factor."
            raise explain(UsageError, "set_reduce_scatter_divide_factor", expected="no factor in this torch", found="one", fix=fix)
        factor: float | None = self._option("gradient_divide_factor")
        return factor

    @property
    def reduces_by_hook(self) -> bool:
        return self._option("_all_reduce_hook") is not None

    @property
    def sum_dtype(self) -> torch.dtype:
        first = self.group.fsdp_params[0]
        policy, own = first.mp_policy, first.sharded_param.dtype
        # Before torch 2.15 the sum of a policy without reduce_dtype is added up in the computation's dtype, later in the parameter's.
        dtype: torch.dtype = policy.reduce_dtype or (policy.param_dtype if _sums_apart(first) else None) or own
        return dtype

    @property
    def is_summed_by_gloo(self) -> bool:
        """True if FSDP2 asks gloo for an average in these dtypes and gloo returns the sum. Measured: in torch 2.8, not 2.11."""
        on_cpu = GLOO_SUMS and self.group.mesh_info.mesh.device_type == "cpu"
        return on_cpu and self.shards > 1 and self.parameters[0].dtype in (torch.float32, torch.bfloat16)

    @property
    def reduces(self) -> bool:
        """True if a backward pass reduces the gradients; `FSDPModule.set_requires_gradient_sync` sets it."""
        return bool(self.group.reduce_grads)

    @reduces.setter
    def reduces(self, reduces: bool) -> None:
        self.modules[0].set_requires_gradient_sync(reduces, recurse=False)

    def _option(self, kept: str) -> Any:
        """Return FSDP2's value of an option; None in a torch without the option."""
        return getattr(self.group, kept) if _sets(_OPTIONS[kept]) else None

    def trainable(self) -> Iterator[Private]:
        return (each for each in self.group.fsdp_params if each.sharded_param.requires_grad)

    def held(self) -> list[Tensor]:
        """Return the unreduced gradients: one for each parameter that has one, or one of all."""
        found = [gradient for each in self.group.fsdp_params for gradient in unreduced(each)]
        partial = self.group._partial_reduce_output if self.copies > 1 else None
        return found if partial is None else [*found, partial]

    def drop(self) -> None:
        if self.copies > 1:
            self.group._partial_reduce_output = None
        for each in self.group.fsdp_params:
            drop(each)

    def fill(self, parameter: Private) -> None:
        """Add zeros for a parameter without a gradient, because another worker has one."""
        zeros = torch.zeros_like(parameter._unsharded_param, dtype=self.sum_dtype)
        if _sums_apart(parameter):
            parameter.unsharded_accumulated_grad = zeros
        else:
            parameter._unsharded_param.grad = zeros

    def after_forward(self, hook: Callable[..., None]) -> list[RemovableHandle]:
        """Call `hook` after the forward pass of each of its modules: from the first on, `whole_parameters` has them all."""
        return [module.register_forward_hook(hook) for module in self.modules]

    def whole_parameters(self) -> list[tuple[Private, Tensor]]:
        """Return the trainable parameters that were gathered once: as FSDP2 has them, and whole, as autograd accumulates into them."""
        return [(each, each._unsharded_param) for each in self.trainable() if hasattr(each, "_unsharded_param")]


def units_of(module: nn.Module) -> list[Unit]:
    return _units(module.modules())


def units_holding(parameters: Sequence[Tensor]) -> list[Unit]:
    own = set(map(id, parameters))
    return [unit for unit in _units(_modules()) if any(id(each) in own for each in unit.parameters)]


def _modules() -> list[nn.Module]:
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    return [module for each in _module_state_mapping.keyrefs() if (module := each()) is not None]


def reduce(units: Sequence[Unit]) -> None:
    """Reduce what `units` hold into ``.grad``, as FSDP2 does for a module that a backward pass did not reach.

    Without ``post_backward`` only a last backward pass could reduce the sum, and nobody knows which is last.
    """
    for unit in reversed(units):
        unit.group.post_backward()
    # The first state of a module that has run is the outermost one, whose pass ends those of all in it.
    states = [unit.modules[0]._get_fsdp_state() for unit in units]
    for root in {id(root): root for state in states for root in state._state_ctx.all_states[:1]}.values():
        _reduce_under(root)


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
    whole = getattr(parameter, "_unsharded_param", None)
    both = None if whole is None else whole.grad, parameter.unsharded_accumulated_grad if _sums_apart(parameter) else None
    return [gradient for gradient in both if gradient is not None]


def drop(parameter: Private) -> None:
    if _sums_apart(parameter):
        parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


def _sums_apart(parameter: Private) -> bool:
    """True if FSDP2 keeps the sum of micro-batches apart; from torch 2.15 on it is the whole parameter's ``.grad``."""
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
    for name in fsdp_names():
        require_name(name, "optimizer", "Use DistributedDataParallel in place of fully_shard.")


def _sets(setter: str) -> bool:
    return exists(_MODULE + setter)
