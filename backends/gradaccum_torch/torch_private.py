"""Every private name of torch that this package uses, and what breaks if torch drops it.

The rest of the package imports from here, so that a new torch is checked in one place. Where a name is used for each parameter or each
micro-batch, it is bound as it is: no Python function is put around it. Three names that torch looks for on the wrapped optimizer must
stay where they are: ``_step_supports_amp_scaling`` of `AccumulatingOptimizer`, and ``grad_scale`` and ``found_inf``, which a scaler sets.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._utils import _flatten_dense_tensors
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

Node = Any
"""A node of autograd's graph, for which torch has no common type."""
LocalVariables = Mapping[str, Any]
"""The local variables of a function of torch that is running."""

version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written into. Without it no outside change of ``.grad`` is noticed, nor how far an update came that raised."""

foreach_norm = torch._foreach_norm
"""Norms of many tensors in one call. Without it each tensor has a call of its own: slower, the same bits."""
foreach_div_ = torch._foreach_div_
"""Divides many tensors in place. Without it each is divided on its own: slower, the same bits."""
foreach_mul_ = torch._foreach_mul_
"""Multiplies many tensors in place. Without it each is multiplied on its own: slower, the same bits."""
foreach_sub_ = torch._foreach_sub_
"""Subtracts many tensors in place. Without it master weights on an accelerator are compared one by one."""
foreach_copy_ = torch._foreach_copy_
"""Copies many tensors into others. Without it master weights are rounded one by one."""

parameters_of: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""A module's own tables, to put other tensors in for the time of a replay. Public ``setattr`` does it too, more slowly, with its checks."""

without_dispatch_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes
"""Runs operations that a policy of recomputation must not count. Without it a policy over modules with buffers is off by these."""

Operation: type = torch._ops.OpOverload
"""An operation of ``torch.ops`` with its overload. Without it a list of other things would be a policy that keeps nothing."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""What an operation takes, gives and writes into. Without it a draw in place that has to be kept is refused by torch, late."""
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a view is of. Without it the transposed weight of a layer counts as memory that the loss keeps."""

engine: Callable[..., object] = torch.autograd.graph._engine_run_backward
"""A backward pass without the checks of incoming gradients. Without it `torch.autograd.backward` makes them for every micro-batch."""

flatten_nest: Callable[[Any], tuple[list[Any], Any]] = tree_flatten
unflatten_nest: Callable[[Iterable[Any], Any], Any] = tree_unflatten
"""The leaves of a nest of tuples, lists and dicts. Without them autograd does not notice a change of a tensor in a nest."""

flatten_dense: Callable[[Iterable[Tensor]], Tensor] = _flatten_dense_tensors
"""Copies dense tensors side by side into a vector. `torch.cat` of flat views does the same with more calls."""

STEP_HOOK_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STATE_HOOK_TABLES = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Where an optimizer keeps its hooks. If torch renames them, ``register_step_pre_hook`` and its like fail on a wrapped optimizer."""

NO_HOOKS: OrderedDict[int, Callable[..., Any]] = OrderedDict()


def _table(name: str) -> Callable[[torch.optim.Optimizer], OrderedDict[int, Callable[..., Any]]]:
    """An optimizer that never calls ``Optimizer.__init__``, as torch_optimizer's Lookahead, has no table: it runs no hook."""
    return lambda optimizer: getattr(optimizer, name, NO_HOOKS)


step_pre_hooks, step_post_hooks = map(_table, STEP_HOOK_TABLES)
save_pre_hooks, save_post_hooks, load_pre_hooks, load_post_hooks = map(_table, STATE_HOOK_TABLES)
"""One optimizer's hooks by number. Without them a hook that was registered on the wrapped optimizer is not run."""

all_step_pre_hooks: Mapping[int, Any] = _global_optimizer_pre_hooks
"""The hooks before each step of any optimizer. Without them a fused kernel might divide a gradient that such a hook reads undivided."""
all_step_post_hooks: Mapping[int, Any] = _global_optimizer_post_hooks
"""The hooks after each step of any optimizer. Without them an update whose hook raised would look half made, and be refused."""

DIVIDES_BY_GRAD_SCALE = "_step_supports_amp_scaling"
"""True on an optimizer whose ``step`` divides by ``optimizer.grad_scale``, as a fused one's does. Without it the division is a pass of its
own, and ``scaler.step`` unscales in Python before it calls the wrapped optimizer, which refuses that."""
CHILDREN_OF_SEQUENCE = "_schedulers"
"""An attribute that `SequentialLR` looks for on its children. If it is renamed, a sequence over a gated scheduler is not refused."""

when_backward_ends: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Has a function called as the running backward pass ends; torch forgets it if the pass raises. Without it neither a backward pass that
raised half-way is noticed, nor in the first window changes that torch does not count."""


AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The node of autograd's graph that adds into a leaf's ``.grad``. Without it the leaves of a loss are not found."""


