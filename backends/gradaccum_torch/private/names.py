"""The private names of torch that this package uses, and what a torch without the name
costs the user.

Every name has a fallback or is refused by name, as `LOST` says; only without
``Tensor._version`` the import raises. Three names that torch looks for on the wrapped
optimizer stand elsewhere: its ``_step_supports_amp_scaling``, ``grad_scale`` and
``found_inf``.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import unwrap
from itertools import repeat
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError
from gradaccum.kit import explain

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
Node = Any
"""A node of autograd's graph, for which torch has no common type."""
LocalVariables = Mapping[str, Any]
"""The local variables of a function of torch that is running."""

LOST: dict[str, str] = {}
"""By private name (``module:object.attribute``): what the user loses where the
installed torch lacks the name.
"""


@cache
def exists(name: str) -> bool:
    """True if the installed torch has `name`; an attribute of an instance exists if a
    method of its class names it.
    """
    try:
        resolve_name(name)
    except ImportError:
        return False
    except AttributeError:
        owner, _, attribute = name.rpartition(".")
        return (
            ":" in owner
            and exists(owner)
            and any(attribute in names for names in _names_in(resolve_name(owner)))
        )
    return True


def _names_in(owner: Any) -> Iterator[tuple[Any, ...]]:
    for each in (owner, *vars(owner).values()):
        code = getattr(unwrap(each) if callable(each) else each, "__code__", None)
        if code is not None:
            yield code.co_names + code.co_consts


def _found(name: str, lost: str, otherwise: Any = None) -> Any:
    LOST[name] = lost
    return resolve_name(name) if exists(name) else otherwise


def require_name(name: str, argument: str, fix: str) -> None:
    """Raise unless the installed torch has `name`, without which `argument` would be
    silently wrong.
    """
    if not exists(name):
        found = f"torch {torch.__version__}, which lacks it"
        raise explain(
            UsageError,
            argument,
            expected=f"a torch that has {name.replace(':', '.')}",
            found=found,
            fix=fix,
        )


if not exists("torch:Tensor._version"):
    raise ImportError(
        "gradaccum_torch needs torch.Tensor._version, a private name that torch"
        f" {torch.__version__} lacks"
    )
version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written into. Nothing else tells an outside change of
``.grad``, nor how far an update came that raised.
"""


def _foreach(method: str, lost: str) -> Any:
    """Return ``torch._foreach_`` and `method`, in place, or a call for each tensor: the
    same bits.
    """
    single = getattr(Tensor, method)

    def one_by_one(tensors: Sequence[Tensor], others: Any) -> None:
        for tensor, other in zip(
            tensors,
            others if isinstance(others, (list, tuple)) else repeat(others),
            strict=False,
        ):
            single(tensor, other)

    return _found(f"torch:_foreach_{method}", lost, one_by_one)


def _norms(tensors: Iterable[Tensor], order: float = 2) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


foreach_norm: Callable[..., Sequence[Tensor]] = _found(
    "torch:_foreach_norm", "Norms take a call for each tensor, which is slower.", _norms
)
foreach_add_ = _foreach(
    "add_",
    "With `separate_sums` a micro-batch is added with a call for each tensor, which is"
    " slower.",
)
foreach_div_ = _foreach(
    "div_",
    "The division of a window's sum takes a call for each tensor, which is slower.",
)
foreach_mul_ = _foreach(
    "mul_", "Clipping takes a call for each tensor, which is slower."
)
foreach_sub_ = _foreach(
    "sub_", "Master weights are compared with a call for each tensor, which is slower."
)
foreach_copy_ = _foreach(
    "copy_", "Master weights are rounded with a call for each tensor, which is slower."
)
flattened: Callable[[Sequence[Tensor]], Tensor] = _found(
    "torch._utils:_flatten_dense_tensors",
    "Small tensors take a call each, which is slower.",
    lambda each: torch.cat([*map(Tensor.ravel, each)]),
)
"""Copies several dense tensors of one dtype side by side."""
unflattened: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = _found(
    "torch._utils:_unflatten_dense_tensors",
    "Small sums take a call each, which is slower.",
    lambda flat, each: [
        part.view(like.shape)
        for part, like in zip(
            flat.split(list(map(Tensor.numel, each))), each, strict=True
        )
    ],
)
"""Returns the parts of a flat tensor, in the shapes of `each`."""

_BUFFERS = "torch.nn:Module._buffers"
LOST[_BUFFERS] = (
    "A call of a large batch leaves a buffer that was None as it is after a first pass."
)


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own table of buffers, or a copy without those that are None."""
    return (
        module._buffers
        if exists(_BUFFERS)
        else dict(module.named_buffers(recurse=False, remove_duplicate=False))
    )


