"""``gradaccum_torch.coupled_backward``: a loss that couples all items (contrastive,
covariance, load balance), one micro-batch at a time.

The first pass computes all outputs without gradients. The loss of all outputs is
differentiated once, with respect to the outputs and to its own parameters, such as a
temperature. The second pass computes each micro-batch again, and passes the outputs'
gradient on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, AutoMicroBatchSize, UsageError
from gradaccum.kit import (
    Division,
    Leaf,
    Nest,
    concatenate_error,
    explain,
    leaves_of,
    make_division,
    with_leaves,
)
from gradaccum_torch.large_batch.auto import (
    has_nothing_to_share,
    run_divided,
    share_nothing,
)
from gradaccum_torch.large_batch.batch import (
    LargeBatch,
    MicroBatch,
    Split,
    Weight,
    cat,
    evaluated,
    require_alone,
    require_function,
)
from gradaccum_torch.large_batch.gradients import (
    Gradients,
    InWindow,
    delivering,
    require_coupled_optimizer,
    touched_error,
)
from gradaccum_torch.large_batch.replay import Before, Buffers, RandomState, reached_by
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import untraced_within


@untraced_within
def coupled_backward(
    outputs_fn: Callable[..., Any],
    loss_fn: Callable[[Any], Tensor],
    *batch: Any,
    steps: int | None = None,
    micro_batch_size: int | str | AutoMicroBatchSize | None = None,
    micro_batch_weight: float | None = None,
    weight: Weight = None,
    axes: Nest = 0,
    split: Split | None = None,
    optimizer: AccumulatingOptimizer | None = None,
) -> Tensor:
    """Add the gradient of ``loss_fn(outputs_fn(*batch))`` to ``.grad``, one micro-batch
    at a time, and return the loss.

    `outputs_fn` runs twice per micro-batch, and must return the same both times, up to
    rounding. Random states (Python's, NumPy's, torch's, and those of generators that
    the functions close over) and buffers are restored for the second run; a batch
    norm's statistics move as in one pass.

    Args:
        outputs_fn: ``outputs_fn(*micro_batch)`` returns a nest of tensors, which are
            concatenated along their leading axis: one row per item, or another number
            of rows, as of tokens.
        loss_fn: ``loss_fn(outputs)`` returns a loss, a real floating-point tensor of
            shape ``()``.
        batch: as for `gradaccum_torch.backward`.
        steps: as there.
        micro_batch_size: as there.
        micro_batch_weight: as there.
        weight: each item's, shape ``(items,)``; only to pack by `micro_batch_weight`.
        axes: as there.
        split: as there.
        optimizer: as there. A loss scale multiplies the gradients of the outputs and of
            the loss's own parameters.

    Returns:
        The loss, detached, shape ``()``.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, the batch cannot be
            divided so, outputs have no leading axis, or `loss_fn` returns something
            else.
        UsageError: the second run returns other outputs; a function calls
            ``backward()``; or `optimizer` drops micro-batches, or is missing.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 4)
        >>> x = torch.randn(8, 3)
        >>> coupling = lambda z: torch.cov(z.T).triu(1).square().sum()
        >>> loss = coupled_backward(model, coupling, x, steps=4)
        >>> model.weight.grad.shape
        torch.Size([4, 3])
    """
    division = make_division(
        steps, micro_batch_size, micro_batch_weight, own_split=split is not None
    )
    if weight is not None and (callable(weight) or micro_batch_weight is None):
        fix = "Leave it out, or write micro_batch_weight= and one number per item."
        found = "a weight that nothing is packed by"
        raise explain(
            ArgumentTypeError,
            "weight",
            expected="one number per item, to pack by",
            found=found,
            fix=fix,
        )
    large = LargeBatch(
        batch, axes, (lambda *_: 1.0) if weight is None else weight, split
    )
    call = _CoupledCall(outputs_fn, loss_fn, large, optimizer)
    if optimizer is not None and has_nothing_to_share(large, optimizer):
        return share_nothing(division, optimizer)
    return run_divided(
        call.run, division, outputs_fn, large, call.reached.modules, optimizer
    )


class _CoupledCall:
    def __init__(
        self,
        outputs_fn: Callable[..., Any],
        loss_fn: Callable[..., Any],
        large: LargeBatch,
        optimizer: object,
    ) -> None:
        require_function("outputs_fn", outputs_fn)
        require_function("loss_fn", loss_fn)
        self._outputs_fn = outputs_fn
        self._loss_fn = loss_fn
        self.large = large
        if optimizer is None:
            self._optimizer = None
        else:
            self._optimizer = require_coupled_optimizer(optimizer)
        self.reached = reached_by(outputs_fn, loss_fn)
        self._require_alone()

    def _require_alone(self) -> None:
        if self._optimizer is None:
            require_alone(self.reached.modules)

    def run(self, division: Division, agreed: Callable[[], None]) -> Tensor:
        micro_batches = self.large.micro_batches(division)
        coupler: Coupler = (
            CoupledInGrad()
            if self._optimizer is None
            else CoupledInWindow(self._optimizer)
        )
        with delivering(coupler, self.reached, self.large.devices()) as before:
            return self._two_passes(micro_batches, coupler, before, agreed)

    def _two_passes(
        self,
        micro_batches: Sequence[MicroBatch],
        coupler: Coupler,
        before: Before,
        agreed: Callable[[], None],
    ) -> Tensor:
        with before.noting():
            outputs, states = self._first_pass(micro_batches, before)
            loss, _ = evaluated(
                self._loss_fn, MicroBatch((outputs.whole(),), None, 1.0), has_aux=False
            )
        self._require_alone()
        coupler.require_untouched()
        outputs.require_untouched()
        final_random = before.random_state()
        final_buffers = Buffers(self.reached.modules)
        coupler.differentiate(loss, outputs.leaves())
        value = loss.detach().clone()
        del loss  # And with it the graph of all items.
        before.put_buffers_back()
        for place, (micro_batch, state) in enumerate(
            zip(micro_batches, states, strict=True)
        ):
            state.put_back()
            self._second_pass(place, micro_batch, outputs, coupler)
        outputs.require_same()
        final_random.put_back()
        final_buffers.put_back()
        agreed()
        coupler.close()
        return value

    def _first_pass(
        self, micro_batches: Sequence[MicroBatch], before: Before
    ) -> tuple[Outputs, list[RandomState]]:
        taken: list[_Taken] = []
        states: list[RandomState] = []
        with torch.no_grad():
            for micro_batch in micro_batches:
                states.append(before.random_state())
                taken.append(_taken(self._outputs_fn(*micro_batch.arguments), taken))
        # Before torch 2.8 an outer autocast has weights in it that were cast without a
        # graph.
        torch.clear_autocast_cache()
        return Outputs(taken), states

    def _second_pass(
        self, place: int, micro_batch: MicroBatch, outputs: Outputs, coupler: Coupler
    ) -> None:
        with torch.enable_grad():
            again = self._outputs_fn(*micro_batch.arguments)
        coupler.require_untouched()
        coupler.add(*outputs.with_gradients(place, again))


# A coupled loss, and then the outputs of the micro-batches, on their way to ``.grad``
# or into a window.
#
# In a window the loss is micro-batch 0, of weight 1, and scaled by the loss scale. The
# others bring the gradient of their outputs, which has the scale already, and have
# weight 0. So the window divides by 1 and the scale, whatever its reduction, and
# half-precision gradients move into their sums after each micro-batch.


class CoupledInGrad(Gradients):
    """The coupler into ``.grad``."""

    def differentiate(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        """Leave the gradient of `loss` in ``.grad`` of `outputs`, and collect that of
        other leaves.
        """
        self.leave(outputs)
        self.add([loss], [torch.ones_like(loss)])

    def add(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if outputs:
            self.reach(*outputs)
            self.backward(outputs, gradients)

    def close(self) -> None:
        self.deliver(1.0)


class CoupledInWindow(InWindow):
    """The coupler into the next window of a wrapped optimizer, which it closes."""

    def differentiate(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        self._others.leave(outputs)
        self._optimizer.weigh(1.0)
        self._collect([self._optimizer.scale(loss)], None)

    def add(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if outputs:
            self._window.begin_weightless()
            self._collect(outputs, gradients)

    def close(self) -> None:
        self.deliver(1.0)

    def _collect(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None
    ) -> None:
        self.reach(*tensors)
        torch.autograd.backward(tensors, gradients)
        self._others.note()
        self._optimizer.step()


Coupler = CoupledInGrad | CoupledInWindow


# The outputs of all micro-batches as one nest, and the way back: the gradient of each
# micro-batch's own rows.


class _Taken(NamedTuple):
    nest: Nest
    paths: list[str]
    rows: list[Tensor]


def _taken(outputs: Nest, before: Sequence[_Taken]) -> _Taken:
    leaves = leaves_of(outputs, "outputs")
    paths = [leaf.path for leaf in leaves]
    _require_paths(leaves, before[0].paths if before else paths)
    # Copies: the next micro-batch may write into the same memory, as the replay of a
    # CUDA graph does.
    return _Taken(outputs, paths, [_rows(leaf).detach().clone() for leaf in leaves])


class Outputs:
    """The outputs of the first pass: differentiated as a whole, handed out in the
    second pass.
    """

    def __init__(self, taken: list[_Taken]) -> None:
        self._nest, self._paths, _ = taken[0]
        columns = list(zip(*[each.rows for each in taken], strict=True))
        taken.clear()
        lengths = [[0, *map(len, parts)] for parts in columns]
        self._edges = [list(accumulate(each)) for each in lengths]
        """For each leaf the row at which each micro-batch begins, and the number of
        rows.
        """
        self._leaves = [_joined(path, columns.pop(0)) for path in self._paths]
        self._differ: list[Tensor] = []
        """Scalars, bool: a leaf came out differently in the second pass."""

    def whole(self) -> Nest:
        return with_leaves(self._nest, iter(self._leaves))

    def leaves(self) -> list[Tensor]:
        return self._leaves

    def require_untouched(self) -> None:
        if any(leaf.grad is not None for leaf in self._leaves):
            raise touched_error()

    def with_gradients(
        self, place: int, outputs: Nest
    ) -> tuple[list[Tensor], list[Tensor]]:
        leaves = leaves_of(outputs, "outputs")
        _require_paths(leaves, self._paths)
        tensors = []
        gradients = []
        for leaf, whole, edges in zip(leaves, self._leaves, self._edges, strict=True):
            again = _rows(leaf)
            rows = slice(edges[place], edges[place + 1])
            first = whole.detach()[rows]
            if first.shape != again.shape:
                raise _other_outputs_error(
                    leaf.path, f"shape {tuple(again.shape)} after {tuple(first.shape)}"
                )
            self._differ.append(_differs(first, again.detach()))
            if again.requires_grad and whole.grad is not None:
                tensors.append(again)
                gradients.append(whole.grad[rows].to(again.dtype))
        return tensors, gradients

    def require_same(self) -> None:
        """Raise unless both passes gave the same outputs up to rounding; waits for the
        device.
        """
        differ = torch.stack(
            [each.to(self._differ[0].device) for each in self._differ]
        ).tolist()
        if any(differ):
            raise _other_outputs_error(
                self._paths[differ.index(True) % len(self._paths)],
                "values that differ by more than rounding",
            )


def _require_paths(leaves: list[Leaf], expected: list[str]) -> None:
    if (paths := [leaf.path for leaf in leaves]) != expected:
        fix = "Return the same structure for every micro-batch."
        raise explain(
            ArgumentTypeError,
            "outputs_fn",
            expected=f"the outputs {expected}",
            found=f"{paths}",
            fix=fix,
        )


def _joined(path: str, parts: Sequence[Tensor]) -> Tensor:
    leaf = cat(path, parts)
    return leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def _rows(leaf: Leaf) -> Tensor:
    if not isinstance(leaf.value, Tensor):
        fix = "Return tensors with one row per item."
        raise explain(
            ArgumentTypeError,
            leaf.path,
            expected="a tensor",
            found=f"a {type(leaf.value).__name__}",
            fix=fix,
        )
    if leaf.value.dim() == 0:
        raise concatenate_error(leaf.path, "a scalar")
    return leaf.value


def _differs(first: Tensor, again: Tensor) -> Any:
    """True if more than half of the digits are lost, as a scalar bool; False where
    either is inf or NaN.
    """
    if not (first.is_floating_point() or first.is_complex()):
        return (first != again).any()
    bound = math.sqrt(torch.finfo(first.dtype).eps)
    wide = torch.promote_types(first.dtype, torch.float32)
    first = first.to(wide)
    again = again.to(wide)
    return torch.linalg.vector_norm(again - first) > bound * torch.linalg.vector_norm(
        first
    )


def _other_outputs_error(path: str, found: str) -> UsageError:
    fix = (
        "Give randomness that both passes can draw: torch's, NumPy's or Python's global"
        " generators, or a torch.Generator that the function closes over; and keep what"
        " changes from call to call in buffers of modules that it closes over."
    )
    return explain(
        UsageError,
        "outputs_fn",
        expected=f"the same {path} in both passes",
        found=found,
        fix=fix,
    )