storage_users: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors and other objects hold a storage. Without it `keep_own` cannot tell what the next backward pass writes over."""


def keep_own(leaf: Tensor) -> None:
    """Copy the ``.grad`` of `leaf` if somebody else may write into its memory.

    Autograd takes over the tensor that the first backward pass returns. A CUDA graph returns the same memory each time: its next replay
    would write over the sum. Memory that torch cannot resize is that of such a graph, or of another library, such as NumPy.
    """
    gradient = leaf.grad
    if gradient is None:
        return
    if type(gradient) is Tensor:
        storage = (gradient._values() if gradient.is_sparse else gradient).untyped_storage()
        own = storage.resizable() and storage_users(storage._cdata) <= 2  # The gradient and `storage`.
    else:  # FSDP's shards are parts of one tensor that nobody else writes.
        own = not is_sharded(gradient) or local(gradient).untyped_storage().resizable()
    # torch.compile loads this module for graphs. Those that it warms up or records return memory that looks like any other.
    if not own or (gradient.is_cuda and "torch._inductor.cudagraph_trees" in sys.modules):
        leaf.grad = gradient.clone()


def accumulation_hooks(leaf: Tensor) -> Collection[Callable[[Tensor], None]]:
    """The hooks that run after each accumulation into `leaf`.

    Without the table the parameters of a wrapped optimizer are not told from others where a large batch is split without it.
    """
    table: Mapping[int, Callable[[Tensor], None]] | None = getattr(leaf, "_post_accumulate_grad_hooks", None)
    return () if table is None else table.values()


def hook_tables() -> dict[str, OrderedDict[int, Callable[..., Any]]]:
    """Empty tables of hooks, as ``torch.optim.Optimizer.__init__`` makes them."""
    return {name: OrderedDict() for name in (*STEP_HOOK_TABLES, *STATE_HOOK_TABLES)}


def elements(gradient: Tensor) -> Tensor:
    """The numbers of a gradient as a dense tensor that shares its memory; a sparse one must be coalesced.

    Public ``values()`` gives a sparse gradient's numbers as a view with a graph. Without the private one, that of a detached gradient does.
    """
    return gradient._values() if gradient.is_sparse else gradient


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`: split over processes, so that its version does not count what torch writes into many at once.

    Without the attribute a sharded tensor looks whole, and an update of one that raised half-way looks as if it had not begun.
    """
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """The part of a `DTensor` that is in this process, or the tensor itself; public ``to_local()`` adds a graph and may wait."""
    whole: Any = tensor
    part: Tensor = getattr(whole, "_local_tensor", whole)
    return part


def mesh_of(tensor: Tensor) -> Any:
    """The `DeviceMesh` over which a `DTensor` is split: public, but a `Tensor` has no such attribute."""
    split: Any = tensor
    return split.device_mesh


def placements_of(tensor: Tensor) -> Any:
    """The placements of a `DTensor`, as `mesh_of`."""
    split: Any = tensor
    return split.placements


def engine_runs_backward() -> bool:
    """Whether a backward pass runs in autograd's engine, which calls what was given to `when_backward_ends`.

    FSDP calls the hooks of what it reduces after the backward pass, and a compiled backward pass runs outside of the engine. Without the
    number of the pass one that raised half-way is not noticed; without the compiler's flag a compiled one would seem to have raised.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    outside = compiled is None or not getattr(compiled, "in_compiled_autograd_region", False)
    return outside and torch._C._current_graph_task_id() >= 0


def untraced(function: Callable[..., object]) -> None:
    """Keep Dynamo from compiling `function` and what it calls: in a compiled training step it would trace what autograd calls.

    `torch.compiler.disable` does the same, but imports all of the compiler, and puts a frame around every call. Without either Dynamo
    traces the hooks, and breaks the graph of the training step at them.
    """
    frames: Any = eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    else:
        frames.skip_code(function.__code__)


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Tell a scheduler that the optimizer has made a step.

    Without the flag torch warns, after a checkpoint was loaded, that the scheduler moves before the optimizer.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def tracker_of(scaler: torch.amp.GradScaler) -> Tensor:
    """The scaler's growth tracker, int32, shape ``()``.

    Without it the user's own loop of ``scaler.step`` and ``scaler.update`` cannot be followed.
    """
    tracker = scaler._growth_tracker
    assert tracker is not None
    return tracker


def scale_of(scaler: torch.amp.GradScaler) -> Tensor:
    """The scaler's scale on its device, float32, shape ``()``; public ``get_scale()`` waits for the device at every micro-batch."""
    scale = scaler._get_scale_async()
    assert scale is not None
    return scale


def pending_update(scaler: torch.amp.GradScaler) -> Mapping[int, Any]:
    """What ``scaler.step`` noted for the next ``scaler.update``, which replaces this table by an empty one.

    Without it nobody can tell whether ``scaler.update`` is still to come, and a saved scale may be the one before it.
    """
    return scaler._per_optimizer_states


def found_inf_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Collection[Tensor]:
    """Where ``scaler.update`` looks for an overflow of `optimizer`, a tensor for each device.

    Without it the scaler cannot be told of a window's overflow, and its own ``update`` does not move the scale.
    """
    return scaler._found_inf_per_device(optimizer).values()


