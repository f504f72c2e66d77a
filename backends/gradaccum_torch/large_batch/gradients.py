"""Collects the gradients of a call such as `gradaccum_torch.backward`, either in
``.grad`` or in a window of a wrapped optimizer. The call closes this window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import MicroBatch, Options, denominator, make_options, select
from gradaccum_torch.arithmetic import (
    HALF,
    add,
    divide,
    gradient_dtype,
    narrowed,
    sum_dtype,
)
from gradaccum_torch.gradient_watch import is_watched
from gradaccum_torch.large_batch.replay import Before
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import (
    Node,
    is_sharded,
    keep_own,
    processes,
    untraced,
    version,
)
from gradaccum_torch.whole_window import WholeWindow

LEAF_NODE = "AccumulateGrad"
REENTRANT_NODE = "CheckpointFunctionBackward"
"""The graph node of a reentrant checkpoint. The graph inside the checkpoint exists only
during the backward pass.
"""
COMPILED_NODE = "CompiledFunctionBackward"


class GradientsInGrad:
    """Collects the gradients of one call to a function such as
    `gradaccum_torch.backward` in the ``.grad`` of every leaf tensor on which the loss
    depends.

    During the call, ``.grad`` contains only gradients of this call. At the end of the
    call, the values that ``.grad`` had before are added to these gradients. If the call
    raises an error, ``.grad`` is restored. Half-precision gradients are moved into
    float32 sums as soon as autograd has computed them.

    Args:
        before: the random states and module buffers from before the call.
        largest_factor: the largest factor by which a micro-batch's loss is multiplied.
        divisor: the number by which the sum of the losses is divided.
    """

    window: WholeWindow | None = None

    def __init__(self, before: Before, largest_factor: float, divisor: float) -> None:
        self.before = before
        self.divisor = divisor
        self._largest_factor = largest_factor
        self._applied_divisor: float | None = None
        """The number by which the losses were already divided before their backward
        passes.
        """
        self._known_ids: set[int] = set()
        self._refused_nodes: set[str] = set()
        self._needs_optimizer = self.window is None and processes() > 1
        """Whether `reach` raises an error if several workers train one of the modules.
        True if several processes are running and no wrapped optimizer was passed,
        because the module would then reduce its gradients in each micro-batch.
        """
        if self.window is None:
            self._refused_nodes.add(REENTRANT_NODE)
        if before.notes_calls:
            self._refused_nodes.add(COMPILED_NODE)
        self._leaf_nodes: set[Node] = set()
        """The graph nodes of the leaves found so far. They are kept alive because
        autograd would otherwise create new nodes for the same leaves.
        """
        self._earlier_gradients: dict[Tensor, Tensor | None] = {}
        self._wide_sums: dict[Tensor, Tensor] = {}
        self._without_gradient: list[Tensor] = []
        self._noted_sums: list[tuple[Tensor, int, int]] = []
        """For each leaf, the id of its gradient sum and how many times that sum was
        written to. Neither may change while the user's functions run.
        """
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is not None:
            for leaf, gradient in self._earlier_gradients.items():
                leaf.grad = gradient

    def ignore(self, ids: Iterable[int]) -> None:
        self._known_ids.update(ids)

    def reach(self, tensors: Sequence[Tensor], leaf_nodes: set[Node]) -> list[Tensor]:
        """Prepare to collect the gradients of all leaf tensors in the autograd graph of
        `tensors`. Return the leaves whose graph nodes are not in `leaf_nodes` yet.

        - `leaf_nodes`: the graph nodes of the leaves that earlier calls have returned.
          The nodes of the new leaves are added to this set.
        """
        if self._needs_optimizer:
            require_alone(self.before.buffers.modules.values())
        leaves = leaves_of_graph(tensors, leaf_nodes, self._refused_nodes)
        for leaf in leaves:
            if id(leaf) in self._known_ids:
                continue
            if is_watched(leaf):
                raise UsageError(
                    "optimizer: expected parameters that belong to no other wrapped"
                    f" optimizer; got a parameter of shape {tuple(leaf.shape)} whose"
                    " gradients another wrapped optimizer is already accumulating. Pass"
                    " optimizer=opt, the optimizer that was wrapped with steps=None. If"
                    " the parameter belongs to another optimizer, call"
                    " requires_grad_(False) on the parameter for the duration of this"
                    " call."
                )
            self._known_ids.add(id(leaf))
            self._earlier_gradients[leaf] = leaf.grad
            leaf.grad = None
            self._noted_sums.append((leaf, id(None), 0))
            if gradient_dtype(leaf) in HALF:
                handle = leaf.register_post_accumulate_grad_hook(self._move_into_sum)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            else:
                self._without_gradient.append(leaf)
        return leaves

    def add_loss(self, loss: Tensor, weight: float, factor: float) -> None:
        self.require_untouched()
        if not factor:
            return
        self.reach([loss], self._leaf_nodes)
        if self._applied_divisor is None:
            dtypes = {loss.dtype, *map(gradient_dtype, self._earlier_gradients)}
            # With half precision, do not divide by the full divisor before the backward
            # pass, because small gradients would underflow.
            is_half = not dtypes.isdisjoint(HALF)
            self._applied_divisor = self._largest_factor if is_half else self.divisor
        share = factor / self._applied_divisor
        self.backward([loss], [torch.full_like(loss, share, requires_grad=False)])

    def add_outputs(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        self.require_untouched()
        self.reach(outputs, self._leaf_nodes)
        self.backward(outputs, gradients)

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        torch.autograd.backward(tuple(tensors), tuple(gradients))
        self.note_sums()

    def note_sums(self) -> None:
        """Record which tensor is the gradient sum of each leaf, and how many times the
        sum was written to. Before that, copy each gradient that shares its memory with
        other tensors.
        """
        for leaf in self._without_gradient:
            keep_own(leaf)
        self._without_gradient = [
            leaf for leaf in self._without_gradient if leaf.grad is None
        ]
        self._noted_sums = []
        for leaf in self._earlier_gradients:
            total = self._sum_of(leaf)
            number = 0 if total is None else version(total)
            self._noted_sums.append((leaf, id(total), number))

    def _sum_of(self, leaf: Tensor) -> Tensor | None:
        return self._wide_sums.get(leaf) if leaf.grad is None else leaf.grad

    def require_untouched(self) -> None:
        """Raise if the user's function has changed a gradient sum, for example through
        ``backward()``.
        """
        for leaf, total_id, number in self._noted_sums:
            total = self._sum_of(leaf)
            is_changed = total is not None and version(total) != number
            if id(total) != total_id or is_changed:
                raise touched_error()

    def deliver(self) -> None:
        """Divide the gradient sums, and add them to the earlier values of ``.grad``."""
        divisor = self.divisor / (self._applied_divisor or 1.0)
        with torch.no_grad():
            divide(
                [p.grad for p in self._earlier_gradients if p.grad is not None], divisor
            )
            while self._wide_sums:
                leaf, total = self._wide_sums.popitem()
                leaf.grad = narrowed(total, divisor, gradient_dtype(leaf))
            for leaf, earlier in self._earlier_gradients.items():
                if leaf.grad is None:
                    leaf.grad = earlier
                elif earlier is not None:
                    leaf.grad = add(earlier, leaf.grad)
        self._earlier_gradients.clear()

    def _move_into_sum(self, leaf: Tensor) -> None:
        gradient = leaf.grad
        if gradient is None:
            return
        if leaf in self._wide_sums:
            self._wide_sums[leaf] = add(self._wide_sums[leaf], gradient)
        else:
            self._wide_sums[leaf] = gradient.detach().to(sum_dtype(leaf, None))
        leaf.grad = None


untraced(GradientsInGrad._move_into_sum)


class GradientsInWindow(GradientsInGrad):
    """Collects the gradients of one call to a function such as
    `gradaccum_torch.backward` in a window of a wrapped optimizer. The optimizer's loss
    scale, overflow policy and clipping apply to this window, and the optimizer's
    workers share the window.

    The loss may also depend on leaf tensors that do not belong to the optimizer. For
    example, a generator's loss depends on the critic's parameters. The gradient of the
    large batch's loss with respect to such a tensor is added to the tensor's ``.grad``.
    """

    window: WholeWindow

    def __init__(
        self,
        optimizer: AccumulatingOptimizer,
        before: Before,
        largest_factor: float,
        divisor: float,
    ) -> None:
        self._optimizer = optimizer
        self.window = optimizer.whole_window()
        super().__init__(before, largest_factor, divisor)
        self.ignore(self.window.parameter_ids)

    def reach(self, tensors: Sequence[Tensor], leaf_nodes: set[Node]) -> list[Tensor]:
        self.ignore(self.window.gathered_ids())
        return super().reach(tensors, leaf_nodes)

    def add_loss(self, loss: Tensor, weight: float, factor: float) -> None:
        self.require_untouched()
        if factor:
            self.reach([loss], self._leaf_nodes)
        self._optimizer.backward(loss, weight=weight)
        self.note_sums()
        self._optimizer.step()

    def add_outputs(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Backpropagate `gradients` through `outputs`. This adds no weight to the
        window, because `add_loss` has already added the weight of the loss from which
        `gradients` were computed. `add_loss` has also multiplied `gradients` by the
        loss scale.
        """
        self.window.begin_weightless()
        super().add_outputs(outputs, gradients)
        self._optimizer.step()

    def require_untouched(self) -> None:
        super().require_untouched()
        if self.window.has_new_gradient:
            raise touched_error()

    def deliver(self) -> None:
        if self._earlier_gradients:
            self.divisor *= self.window.loss_scale()
            super().deliver()


