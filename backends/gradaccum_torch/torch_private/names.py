"""The private names of torch that this package uses. FSDP2's private names are in
`fsdp`.

Three more private names are used in other files, because torch reads them from the
wrapped optimizer: ``_step_supports_amp_scaling``, ``grad_scale`` and ``found_inf``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

_F = TypeVar("_F", bound=Callable[..., Any])
Node = Any
"""A node of autograd's graph. torch has no common type for all nodes."""

version: Callable[[Tensor], int] = attrgetter("_version")
"""Returns how many times a tensor has been modified in place. There is no other way to
detect that other code has modified ``.grad``.
"""
flattened: Callable[[Sequence[Tensor]], Tensor] = _flatten_dense_tensors
"""Copies several dense tensors of one dtype into one flat tensor."""
unflattened: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = (
    _unflatten_dense_tensors
)
"""Splits a flat tensor into tensors with the same shapes as the tensors in the second
argument.
"""


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's own buffers, keyed by name, without the buffers of its
    submodules.
    """
    return module._buffers


_queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def call_at_the_end_of_backward(function: Callable[[], None]) -> bool:
    """Make autograd call `function` at the end of the running backward pass, unless the
    pass raises an error. Return False if autograd's engine is not running, in which
    case `function` is never called.

    The engine is not running in hooks that FSDP2 calls after the pass, nor in a
    compiled backward pass.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        return False
    try:
        _queue_callback(function)
    except RuntimeError:
        return False
    return True


_NUMBERS = {torch.int64, torch.float64}
"""The dtypes of the tensors that autograd creates for Python numbers."""
_SUMS = ("Sum", "Dot", "Trace")
_OF_ONE = ("Neg", "ToCopy", "Squeeze", "View", "Mul")
_OF_SEVERAL = ("Add", "Sub")
_REDUCED_BY_SUM = 2
"""The value that a node of autograd's graph stores for ``reduction="sum"``."""


class Division(NamedTuple):
    """A record of the division of a loss by a Python number. It describes the last
    operation in the computation of the loss.
    """

    divisor: float
    terms: int
    """The number of terms in the sum that was divided, or 1 if the dividend is not a
    sum of terms.
    """
    of_sums: bool
    """Whether each term of the divided sum is itself a sum over items, such as a summed
    loss. If so, the division may compute the mean of the loss over the items. A
    dividend that is not a sum of terms counts as a single term.
    """


def last_division(loss: Tensor) -> Division | None:
    """If the last operation in the computation of `loss` is a division by a number,
    return a record of it. Otherwise return None. A multiplication by a number other
    than 1/2 counts as a division by the reciprocal.
    """
    node: Node = loss.grad_fn
    divisor = None if node is None else _divisor_of(node)
    if divisor is None:
        return None
    terms = _terms_of(node.next_functions[0][0])
    return Division(divisor, len(terms), all(map(_is_sum, terms)))


def _divisor_of(node: Node) -> float | None:
    kind = _kind_of(node)
    if kind not in ("Div", "Mul"):
        return None
    try:
        # If a node's saved tensors have already been freed, reading them raises an
        # error.
        other = node._saved_other
    except (AttributeError, RuntimeError):
        return None
    if not isinstance(other, Tensor) or not other.is_cpu or other.ndim:
        return None
    if other.dtype not in _NUMBERS or other.requires_grad:
        return None
    number = float(other)
    if kind == "Div":
        return number
    # Ignore a factor of 1/2. It is part of many losses, and rarely comes from a loop
    # that accumulates gradients.
    return 1 / number if number not in (0.0, 0.5) else None


def is_scaled_by(scaler: torch.amp.GradScaler, loss: Tensor) -> bool:
    """True if the last operation on `loss` was ``scaler.scale``."""
    try:
        other = loss.grad_fn._saved_other  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # See `_divisor_of`.
        return False
    return other is not None and other is scaler._scale