def scaler_state(scaler: torch.amp.GradScaler, scale: float, tracker: int) -> dict[str, Any]:
    """A state for ``scaler.load_state_dict`` with its own factors. If its keys are renamed, that call raises."""
    return {
        "scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": tracker,
    }


def unscaling_caller(frames: int) -> LocalVariables | None:
    """The local variables of ``GradScaler._unscale_grads_``, if that runs `frames` frames above this one.

    If torch renames the method, a scaler that was not given as ``loss_scale=`` changes the window's sum unnoticed.
    """
    frame = sys._getframe(frames)
    return frame.f_locals if frame.f_code.co_name == "_unscale_grads_" else None


def model_state_caller(function: str, frames: int) -> LocalVariables | None:
    """The local variables of `function` of `torch.distributed.checkpoint.state_dict`, if that runs `frames` frames above.

    The functions are ``_get_optim_state_dict`` and ``_init_optim_state``. If torch renames them, a checkpoint that torch makes of model and
    optimizer together has the inner optimizer's state alone.
    """
    frame = sys._getframe(frames)
    known = frame.f_code.co_name == function and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
    return frame.f_locals if known else None


def initialize_state(inner: torch.optim.Optimizer) -> None:
    """Give `inner` the state that a step makes, as torch does it before it reads or loads one.

    Without the function a checkpoint that torch makes of model and optimizer together cannot be loaded into a fresh optimizer.
    """
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(inner)


def is_sequence_calling(frames: int) -> bool:
    """Whether a method of `SequentialLR` runs `frames` frames above this one.

    If its methods no longer call themselves ``self``, a sequence over a gated scheduler is not refused.
    """
    return isinstance(sys._getframe(frames).f_locals.get("self"), torch.optim.lr_scheduler.SequentialLR)


def input_dtypes(node: Node) -> set[torch.dtype]:
    """The dtypes of what a node's function gave, and so of the gradients that it is handed.

    Without them the linearity check does not know which rounding to allow for.
    """
    return {meta.dtype for meta in node._input_metadata}


def function_name(node: Node) -> str:
    """The name of the `torch.autograd.Function` of a node. Without it the linearity check calls a culprit by the class of its node."""
    return str(type(node)._forward_cls.__name__)


def leave_reduction_out(module: DistributedDataParallel, hook_error: Callable[[], Exception]) -> None:
    """Let `module` never reduce gradients, also where the user's loop sets ``require_backward_grad_sync`` for a last micro-batch.

    A communication hook would never be called, so `hook_error` is raised where one is registered. Without the private flag,
    ``static_graph=True`` reduces in its first backward pass.
    """

    def refuse(*_: object, **__: object) -> None:
        raise hook_error()

    _wait(module)
    module.register_forward_pre_hook(_wait)
    module._static_graph_delay_allreduce_enqueued = True
    vars(module)["register_comm_hook"] = refuse


def _wait(module: torch.nn.Module, *_: object) -> None:
    module.require_backward_grad_sync = False  # type: ignore[assignment]


def was_sharded(parameter: Tensor) -> bool:
    """True if ``_pre_dp_module_transform`` made it of a `DTensor`, for `DistributedDataParallel`.

    Without the attribute the norm of such a model is silently that of a worker's own part.
    """
    return hasattr(parameter, "_st_info")


def send_buffers(module: DistributedDataParallel) -> None:
    """Send the first worker's buffers to all, as a forward pass of `module` would, and let none do it; collective.

    A forward pass is no meeting of all workers: another one may be at the end of its window. Without the private method the buffers of
    workers drift apart.
    """
    module.require_forward_param_sync = True
    if module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        module._sync_buffers()  # type: ignore[no-untyped-call]
    module.require_forward_param_sync = False


is_in_join: Callable[[DistributedDataParallel], bool] = attrgetter("_join_config.enable")
"""Whether a loop runs under ``module.join()``. Without it such a loop hangs where workers have unequally many micro-batches."""


def reduced_by(module: DistributedDataParallel) -> list[Tensor]:
    """The parameters that `module` has not been told to ignore. Without the set of names, ignored ones are averaged over the workers."""
    return [parameter for name, parameter in module.module.named_parameters() if name not in module.parameters_to_ignore]


def is_flattened(parameter: Tensor) -> bool:
    """Whether `parameter` is torch's FSDP1's. Without the attribute its norm would be that of each worker's part."""
    return getattr(parameter, "_fsdp_flattened", False)


def module_averaging(parameters: Iterable[Tensor]) -> DistributedDataParallel | None:
    """The module that averages gradients of any of `parameters` in each backward pass: torch keeps no list of them, but Python does."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    own = set(map(id, parameters))
    modules: list[DistributedDataParallel] = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return next((module for module in modules if not own.isdisjoint(map(id, reduced_by(module)))), None)


def registered_comm_hooks(module: DistributedDataParallel) -> Collection[object]:
    """The communication hooks of `module`. Without it, a hook that is never called would not be refused."""
    return module._comm_hooks