@contextmanager
def collecting(
    optimizer: AccumulatingOptimizer | None,
    options: Options,
    micro_batches: Sequence[MicroBatch],
    before: Before,
) -> Iterator[GradientsInGrad]:
    """Inside the block, collect the gradients of the losses of `micro_batches`. At the
    end of the block, close the window of `optimizer`, or add the gradients to ``.grad``
    if `optimizer` is None. If the block raises an error, discard the window, and
    restore ``.grad``, the random states and the module buffers.
    """
    largest_factor = max((each.factor for each in micro_batches), default=1.0)
    total_weight = sum(micro_batch.weight for micro_batch in micro_batches)
    divisor = denominator(total_weight, options, select)
    if optimizer is None:
        destination = GradientsInGrad(before, largest_factor, divisor)
    else:
        destination = GradientsInWindow(optimizer, before, largest_factor, divisor)
    with before, destination.window or nullcontext(), destination:
        yield destination
        destination.deliver()
    if optimizer is not None:
        optimizer.flush()


def leaves_of_graph(
    tensors: Iterable[Tensor], leaf_nodes: set[Node], refused_nodes: set[str]
) -> list[Tensor]:
    """Return the leaf tensors that a backward pass through `tensors` reaches, except
    leaves whose graph nodes are already in `leaf_nodes`. Add the new nodes to
    `leaf_nodes`.

    Raises:
        UsageError: the graph contains a node whose name is in `refused_nodes`.
    """
    leaves = []
    waiting: list[Node] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad:
            leaves.append(tensor)
    seen: set[Node] = {None, *leaf_nodes, *waiting}
    for node in waiting:  # The list grows during the loop.
        name = type(node).__name__
        if name == LEAF_NODE:
            leaf_nodes.add(node)
            leaves.append(node.variable)
        elif name in refused_nodes:
            raise hidden_error(name)
        for inner_node, _ in node.next_functions:
            if inner_node not in seen:
                seen.add(inner_node)
                waiting.append(inner_node)
    return leaves