def _terms_of(node: Node) -> list[Node]:
    """If `node` computed a sum, return the nodes that computed its terms. Otherwise
    return only `node`. The search stops after about 100 terms.
    """
    terms = list[Node]()
    nodes = [node]
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


def owns_memory(gradient: Tensor) -> bool:
    """True if `gradient` has its own memory, to which no other code can write.

    A gradient may share its memory with other tensors, because autograd does not copy
    the first gradient that it puts into ``.grad``. For example, a CUDA graph writes its
    gradients to the same memory in every replay.
    """
    if gradient.is_cuda and "torch._inductor.cudagraph_trees" in sys.modules:
        # The gradient may be in the memory of a CUDA graph, which cannot be
        # distinguished from other memory.
        return False
    if type(gradient) is not Tensor:
        # Gradients that FSDP2 has sharded are parts of one large tensor, to which no
        # other code writes.
        return not is_sharded(gradient) or local(gradient).untyped_storage().resizable()
    if gradient.is_sparse:
        return False
    storage = gradient.untyped_storage()
    # Two of the references to the storage are held by the variables `gradient` and
    # `storage`.
    users = torch._C._storage_Use_Count(storage._cdata)
    return users <= 2 and storage.resizable()


def keep_own(leaf: Tensor) -> None:
    """Replace ``leaf.grad`` with a copy if other code may write to the memory of
    ``leaf.grad``.
    """
    if leaf.grad is not None and not owns_memory(leaf.grad):
        leaf.grad = leaf.grad.clone()


class Versions:
    """Records how many times each of `tensors` has been modified in place."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._noted_versions = [(tensor, version(tensor)) for tensor in tensors]

    def moved(self) -> bool:
        """True if a tensor has been modified since this object was created."""
        return any(
            version(tensor) != noted_version
            for tensor, noted_version in self._noted_versions
        )


def elements(tensor: Tensor) -> Tensor:
    """Return the elements of a gradient as a dense tensor that shares the gradient's
    memory. The elements of a sparse gradient are its values.

    The public ``values()`` cannot be used, because it raises an error for a sum that
    torch has not marked as coalesced.
    """
    return tensor._values() if tensor.is_sparse else tensor


def is_sharded(tensor: Tensor) -> bool:
    """True if `tensor` is a `DTensor`."""
    if type(tensor) is Tensor:
        return False
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a `DTensor` that this process stores, as a detached tensor.
    Any other tensor is returned unchanged.
    """
    if not is_sharded(tensor):
        return tensor
    sharded_tensor: Any = tensor
    # While gradients are enabled, ``to_local`` returns a view instead of the local part
    # itself.
    with torch.no_grad():
        part: Tensor = sharded_tensor.to_local()
    return part


def mesh_of(tensor: Tensor) -> Any:
    sharded_tensor: Any = tensor
    return sharded_tensor.device_mesh


def _frames() -> Any:
    from torch._C._dynamo import eval_frame

    return eval_frame


def untraced(function: Callable[..., object]) -> None:
    """Prevent Dynamo from compiling `function` and, from torch 2.8 on, everything that
    it calls.

    `torch.compiler.disable` does the same, but it imports the whole compiler and adds a
    stack frame to every call.
    """
    frames = _frames()
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        frames.set_code_exec_strategy(function.__code__, strategy)
    else:  # Versions of torch before 2.8 have only this function.
        frames.skip_code(function.__code__)


def untraced_within(function: _F) -> _F:
    """Return a function that behaves like `function`. Dynamo compiles neither the
    returned function nor anything that it calls. This is needed before torch 2.8, where
    `untraced` does not apply to the functions that `function` calls.
    """
    if hasattr(_frames(), "_FrameExecStrategy"):
        untraced(function)
        return function

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call]

    untraced(outside)
    return cast(_F, outside)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    optimizer._opt_called = True  # type: ignore[attr-defined]


def unscaling_caller() -> Mapping[str, Any] | None:
    """If the function that is three levels up the call stack is
    ``GradScaler._unscale_grads_``, return its local variables. Otherwise return None.
    There is no other way to detect that a scaler is unscaling the gradients, because
    unscaling does not change a gradient's version.
    """
    frame = sys._getframe(3)
    return frame.f_locals if frame.f_code.co_name == "_unscale_grads_" else None