DISPATCH = "torch.utils._python_dispatch:TorchDispatchMode"
DispatchMode: Any = _found(DISPATCH, "`gradaccum.verify` raises.", object)
"""Shows the operations that draw random numbers."""


DIVIDES_BY_GRAD_SCALE = "_step_supports_amp_scaling"
"""True on an optimizer whose ``step`` divides by ``optimizer.grad_scale``, as a fused
one's does.
"""
LOST[f"torch.optim:Adam.{DIVIDES_BY_GRAD_SCALE}"] = (
    "A fused optimizer's division is a pass of its own, which is slower."
)
LOST[f"torch.amp:GradScaler.{DIVIDES_BY_GRAD_SCALE}"] = (
    "``scaler.step(opt)`` is refused; write ``opt.step()``."
)

_ENGINE = "torch.autograd:Variable._execution_engine.queue_callback"
LOST[_ENGINE] = "A backward pass that raised is not noticed."


def is_leaf_node(node: Node) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")


_NUMBERS = {torch.int64, torch.float64}
"""The dtypes of the tensors that autograd makes of Python's numbers."""
_SUMS = ("Sum", "Dot", "Trace")
_OF_ONE = ("Neg", "ToCopy", "Squeeze", "View", "Mul")
_OF_SEVERAL = ("Add", "Sub")
_REDUCED_BY_SUM = 2
"""The number that torch has for ``reduction="sum"``."""


class Division(NamedTuple):
    """The division of a loss by a Python number."""

    divisor: float
    terms: int
    """The number of terms that are divided."""
    of_sums: bool
    """The terms are sums over something, which the division turns into means."""


def last_division(loss: Tensor) -> Division | None:
    """Return the last operation of `loss`, if it divides and torch tells."""
    node: Node = loss.grad_fn
    divisor = None if node is None else _divisor_of(node)
    if divisor is None:
        return None
    terms = _terms_of(node.next_functions[0][0])
    return Division(divisor, len(terms), all(map(_is_sum, terms)))


def _divisor_of(node: Node) -> float | None:
    kind = _kind_of(node)
    try:
        # What a node saves for its backward pass has an attribute in torch 2.6 to 2.13,
        # which raises once it is freed.
        other = node._saved_other if kind in ("Div", "Mul") else None
    except (AttributeError, RuntimeError):
        return None
    if not isinstance(other, Tensor) or not other.is_cpu or other.ndim:
        return None
    if other.dtype not in _NUMBERS or other.requires_grad:
        return None
    number = float(other)
    if kind == "Div":
        return number
    # A half belongs to many losses, and is hardly ever what is left of another loop.
    return 1 / number if number not in (0.0, 0.5) else None


def _terms_of(node: Node) -> list[Node]:
    """Return what the terms of a sum were computed by, at most some hundred."""
    terms, nodes = list[Node](), [node]
    while nodes and len(terms) < 100:
        node = nodes.pop()
        if node is not None and _kind_of(node) in _OF_SEVERAL:
            nodes += [before for before, _ in node.next_functions]
        elif node is not None:
            terms.append(node)
    return terms