def result_and_dtypes(
    function: Callable[[], Tensor],
) -> tuple[Tensor, set[torch.dtype]]:
    """Call `function`. Return its result, and the dtypes of the tensors that autograd
    saves for the backward pass, including copies made by autocast.
    """
    dtypes = set()

    def note(tensor: Tensor) -> Tensor:
        dtypes.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        return function(), dtypes


def touched_error() -> UsageError:
    return UsageError(
        "loss_fn: expected a function that only computes the loss; got a function that"
        " changes .grad itself, for example with backward() or zero_grad(). Return the"
        " loss, and call neither backward() nor zero_grad() in the function."
    )


def require_alone(modules: Iterable[nn.Module]) -> None:
    """Raise if several workers train one of `modules`, because such a module would
    reduce its gradients in each micro-batch.
    """
    for module in modules:
        if isinstance(module, DistributedDataParallel) or any(
            is_sharded(parameter) for parameter in module.parameters(recurse=False)
        ):
            raise UsageError(
                "optimizer: expected a wrapped optimizer, because several workers train"
                f" the module; got a {type(module).__name__} without a wrapped"
                " optimizer. Write optimizer=gradaccum.wrap(optimizer, steps=None,"
                " module=module), which reduces the gradient sum only once."
            )


def hidden_error(node_name: str) -> UsageError:
    found = "a reentrant checkpoint, which hides parameters"
    fix = "Write use_reentrant=False."
    if node_name == COMPILED_NODE:
        found = "compiled code, which hides the buffers of modules"
        fix = "Write modules=(model,), so that the buffers of this model are restored."
    return UsageError(
        "loss_fn: expected a function whose modules and tensors can be found by"
        f" inspection; got a function that contains {found}. {fix}"
    )


def options_of_call(
    optimizer: AccumulatingOptimizer | None, reduction: str | None
) -> Options:
    """Return the options that determine the weights of micro-batches: the options of
    `optimizer`, or the default options with `reduction` if there is no optimizer.
    """
    if optimizer is None:
        return make_options(None, reduction=reduction or "mean")
    options = optimizer.whole_window().options
    if options.steps is not None:
        raise ArgumentValueError(
            "optimizer: expected an optimizer wrapped with steps=None, because this"
            f" call closes the window itself; got steps={options.steps}. Write"
            " gradaccum.wrap(optimizer, steps=None)."
        )
    if reduction not in (None, options.reduction):
        raise ArgumentValueError(
            f"reduction: expected {options.reduction!r}, the reduction of the wrapped"
            f" optimizer; got {reduction!r}. Leave reduction out, or write"
            f" reduction={options.reduction!r}."
        )
    return options