def is_called_by_model_state() -> bool:
    """True if the caller of this function was itself called from
    `torch.distributed.checkpoint.state_dict`.
    """
    module = sys._getframe(2).f_globals.get("__name__")
    return module == "torch.distributed.checkpoint.state_dict"


def found_inf_of(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> Collection[Tensor]:
    return scaler._found_inf_per_device(optimizer).values()


def scale_and_tracker(scaler: torch.amp.GradScaler) -> list[float]:
    """Return the scaler's scale and growth tracker. This synchronizes with the device
    once.
    """
    scale: Any = scaler._get_scale_async()
    dtype = torch.float32 if scale.is_mps else torch.float64
    tracker: Any = scaler._growth_tracker
    return torch.stack([scale.to(dtype), tracker.to(dtype)]).tolist()


def pending_update(scaler: torch.amp.GradScaler) -> Mapping[int, Any]:
    """Return the record that ``scaler.step`` keeps for the next ``scaler.update()``.
    The record is empty if ``step`` has not been called. ``update`` replaces the record
    with a new one.
    """
    return scaler._per_optimizer_states


_WAITING: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
"""For each module, the number of wrapped optimizers that suppress the module's gradient
reduction.
"""


def leave_reduction_out(module: DistributedDataParallel) -> Callable[[], None]:
    """Suppress the gradient reduction of `module`, even if the user's loop sets
    ``require_backward_grad_sync``. Return a function that enables the reduction again.
    """
    _WAITING[module] = _WAITING.get(module, 0) + 1
    _wait(module)
    handle = module.register_forward_pre_hook(_wait)
    module._static_graph_delay_allreduce_enqueued = True
    reference = weakref.ref(module)

    def reduce_again() -> None:
        handle.remove()
        module = reference()
        if module is None:
            return
        _WAITING[module] -= 1
        if _WAITING[module] == 0:
            module._static_graph_delay_allreduce_enqueued = False
            vars(module)["require_backward_grad_sync"] = True
            vars(module)["require_forward_param_sync"] = True

    return reduce_again


def reduced_parameters(module: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters of `module`, except trainable parameters in its
    ``parameters_to_ignore``.
    """
    parameters = []
    for path, part in module.module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            # torch compares this name with the ignored names: ".weight", not "weight",
            # for the root module's own weight.
            is_ignored = f"{path}.{name}" in module.parameters_to_ignore
            if not (is_ignored and parameter.requires_grad):
                parameters.append(parameter)
    return parameters


def waiting_modules() -> list[DistributedDataParallel]:
    """Return the modules whose gradient reduction is suppressed by an optimizer."""
    return [module for module, optimizers in _WAITING.items() if optimizers]


def _wait(module: torch.nn.Module, *_: object) -> None:
    # Bypass `Module.__setattr__`, because it takes longer than the rest of this
    # function.
    vars(module)["require_backward_grad_sync"] = False


def send_buffers(module: DistributedDataParallel) -> None:
    """Send the first worker's buffers to all workers, as a forward pass of `module`
    normally does. This is a collective call.

    The buffers are not sent in forward passes, because another worker may be ending its
    window during this worker's forward pass.
    """
    vars(module)["require_forward_param_sync"] = True
    if module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        module._sync_buffers()  # type: ignore[no-untyped-call]
    vars(module)["require_forward_param_sync"] = False


def are_flattened(parameters: Collection[Tensor]) -> bool:
    """True if FSDP1 has flattened some of `parameters`. In that case a gradient norm
    would include only this worker's part of these parameters.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp._common_utils import FSDP_FLATTENED

    return any(getattr(parameter, FSDP_FLATTENED, False) for parameter in parameters)


def processes() -> int:
    """Return the number of processes in torch.distributed, or 1 if torch.distributed is
    not used.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1