def _is_sum(node: Node) -> bool:
    while _kind_of(node) in _OF_ONE and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    reduction = getattr(node, "_saved_reduction", None)
    return _kind_of(node) in _SUMS or reduction == _REDUCED_BY_SUM


def _kind_of(node: Node) -> str:
    return str(node.name()).partition("Backward")[0]


for _name in (_USERS := ("torch:_C._storage_Use_Count", "torch:UntypedStorage._cdata")):
    LOST[_name] = (
        "The first gradient of each parameter in a window is copied, which is slower."
    )
_KNOWS_USERS = all(map(exists, _USERS))


_TREES = "torch._inductor.cudagraph_trees"
"""torch.compile loads this module for graphs. Those that it warms up or records return
memory that looks like any other.
"""


def owns_memory(gradient: Tensor) -> bool:
    """True if nobody else writes into the memory of `gradient`, which autograd takes
    over from the first backward pass.

    A CUDA graph returns the same memory each time. Memory that torch cannot resize is
    such a graph's, or another library's.
    """
    if type(gradient) is Tensor:
        storage = (
            gradient.untyped_storage()
            if _KNOWS_USERS and not gradient.is_sparse
            else None
        )
        # `gradient` and `storage`.
        own = (
            storage is not None
            and storage.resizable()
            and torch._C._storage_Use_Count(storage._cdata) <= 2
        )
    else:  # FSDP's shards are parts of one tensor that nobody else writes.
        own = not is_sharded(gradient) or local(gradient).untyped_storage().resizable()
    return own and not (gradient.is_cuda and _TREES in sys.modules)


def may_be_static(gradient: Tensor) -> bool:
    """True if the memory of `gradient` may be that of a CUDA graph.

    A sparse gradient shares its indices with the user's batch, and its values with
    another embedding that is added to the same activations.
    """
    if not gradient.is_sparse:
        return not owns_memory(gradient)
    in_graph = gradient.is_cuda and _TREES in sys.modules
    return in_graph or not elements(gradient).untyped_storage().resizable()


def keep_own(leaf: Tensor) -> None:
    """Copy the ``.grad`` of `leaf` if somebody else may write into its memory."""
    if leaf.grad is not None and not owns_memory(leaf.grad):
        leaf.grad = leaf.grad.clone()


_VALUES = "torch:Tensor._values"
LOST[_VALUES] = "Sparse gradients raise."


