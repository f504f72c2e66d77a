"""The gradient of the large batch as it grows, in the ``.grad`` of every leaf that the loss reaches.

Autograd adds micro-batch to micro-batch in ``.grad``, so no second buffer is needed. What was in ``.grad`` before stands aside until the
call has succeeded; then the large batch's gradient is added to it once, and after an error it is put back untouched. Gradients of half
precision move on into float32 sums as autograd produces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.hooks import Hooks, is_watched
from gradaccum_torch.large_batch.checks import touched_error
from gradaccum_torch.sums import HALF, add, divide, gradient_dtype, narrowed, sum_dtype
from gradaccum_torch.torch_private import Node, is_leaf_node, keep_own, untraced, version
from gradaccum_torch.update import through

_SAMPLE = 4
"""How many leaves are looked at for a backward pass that the loss function ran itself: such a pass reaches nearly all."""

Mark = tuple[int, int]
"""Which tensor a ``.grad`` is, and how often it was written into."""


class Gradients:
    """The sum of gradients of one call.

    Args:
        others: the ids of leaves whose gradients somebody else collects.
    """

    def __init__(self, others: Iterable[int] = ()) -> None:
        self._known = set(others)
        """The ids of leaves that need not be looked at again; `_before` keeps its leaves alive."""
        self._nodes: set[Node] = set()
        """The nodes of leaves that were reached, which autograd makes anew if nobody holds them."""
        self._before: dict[Tensor, Tensor | None] = {}
        """What was in ``.grad`` of each leaf."""
        self._wide: dict[Tensor, Tensor] = {}
        """The sums that have another dtype than their gradient."""
        self._left: list[Tensor] = []
        self._first: list[Tensor] = []
        """The leaves whose first gradient has not come yet: autograd takes over its memory, whoever's it is."""
        self._hooks = Hooks()
        self._looked_at: list[Tensor] = []
        """Leaves in which a backward pass of the loss function's own shows: all, until `_SAMPLE` or more hold anything."""
        self._is_sample = False
        """They are some of those that hold anything."""
        self._noted: list[Mark | None] = []
        """What the last `backward` left in them."""
        self.delivered = False
        """`deliver` has come to its end."""

    def expect(self, leaves: Iterable[Tensor]) -> None:
        """Collect the gradients of `leaves` in case they get one; those of a wrapped optimizer are left to it."""
        self._take(leaf for leaf in leaves if not is_watched(leaf))

    def reach(self, *tensors: Tensor) -> None:
        """Collect the gradients of the leaves to which a backward pass through `tensors` is about to deliver.

        Raises:
            UsageError: one belongs to a wrapped optimizer, which collects its gradients itself.
        """
        new = [leaf for leaf in leaves_of_graph(tensors, self._nodes) if id(leaf) not in self._known]
        for leaf in new:
            if is_watched(leaf):
                raise _wrapped_error(leaf)
        self._take(new)

    def pass_by(self, others: Iterable[int]) -> None:
        """Leave the gradients of `others`, the ids of leaves, to somebody else."""
        self._known.update(others)

    def leave(self, leaves: Iterable[Tensor]) -> None:
        """Leave the gradients of `leaves` in their ``.grad``."""
        self._left = list(leaves)  # Alive, so that no other leaf gets the id of one.
        self._first += self._left
        self._known.update(map(id, self._left))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """If the block raises, every ``.grad`` is what it was, unless the gradients were delivered."""
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
                if not self._is_sample:
                    self._looked_at.append(leaf)
                    self._noted.append(None)
                if gradient_dtype(leaf) in HALF:
                    self._hooks.add(leaf, partial(_move, self._wide))
                else:
                    self._first.append(leaf)

    def __bool__(self) -> bool:
        """Whether any leaf was reached."""
        return bool(self._before)

    def are_half(self) -> bool:
        """Whether some are summed in a wider dtype, and so divided as they are cast at the end."""
        return any(gradient_dtype(leaf) in HALF for leaf in self._before)

    def backward(self, tensors: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """Add the gradient of the sum of ``tensor * seed``, of one shape and dtype; every leaf of the graphs has to be reached."""
        torch.autograd.backward(tuple(tensors), tuple(seeds))
        self.note()

    def note(self) -> None:
        """Take what is in ``.grad`` now for what the call itself has left there, and make its memory the leaf's own."""
        for leaf in self._first:
            keep_own(leaf)
        self._first = [leaf for leaf in self._first if leaf.grad is None]
        self._noted = self._marks()
        if not self._is_sample:
            filled = [leaf for leaf, mark in zip(self._looked_at, self._noted, strict=True) if mark is not None]
            if len(filled) >= _SAMPLE:
                self._looked_at, self._is_sample = filled[:: len(filled) // _SAMPLE], True
                self._noted = self._marks()

    def require_untouched(self) -> None:
        """Nothing but `backward` has added to the gradients.

        Raises:
            UsageError: the loss function has.
        """
        if self._marks() != self._noted:
            raise touched_error()

    def deliver(self, divisor: float) -> None:
        """Divide the sums, and add them to what was in ``.grad``; a leaf that no micro-batch used keeps what it had.

        What may lack memory comes before the first addition, and an interrupt waits until the last one is made.
        """
        with torch.no_grad():
            self._finish(divisor)
            pairs = [(leaf, before, version(before)) for leaf, before in self._before.items() if before is not None]
            try:
                through(partial(_give_back, pairs))
            finally:  # An interrupt comes when all is delivered, and nothing is left to put back.
                self._before.clear()
                self._forget()
                self.delivered = True

    def put_back(self) -> None:
        """Make every ``.grad`` what it was."""
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
                leaf.grad = before + leaf.grad if leaf.grad.is_sparse else leaf.grad + before
                self._before[leaf] = None

    def _forget(self) -> None:
        self._hooks.keep({})
        self._wide.clear()
        self._nodes.clear()
        self._looked_at, self._is_sample, self._noted, self._left, self._first = [], False, [], [], []

    def _marks(self) -> list[Mark | None]:
        """Of the leaves that are looked at; in one call for all, as it is made twice per micro-batch."""
        wide, marks = self._wide, list[Mark | None]()
        for leaf in self._looked_at:
            held = wide.get(leaf, leaf.grad) if wide else leaf.grad
            marks.append(None if held is None else (id(held), held._version))
        return marks


def _give_back(pairs: Sequence[tuple[Tensor, Tensor, int]]) -> None:
    """Add each gradient to the one before it, of that version; a second run goes on where the first was interrupted."""
    for leaf, before, noted in pairs:
        if leaf.grad is not None and leaf.grad is not before and version(before) == noted:
            add(before, leaf.grad)
        leaf.grad = before


def leaves_of_graph(tensors: Iterable[Tensor], passed: set[Node]) -> list[Tensor]:
    """The leaves that a backward pass through `tensors` would reach, but for those whose nodes were `passed`, to which theirs are added."""
    given = list(tensors)
    leaves = [tensor for tensor in given if tensor.grad_fn is None and tensor.requires_grad]
    waiting: list[Node] = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]
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
    """Add the gradient that arrived to its wide sum."""
    gradient = leaf.grad
    if gradient is not None:
        held = wide.get(leaf)
        wide[leaf] = gradient.detach().to(sum_dtype(leaf, None)) if held is None else add(held, gradient)
        leaf.grad = None


def _wrapped_error(leaf: Tensor) -> UsageError:
    fix = "Write optimizer=opt, wrapped with steps=None; of another optimizer's parameters, call requires_grad_(False) for this call."
    found = f"one of shape {tuple(leaf.shape)} that a wrapped optimizer collects"
    return explain(UsageError, "optimizer", expected="parameters whose gradients nobody else collects", found=found, fix=fix)


untraced(_move)
