"""The growing gradient of the large batch, in the ``.grad`` of every leaf that the loss
reaches.

Autograd adds micro-batch to micro-batch there. What was there before is kept aside, and
added at the end or restored after an error. Half-precision gradients move into float32
sums as autograd produces them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain, make_options, measures
from gradaccum_torch.arithmetic import (
    HALF,
    add,
    divide,
    gradient_dtype,
    narrowed,
    sum_dtype,
)
from gradaccum_torch.gradient_watch import is_watched
from gradaccum_torch.large_batch.batch import Shares
from gradaccum_torch.large_batch.replay import Before, Reached, trained_by
from gradaccum_torch.master_weights import through
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import (
    Node,
    is_leaf_node,
    keep_own,
    untraced,
    version,
)
from gradaccum_torch.update import hooks_of


def remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


Mark = tuple[int, int]
"""Which tensor a ``.grad`` is, and how often it was written into."""


class Gradients:
    """The sum of gradients of one call."""

    by_parts = False

    def __init__(self, others: Iterable[int] = ()) -> None:
        self._known = set(others)
        """The ids of leaves that need not be looked at again; `_before` keeps its
        leaves alive.
        """
        self._nodes: set[Node] = set()
        """The nodes of leaves that were reached, which autograd makes anew if nobody
        holds them.
        """
        self._before: dict[Tensor, Tensor | None] = {}
        """What was in ``.grad`` of each leaf."""
        self._wide: dict[Tensor, Tensor] = {}
        """The sums that have another dtype than their gradient."""
        self._left: list[Tensor] = []
        self._first: list[Tensor] = []
        """The leaves whose first gradient has not come yet: autograd takes over its
        memory, whoever's it is.
        """
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, remove, self._handles).atexit = False
        self._noted: list[Mark | None] = []
        """What the last `backward` left in each leaf."""
        self.delivered = False
        """`deliver` has come to its end, even if an interrupt came meanwhile."""

    def expect(self, leaves: Iterable[Tensor]) -> None:
        """Collect the gradients of `leaves`, except those of a wrapped optimizer."""
        self._take(leaf for leaf in leaves if not is_watched(leaf))

    def reach(self, *tensors: Tensor) -> None:
        self.take(leaves_of_graph(tensors, self._nodes))

    def take(self, leaves: Sequence[Tensor]) -> None:
        new = [leaf for leaf in leaves if id(leaf) not in self._known]
        for leaf in new:
            if is_watched(leaf):
                raise _wrapped_error(leaf)
        self._take(new)

    def pass_by(self, others: Iterable[int]) -> None:
        self._known.update(others)

    def leave(self, leaves: Iterable[Tensor]) -> None:
        self._left.extend(leaves)  # Alive, so that no other leaf gets the id of one.
        self._first.extend(self._left)
        self._known.update(map(id, self._left))

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            through(self.put_back)
            raise

    def _take(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._before[leaf] = leaf.grad
                leaf.grad = None
                self._noted.append(None)
                if gradient_dtype(leaf) in HALF:
                    move = partial(_move, self._wide)
                    handle = leaf.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)
                else:
                    self._first.append(leaf)

    def __bool__(self) -> bool:
        return bool(self._before)

    def backward(self, tensors: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """Add the gradient of the sum of ``tensor * seed``, of one shape and dtype, to
        leaves that were reached.
        """
        torch.autograd.backward(tuple(tensors), tuple(seeds))
        self.note()

    def note(self) -> None:
        """Take ``.grad`` as the result so far, and copy memory that is not the leaf's
        own.
        """
        for leaf in self._first:
            keep_own(leaf)
        self._first = [leaf for leaf in self._first if leaf.grad is None]
        self._noted = self._marks()

    def require_untouched(self) -> None:
        if self._marks() != self._noted:
            raise touched_error()

    def deliver(self, divisor: float) -> None:
        """Divide the sums, and add them to what was in ``.grad``; a leaf that no
        micro-batch used keeps what it had.

        What may lack memory comes first, and an interrupt waits until the last addition
        is made.
        """
        with torch.no_grad():
            self._finish(divisor)
            pairs = [
                (leaf, before, version(before))
                for leaf, before in self._before.items()
                if before is not None
            ]
            try:
                through(partial(_give_back, pairs))
            # An interrupt comes when all is delivered, and nothing is left to put back.
            finally:
                self._before.clear()
                self._forget()
                self.delivered = True

    def adding(self) -> AbstractContextManager[None]:
        """Let `backward` add what micro-batches that were counted deliver later."""
        return nullcontext()

    def part(self, number: int, belongs: Callable[[Tensor], bool]) -> None:
        """Update the parameters that `belongs` is true of, if there is an update to be
        made: here there is none.
        """

    def flush(self) -> None:
        """Make the update, if there is one to be made: here there is none."""

    def put_back(self) -> None:
        for leaf, before in self._before.items():
            leaf.grad = before
        self._before.clear()
        self._forget()

    def _finish(self, divisor: float) -> None:
        divide([leaf.grad for leaf in self._before if leaf.grad is not None], divisor)
        for leaf in self._wide:
            leaf.grad = narrowed(self._wide[leaf], divisor, gradient_dtype(leaf))
            self._wide[leaf] = leaf.grad  # Frees the wide one before the next is cast.
        for leaf, before in self._before.items():
            if before is not None and before.is_sparse and leaf.grad is not None:
                if leaf.grad.is_sparse:
                    leaf.grad = before + leaf.grad
                else:
                    leaf.grad = leaf.grad + before
                self._before[leaf] = None

    def _forget(self) -> None:
        remove(self._handles)
        self._wide.clear()
        self._nodes.clear()
        self._left.clear()
        self._noted = []
        self._first = []

    def _marks(self) -> list[Mark | None]:
        wide = self._wide
        marks = list[Mark | None]()
        for leaf in self._before:
            held = wide.get(leaf, leaf.grad) if wide else leaf.grad
            marks.append(None if held is None else (id(held), held._version))
        return marks


def _give_back(pairs: Sequence[tuple[Tensor, Tensor, int]]) -> None:
    """Add each gradient to the earlier one of that version; a second run resumes the
    first.
    """
    for leaf, before, noted in pairs:
        if (
            leaf.grad is not None
            and leaf.grad is not before
            and version(before) == noted
        ):
            add(before, leaf.grad)
        leaf.grad = before


def leaves_of_graph(tensors: Iterable[Tensor], passed: set[Node]) -> list[Tensor]:
    """Return the leaves that a backward pass through `tensors` reaches, except through
    `passed` nodes; add new ones to these.
    """
    given = list(tensors)
    leaves = [
        tensor for tensor in given if tensor.grad_fn is None and tensor.requires_grad
    ]
    waiting: list[Node] = [
        tensor.grad_fn for tensor in given if tensor.grad_fn is not None
    ]
    seen = passed.copy()
    for waited in waiting:  # It grows meanwhile.
        for node, _ in waited.next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                if is_leaf_node(node):
                    passed.add(node)
                    leaves.append(node.variable)
                else:
                    waiting.append(node)
    return leaves


def _move(wide: dict[Tensor, Tensor], leaf: Tensor) -> None:
    gradient = leaf.grad
    if gradient is not None:
        held = wide.get(leaf)
        wide[leaf] = (
            gradient.detach().to(sum_dtype(leaf, None))
            if held is None
            else add(held, gradient)
        )
        leaf.grad = None


def _wrapped_error(leaf: Tensor) -> UsageError:
    fix = (
        "Write optimizer=opt, wrapped with steps=None; of another optimizer's"
        " parameters, call requires_grad_(False) for this call."
    )
    found = f"one of shape {tuple(leaf.shape)} that a wrapped optimizer collects"
    return explain(
        UsageError,
        "optimizer",
        expected="parameters whose gradients nobody else collects",
        found=found,
        fix=fix,
    )


def touched_error() -> UsageError:
    fix = "Return the loss, and leave backward() and zero_grad() to the caller."
    found = "one that changes .grad itself, as backward() or zero_grad() does"
    return explain(
        UsageError,
        "loss_fn",
        expected="a function that computes the loss",
        found=found,
        fix=fix,
    )


untraced(_move)


# The window of a wrapped optimizer as the destination of a call's gradients, alike for
# both kinds of loss.
#
# In a window the loss scale, the sums, the overflow policy, clipping and workers are
# the wrapper's. Leaves that are not its own, as those of a critic that a generator's
# loss goes through, get the large batch's gradient beside the window, freed of scale
# and weight.


class InWindow:
    """The next window of a wrapped optimizer, which the call closes; it has the face of
    `Gradients`.
    """

    delivered = False
    """Before the window is flushed an error makes it forgotten."""

    @property
    def by_parts(self) -> bool:
        """True if some parameters can be updated before the sum of the others is
        there.
        """
        return not measures(self._window.options)

    def __init__(self, optimizer: AccumulatingOptimizer) -> None:
        self._optimizer = optimizer
        self._window = optimizer.whole_window()
        self._others = Gradients(others=self._window.parameter_ids)

    @contextmanager
    def kept(self) -> Iterator[None]:
        with self._others.kept(), self._window:
            yield

    def expect(self, leaves: Iterable[Tensor]) -> None:
        self._others.expect(leaves)

    def require_untouched(self) -> None:
        self._others.require_untouched()
        if self._window.has_new_gradient:
            raise touched_error()

    def flush(self) -> None:
        self._optimizer.flush()

    def pass_by(self, others: Iterable[int]) -> None:
        self._others.pass_by(others)

    def adding(self) -> AbstractContextManager[None]:
        return self._window.adding()

    def backward(self, tensors: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        torch.autograd.backward(tuple(tensors), tuple(seeds))
        self._others.note()

    def part(self, number: int, belongs: Callable[[Tensor], bool]) -> None:
        self._window.update_part(number, belongs)

    def reach(self, *tensors: Tensor) -> None:
        self._others.pass_by(self._window.gathered_ids())
        self._others.reach(*tensors)

    def take(self, leaves: Sequence[Tensor]) -> None:
        if leaves:
            self._others.pass_by(self._window.gathered_ids())
            self._others.take(leaves)

    def deliver(self, divisor: float) -> None:
        self._others.deliver(
            divisor * self._window.loss_scale() if self._others else 1.0
        )


# The losses of the micro-batches, one after the other, on their way to ``.grad`` or
# into a window.


class LossesInGrad(Gradients):
    """The collector into ``.grad``."""

    def __init__(self, shares: Shares) -> None:
        super().__init__()
        self._shares = shares
        self._unit: float | None = None
        """The divisor that the incoming gradients have already; what is left of it
        divides the sum at the end.
        """

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        if contribution:
            self.reach(loss)
            if self._unit is None:
                self._unit = self._unit_for(loss)
            self.backward(
                [loss],
                [torch.full_like(loss, contribution / self._unit, requires_grad=False)],
            )

    def close(self) -> None:
        self.deliver(1.0 if self._unit is None else self._shares.divisor / self._unit)

    def _unit_for(self, loss: Tensor) -> float:
        """Return the whole divisor, so that no pass over the sums is needed.

        Half-precision gradients begin with 1 for the largest micro-batch, against
        underflow, and are divided as the wide sums are cast.
        """
        if loss.dtype in HALF or any(
            gradient_dtype(leaf) in HALF for leaf in self._before
        ):
            return max(self._shares.contributions)
        return self._shares.divisor


class LossesInWindow(InWindow):
    """The collector into the next window of a wrapped optimizer."""

    def __init__(self, optimizer: AccumulatingOptimizer, shares: Shares) -> None:
        super().__init__(optimizer)
        self._shares = shares

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        if contribution:
            self.reach(loss)
        self._optimizer.backward(loss, weight=weight)
        self._others.note()
        self._optimizer.step()

    def close(self) -> None:
        self.deliver(self._shares.divisor)


Collector = LossesInGrad | LossesInWindow


@contextmanager
def delivering(
    destination: Gradients | InWindow, reached: Reached, devices: Iterable[torch.device]
) -> Iterator[Before]:
    """Make the update after the block; if something raises, restore gradients, random
    states and buffers.
    """
    before = Before(reached, devices)
    try:
        with destination.kept():
            destination.expect(trained_by(reached))
            yield before
    except BaseException:
        if not destination.delivered:
            before.put_back()
        raise
    destination.flush()


def require_optimizer(
    optimizer: object, reduction: str | None
) -> AccumulatingOptimizer:
    if not isinstance(optimizer, AccumulatingOptimizer):
        fix = "Write optimizer=gradaccum.wrap(optimizer, steps=None)."
        raise explain(
            ArgumentTypeError,
            "optimizer",
            expected="a wrapped optimizer",
            found=f"a {type(optimizer).__name__}",
            fix=fix,
        )
    own = optimizer.whole_window().options
    if own.steps is not None:
        fix = (
            "Write gradaccum.wrap(optimizer, steps=None): this call makes the"
            " micro-batches and closes the window."
        )
        raise explain(
            ArgumentValueError,
            "optimizer",
            expected="one that was wrapped with steps=None",
            found=f"steps={own.steps}",
            fix=fix,
        )
    if reduction not in (None, own.reduction):
        make_options(None, reduction=reduction)  # Refuses an unknown one as such.
        fix = f"Leave reduction out, or write reduction={own.reduction!r} here as well."
        expected = f"{own.reduction!r}, that of the wrapped optimizer"
        raise explain(
            ArgumentValueError, "reduction", expected=expected, got=reduction, fix=fix
        )
    return optimizer


def require_coupled_optimizer(
    optimizer: object, reduction: str | None = None
) -> AccumulatingOptimizer:
    wrapped = require_optimizer(optimizer, reduction)
    if wrapped.whole_window().options.on_overflow == "drop_micro_batch":
        fix = 'Write on_overflow="skip_window".'
        found = 'on_overflow="drop_micro_batch"'
        raise explain(
            UsageError,
            "optimizer",
            expected="one that keeps or skips a coupled loss whole",
            found=found,
            fix=fix,
        )
    return wrapped


def require_layered_optimizer(optimizer: object, reduction: str | None) -> None:
    """Raise unless `optimizer` can take a window whose micro-batches are complete
    together, and its layers one after the other.
    """
    wrapped = require_coupled_optimizer(optimizer, reduction)
    window = wrapped.whole_window()
    hooks = [*hooks_of(wrapped, "step_pre"), *hooks_of(wrapped, "step_post")]
    hooked = hooks and not measures(window.options)
    for name in (
        *window.options_of_micro_batches(),
        *(["a step hook"] if hooked else []),
    ):
        found = f"one with {name}"
        fix = f"Leave {name} out, or call gradaccum_torch.backward."
        raise explain(
            UsageError,
            "optimizer",
            expected="one that takes all micro-batches of a layer at once",
            found=found,
            fix=fix,
        )