def elements(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient as a dense tensor that shares its memory; a
    sparse gradient's entries.

    Public ``values()`` refuses a sum that torch has not marked as coalesced.
    """
    if not gradient.is_sparse:
        return gradient
    require_name(_VALUES, "gradients", "Write nn.Embedding(..., sparse=False).")
    return gradient._values()


def holds_numbers(gradient: Tensor) -> bool:
    """True if the part of `gradient` in this process is not all zeros; waits for the
    device.
    """
    return bool(local(elements(gradient)).any())


def is_sharded(tensor: Tensor) -> bool:
    """True if `tensor` is a `DTensor`, whose version does not count what torch writes
    into many tensors at once.
    """
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a `DTensor` in this process, without a graph, or the tensor
    itself.
    """
    if not is_sharded(tensor):
        return tensor
    whole: Any = tensor
    # With gradients ``to_local`` gives a view that is not the part itself.
    with torch.no_grad():
        part: Tensor = whole.to_local()
    return part


def mesh_of(tensor: Tensor) -> Any:
    split: Any = tensor
    return split.device_mesh


def at_the_end_of_backward(function: Callable[[], None]) -> bool:
    """Schedule a callback for the end of the current backward pass; False outside of
    autograd's engine, which would never call it.

    FSDP calls the hooks of what it reduces after the backward pass, and a compiled
    backward pass runs outside of the engine.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and getattr(compiled, "in_compiled_autograd_region", True):
        return False
    try:
        # Torch forgets it if the pass raises.
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except (AttributeError, RuntimeError):
        return False
    return True


LOST["torch._dynamo.compiled_autograd:in_compiled_autograd_region"] = (
    "With compiled autograd, a backward pass that raised is not noticed."
)

LOST["torch._dynamo:OptimizedModule._orig_mod"] = (
    "A large batch beside a compiled module hooks all modules, of which torch warns."
)

FRAMES = "torch._C._dynamo:eval_frame"
_frames = _found(
    FRAMES,
    "A compiled training step has a graph break at each parameter, which is slower.",
)


def untraced(function: Callable[..., object]) -> None:
    """Keep Dynamo from compiling `function` and what it calls.

    `torch.compiler.disable` does the same, but imports all of the compiler, and puts a
    frame around every call.
    """
    if hasattr(_frames, "_FrameExecStrategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(
            function.__code__, _frames._FrameExecStrategy(skip, skip)
        )
    elif hasattr(_frames, "skip_code"):
        _frames.skip_code(function.__code__)


def untraced_within(function: _F) -> _F:
    """Return `function`, kept from Dynamo with all that it calls; before torch 2.8 the
    function alone.
    """
    if hasattr(_frames, "_FrameExecStrategy"):
        untraced(function)
        return function

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        compiles = "torch._dynamo" in sys.modules
        return (torch.compiler.disable(function) if compiles else function)(  # type: ignore[no-untyped-call]
            *args, **kwargs
        )

    untraced(outside)
    return cast(_F, outside)


LOST["torch.optim.lr_scheduler:LRScheduler._opt_called"] = (
    "torch may warn that a scheduler moves before the optimizer, where it does not."
)


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    optimizer._opt_called = True  # type: ignore[attr-defined]


SCALER = tuple(
    f"torch.amp:GradScaler.{each}"
    for each in (
        "_growth_tracker",
        "_get_scale_async",
        "_per_optimizer_states",
        "_found_inf_per_device",
    )
)
LOST.update(
    dict.fromkeys(
        SCALER,
        "``loss_scale=`` takes no `torch.amp.GradScaler`; write"
        " ``loss_scale=gradaccum.DynamicLossScale()``.",
    )
)


def tracker_of(scaler: torch.amp.GradScaler) -> Tensor:
    """Return the scaler's growth tracker, int32, shape ``()``."""
    tracker = scaler._growth_tracker
    assert tracker is not None
    return tracker


def scale_of(scaler: torch.amp.GradScaler) -> Tensor:
    """Return the scaler's scale on its device, float32, shape ``()``; public
    ``get_scale()`` waits for the device.
    """
    scale = scaler._get_scale_async()
    assert scale is not None
    return scale


def pending_update(scaler: torch.amp.GradScaler) -> Mapping[int, Any]:
    return scaler._per_optimizer_states


def found_inf_of(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> Collection[Tensor]:
    return scaler._found_inf_per_device(optimizer).values()


def scaler_state(
    scaler: torch.amp.GradScaler, scale: float, tracker: int
) -> dict[str, Any]:
    return {
        "scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": tracker,
    }


_UNSCALES = "torch.amp:GradScaler._unscale_grads_"
LOST[_UNSCALES] = (
    "A method of a GradScaler's subclass that reads ``opt.param_groups`` is refused."
)


def unscaling_caller(frames: int) -> LocalVariables | None:
    """Return the local variables of ``GradScaler._unscale_grads_`` if it runs `frames`
    frames above.

    If torch has renamed it, any method of a scaler counts.
    """
    frame = sys._getframe(frames)
    if exists(_UNSCALES):
        return frame.f_locals if frame.f_code.co_name == "_unscale_grads_" else None
    return (
        frame.f_locals
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler)
        else None
    )


_MODEL_STATE = "torch.distributed.checkpoint.state_dict"
_REFUSED = (
    "``get_optimizer_state_dict`` and its like refuse a wrapped optimizer; save"
    " ``opt.state_dict()`` of each worker."
)
LOST.update(
    {
        f"{_MODEL_STATE}:{each}": _REFUSED
        for each in ("_get_optim_state_dict", "_init_optim_state")
    }
)


def model_state_caller(function: str, frames: int) -> LocalVariables | None:
    """Return the local variables of ``_get_optim_state_dict`` or ``_init_optim_state``
    of torch's checkpoints, `frames` frames above.
    """
    frame = sys._getframe(frames)
    if frame.f_globals.get("__name__") != _MODEL_STATE:
        return None
    require_name(
        f"{_MODEL_STATE}:{function}",
        _MODEL_STATE,
        "Save opt.state_dict() of each worker, and load it by opt.load_state_dict().",
    )
    return frame.f_locals if frame.f_code.co_name == function else None


def initialize_state(inner: torch.optim.Optimizer) -> None:
    """Make the state of `inner` as torch does before it reads or loads one: by a step
    of zeros, at a learning rate of 0.
    """
    parameters = [
        parameter for group in inner.param_groups for parameter in group["params"]
    ]
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
    return isinstance(
        sys._getframe(frames).f_locals.get("self"),
        torch.optim.lr_scheduler.SequentialLR,
    )


_DTYPES = "torch:_C._functions.AccumulateGrad._input_metadata"
LOST[_DTYPES] = (
    "`gradaccum.verify` takes all numbers for bfloat16, and so does not see what is"
    " smaller than that rounding."
)


def input_dtypes(node: Node) -> set[torch.dtype]:
    """Return the dtypes of a node's outputs, and so of its incoming gradients; a coarse
    dtype if torch does not say.
    """
    return (
        {meta.dtype for meta in node._input_metadata}
        if exists(_DTYPES)
        else {torch.bfloat16}
    )


_STATIC = (
    "torch.nn.parallel:DistributedDataParallel._static_graph_delay_allreduce_enqueued"
)
_HOOKS = "torch.nn.parallel:DistributedDataParallel._comm_hooks"
_SEND = "torch.nn.parallel:DistributedDataParallel._sync_buffers"
_JOIN = "torch.distributed.algorithms.join:Joinable._join_config"
LOST[_STATIC] = (
    "``module=`` takes no DistributedDataParallel with ``static_graph=True``."
)
LOST[_HOOKS] = (
    "``module=`` takes no DistributedDataParallel; give the optimizer"
    " ``process_group=`` in its place."
)
LOST[_SEND] = "Buffers are sent to the other workers one by one, which is slower."
LOST[_JOIN] = (
    "Each window's end looks for a ``join()`` through all objects of Python, which is"
    " slower."
)


_WAITING: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
"""How many optimizers keep a module from reducing gradients."""


def require_static_graph_flag(module: DistributedDataParallel) -> None:
    if module.static_graph:
        require_name(_STATIC, "module", "Leave static_graph=True out.")


def leave_reduction_out(
    module: DistributedDataParallel, hook_error: Callable[[], Exception]
) -> Callable[[], None]:
    """Keep `module` from reducing gradients, also where the user's loop sets
    ``require_backward_grad_sync``; return a function that lets it reduce again.

    A communication hook would never be called: `hook_error` is raised if one is
    registered.
    """
    _WAITING[module] = _WAITING.get(module, 0) + 1

    def refuse(*_: object, **__: object) -> None:
        raise hook_error()

    _wait(module)
    handle = module.register_forward_pre_hook(_wait)
    module._static_graph_delay_allreduce_enqueued = True
    vars(module)["register_comm_hook"] = refuse
    reference = weakref.ref(module)

    def reduce_again() -> None:
        handle.remove()
        living = reference()
        if living is None:
            return
        _WAITING[living] -= 1
        if _WAITING[living] == 0:
            vars(living).pop("register_comm_hook", None)
            living._static_graph_delay_allreduce_enqueued = False
            vars(living)["require_backward_grad_sync"] = True
            vars(living)["require_forward_param_sync"] = True

    return reduce_again


def waiting_modules() -> list[DistributedDataParallel]:
    """Return the modules that an optimizer keeps from reducing gradients."""
    return [module for module, optimizers in _WAITING.items() if optimizers]


def _wait(module: torch.nn.Module, *_: object) -> None:
    vars(module)["require_backward_grad_sync"] = (
        False  # `Module.__setattr__` takes longer than all else here.
    )


_TENSOR_PARALLEL = "torch.distributed.tensor.parallel.ddp"
_WAS_SHARDED = f"{_TENSOR_PARALLEL}:_reconstruct_dtensor._st_info"
LOST[_WAS_SHARDED] = (
    "``module=`` takes no DistributedDataParallel where that module of torch is"
    " imported."
)


def were_sharded(parameters: Iterable[Tensor]) -> bool:
    """True if ``_pre_dp_module_transform`` made, or may have made, some of a `DTensor`
    for `DistributedDataParallel`.
    """
    if _TENSOR_PARALLEL not in sys.modules:
        return False
    return not exists(_WAS_SHARDED) or any(
        hasattr(parameter, "_st_info") for parameter in parameters
    )


def send_buffers(module: DistributedDataParallel) -> None:
    """Send the first worker's buffers to all, as a forward pass of `module` would, and
    keep forward passes from it; collective.

    A forward pass is no meeting of all workers: another worker may be at the end of its
    window.
    """
    vars(module)["require_forward_param_sync"] = True
    if module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        if exists(_SEND):
            module._sync_buffers()  # type: ignore[no-untyped-call]
        else:
            _send_one_by_one(module)
    vars(module)["require_forward_param_sync"] = False


def _send_one_by_one(module: DistributedDataParallel) -> None:
    first = dist.get_global_rank(module.process_group, 0)
    for name, buffer in module.module.named_buffers():
        if name not in module.parameters_to_ignore:
            dist.broadcast(buffer, first, group=module.process_group)


def is_in_join(module: DistributedDataParallel) -> bool:
    """True if a loop runs, or may run, under ``module.join()``, which answers
    collectives of the module alone.
    """
    if exists(_JOIN):
        return bool(module._join_config.enable)
    return any(_alive(Join))


def reduced_by(module: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters that `module` does not ignore; if torch lacks the name,
    ignored ones are averaged over the workers.
    """
    return [
        parameter
        for name, parameter in module.module.named_parameters()
        if name not in module.parameters_to_ignore
    ]


_FLATTENED = "torch.distributed.fsdp._common_utils:FSDP_FLATTENED"
LOST[_FLATTENED] = (
    "Each `gradaccum.wrap` looks for FSDP1 through all objects of Python, which is"
    " slower."
)


def are_flattened(parameters: Collection[Tensor]) -> bool:
    """True if some of `parameters` are FSDP1's, whose norm would be that of each
    worker's part.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or exists(_FLATTENED):
        return any(
            getattr(parameter, resolve_name(_FLATTENED), False)
            for parameter in parameters
        )
    own = set(map(id, parameters))
    return any(
        not own.isdisjoint(map(id, module.parameters()))
        for module in _alive(fsdp.FullyShardedDataParallel)
    )


def _alive(kind: type[_T]) -> Iterator[_T]:
    """Yield the living objects of this type, from Python's garbage collector."""
    return (each for each in gc.get_objects() if issubclass(type(each), kind))


def processes() -> int:
    """Return how many processes torch.distributed has brought up; 1 without it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def registered_comm_hooks(module: DistributedDataParallel) -> Collection[object]:
    require_name(
        _HOOKS,
        "module",
        "Write process_group= in place of module=, without DistributedDataParallel.",
    )
    return module._comm_hooks
