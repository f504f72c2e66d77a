"""The large batch and its micro-batches: consecutive items along each leaf's batch
axis, as views of the user's own tensors.

All are listed before the first one runs: their weights must be known by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumError,
    UsageError,
    kit,
)
from gradaccum_torch.arithmetic import HALF
from gradaccum_torch.torch_private.names import is_sharded, is_sharded_along

PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""A leaf that is one plain value has no items, and is given whole to each micro-batch.
"""

Split = Callable[..., Iterable[Any]]
"""The user's own ``split(*batch)``, or ``split(*batch, steps=steps)`` where steps are
given.
"""


class MicroBatch(NamedTuple):
    """The arguments of one call of the loss function, and its share."""

    arguments: tuple[Any, ...]
    items: int | None
    """None: the user's own split gave leaves of several lengths."""
    weight: float


class LargeBatch:
    """The arguments that are to be divided."""

    def __init__(
        self,
        batch: tuple[Any, ...],
        axes: kit.Nest,
        weight: Weight,
        split: Split | None,
    ) -> None:
        self._batch = batch
        self._axes = axes
        self._split = split
        self._leaves = kit.leaves_of(batch, "batch")
        self.tensors = [
            leaf.value for leaf in self._leaves if isinstance(leaf.value, Tensor)
        ]
        for leaf in self._leaves:
            _require_own_graph(leaf)
        self._is_flat = [id(leaf.value) for leaf in self._leaves] == list(
            map(id, batch)
        )
        self._lists: list[tuple[str, int, str]] = []
        if not (split or self._is_flat):
            self._batch, self._lists = kit.mark_lists(batch, axes)
            if self._batch is batch:
                self._leaves = self._leaves
            else:
                self._leaves = kit.leaves_of(self._batch, "batch")
        if split:
            self._places = []
        else:
            self._places = [
                axis_of(*pair)
                for pair in zip(self._leaves, self._wanted(), strict=True)
            ]
        self.items = None if split else self._count()
        """The number of items; None beside the user's own split."""
        self._weights = Weights(weight, self.items)

    def micro_batches(self, division: kit.Division) -> list[MicroBatch]:
        if self._split is not None:
            given = _own(self._split, self._batch, division.steps)
            return self._weighed(
                given, [self._items_of(arguments) for arguments in given], None
            )
        assert self.items is not None
        cuts = kit.divided(division, self.items, self._weights.per_item)
        return self._weighed(self._cut(cuts), [cut.items for cut in cuts], cuts)

    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self.tensors}

    def _wanted(self) -> list[kit.Nest]:
        if isinstance(self._axes, int):
            return [self._axes] * len(self._leaves)
        return kit.spread(self._axes, self._batch, "axes")

    def _weighed(
        self,
        given: Sequence[tuple[Any, ...]],
        items: Sequence[int | None],
        cuts: Sequence[kit.Cut] | None,
    ) -> list[MicroBatch]:
        return list(map(MicroBatch, given, items, self._weights.of(given, items, cuts)))

    def _count(self) -> int:
        placed = zip(self._leaves, self._places, strict=True)
        return kit.require_one_size(
            (
                (leaf.path, length_of(leaf.value, axis))
                for leaf, axis in placed
                if axis is not None
            ),
            self._lists,
        )

    def _cut(self, cuts: Sequence[kit.Cut]) -> list[tuple[Any, ...]]:
        pieces = [
            _pieces(leaf.value, axis, cuts)
            for leaf, axis in zip(self._leaves, self._places, strict=True)
        ]
        rows = list(zip(*pieces, strict=True))
        if self._is_flat:
            return rows
        wholes: list[Any] = [kit.with_leaves(self._batch, iter(row)) for row in rows]
        return wholes

    def _items_of(self, arguments: tuple[Any, ...]) -> int | None:
        marked, _ = kit.mark_lists(arguments, self._axes)
        pairs = zip(
            kit.leaves_of(marked, "batch"),
            kit.spread(self._axes, marked, "axes"),
            strict=True,
        )
        lengths = {
            length_of(leaf.value, axis)
            for leaf, wanted in pairs
            if (axis := _axis_or_none(leaf.value, wanted)) is not None
        }
        return lengths.pop() if len(lengths) == 1 else None


def _own(
    split: Split, batch: tuple[Any, ...], steps: int | None
) -> list[tuple[Any, ...]]:
    """Return the micro-batches of the user's `split`, each as a tuple of arguments."""
    made: Any = (
        split
        if not callable(split)
        else split(*batch)
        if steps is None
        else split(*batch, steps=steps)
    )
    if not isinstance(made, Iterable) or isinstance(made, Tensor):
        fix = (
            "Return a list of tuples of arguments: split=lambda x, y:"
            " list(zip(x.split(4), y.split(4)))."
        )
        raise kit.explain(
            ArgumentTypeError,
            "split",
            expected="a function that returns an iterable of micro-batches",
            got=made,
            fix=fix,
        )
    given = [part if type(part) is tuple else (part,) for part in made]
    if not given or (steps is not None and len(given) > steps):
        if steps is None:
            bound = "at least one micro-batch"
        else:
            bound = f"1 to {steps} micro-batches"
        fix = "Return what the batch holds, in at most as many parts as steps= says."
        raise kit.explain(
            ArgumentValueError, "split", expected=bound, found=f"{len(given)}", fix=fix
        )
    return given


def axis_of(leaf: kit.Leaf, axis: object) -> int | None:
    """Return the batch axis of `leaf`, counted from the front; None if it is passed
    whole.
    """
    if axis is None or isinstance(leaf.value, PLAIN):
        return None
    if axis != kit.ITEMS and (not isinstance(axis, int) or isinstance(axis, bool)):
        expected = "an int, 'items' or None for each leaf"
        fix = "Write axes=0, or axes=(0, None)."
        raise kit.explain(
            ArgumentTypeError, "axes", expected=expected, got=axis, fix=fix
        )
    if isinstance(leaf.value, Tensor) and (
        leaf.value.is_nested or leaf.value.layout is not torch.strided
    ):
        found = (
            f"a {'nested' if leaf.value.is_nested else 'sparse'} one of layout"
            f" {leaf.value.layout}"
        )
        fix = (
            "Write split= a function that cuts it, or pad it; axes=None where every"
            " micro-batch is given it whole."
        )
        raise kit.explain(
            ArgumentValueError,
            leaf.path,
            expected="a dense tensor to split",
            found=found,
            fix=fix,
        )
    place = _axis_or_none(leaf.value, axis)
    if place is None:
        raise _no_axis_error(leaf, axis)
    if isinstance(leaf.value, Tensor) and is_sharded_along(leaf.value, place):
        raise _sharded_items_error(leaf.path, leaf.value)
    return place


def _axis_or_none(value: Any, axis: Any) -> int | None:
    if axis is None or axis == kit.ITEMS:
        return None if axis is None or not kit.is_column(value) else 0
    # An old nested tensor has no shape.
    shape = () if isinstance(value, Tensor) else getattr(value, "shape", None)
    if kit.is_column(value):
        dimensions = 1
    elif isinstance(value, Tensor):
        dimensions = value.dim()
    elif isinstance(shape, tuple):
        dimensions = len(shape)
    else:
        dimensions = 0
    return axis % dimensions if -dimensions <= axis < dimensions else None


def length_of(value: Any, axis: int) -> int:
    if kit.is_column(value):
        return len(value)
    return int(value.size(axis) if isinstance(value, Tensor) else value.shape[axis])


def _pieces(value: Any, axis: int | None, cuts: Sequence[kit.Cut]) -> Sequence[Any]:
    """Return the items of each cut, as views; without an axis the value itself."""
    if axis is None:
        return [value] * len(cuts)
    if isinstance(value, Tensor) and not value.requires_grad:
        views: Sequence[Tensor] = torch.split(value, [cut.items for cut in cuts], axis)
        return views
    # Views that come of one call cannot be written into under autograd.
    if isinstance(value, Tensor):
        return [value.narrow(axis, cut.start, cut.items) for cut in cuts]
    before = (slice(None),) * axis
    return [value[(*before, slice(*cut)) if axis else slice(*cut)] for cut in cuts]


def _no_axis_error(leaf: kit.Leaf, axis: object) -> GradAccumError:
    shape = getattr(leaf.value, "shape", None)
    found = f"a {type(leaf.value).__name__}" + (
        "" if shape is None else f" of shape {tuple(shape)}"
    )
    fix = (
        "Write axes=None for a leaf that every micro-batch is given whole, its axis for"
        " another one, 'items' for a list of items."
    )
    if axis == kit.ITEMS:
        expected = "a list of items, as axes= say"
    else:
        expected = f"an array with an axis {axis} to split"
    return kit.explain(
        ArgumentValueError, leaf.path, expected=expected, found=found, fix=fix
    )


def _sharded_items_error(path: str, tensor: Any) -> GradAccumError:
    """Return the error for items that several workers hold: torch would gather the
    batch to cut it, and each worker would compute all of it.
    """
    fix = (
        "Give each worker its own items, x.to_local(), beside a wrapped optimizer that"
        " knows the module; or write split= a function that cuts the local parts and"
        " returns DTensor.from_local(part, mesh, placements) of each."
    )
    return kit.explain(
        ArgumentValueError,
        path,
        expected="items that are whole on each worker",
        found=f"a DTensor of placements {tensor.placements}",
        fix=fix,
    )


def _require_own_graph(leaf: kit.Leaf) -> None:
    """Raise unless the tensor has no graph, which the first micro-batch's backward pass
    would free.
    """
    if isinstance(leaf.value, Tensor) and leaf.value.grad_fn is not None:
        fix = "Compute it in the loss function, or give it .detach()."
        raise kit.explain(
            ArgumentValueError,
            leaf.path,
            expected="a tensor without a graph",
            found="one that was computed with gradients",
            fix=fix,
        )


def require_function(argument: str, function: object) -> None:
    if not callable(function):
        fix = (
            "Write gradaccum_torch.backward(loss_fn, x, y, steps=4), and loss_fn is"
            " called with each micro-batch of x and y."
        )
        raise kit.explain(
            ArgumentTypeError, argument, expected="a function", got=function, fix=fix
        )


def require_alone(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, DistributedDataParallel) or any(
            map(is_sharded, module.parameters(recurse=False))
        ):
            found = f"a {type(module).__name__} that several workers train"
            fix = (
                "Write optimizer=gradaccum.wrap(optimizer, steps=None, module=module):"
                " the sum is then reduced as the wrapper does it."
            )
            raise kit.explain(
                UsageError,
                "optimizer",
                expected="a wrapped optimizer beside workers",
                found=found,
                fix=fix,
            )


# The weight of each micro-batch, in Python numbers, read from the device at most once
# per call.


Weight: TypeAlias = Callable[..., Any] | Sequence[float] | Tensor | None
"""A callable of the micro-batch, one number per item, or None."""


class Weights:
    """The weights of micro-batches."""

    def __init__(self, given: Weight, items: int | None) -> None:
        self._of_micro_batch = given if callable(given) else None
        if given is None or callable(given):
            self.per_item = None
        else:
            self.per_item = _per_item(given, items)

    def of(
        self,
        given: Sequence[tuple[Any, ...]],
        items: Sequence[int | None],
        cuts: Sequence[kit.Cut] | None,
    ) -> list[float]:
        if self._of_micro_batch is not None:
            return _checked([self._of_micro_batch(*arguments) for arguments in given])
        if self.per_item is not None and cuts is not None:
            per_item = self.per_item
            return [math.fsum(per_item[cut.start : cut.stop]) for cut in cuts]
        if None in items:
            fix = (
                "Write weight= a callable of the micro-batch that returns its number of"
                " items or tokens."
            )
            found = "a micro-batch of your own split whose leaves have several lengths"
            raise kit.explain(
                ArgumentValueError,
                "weight",
                expected="a weight that can be counted",
                found=found,
                fix=fix,
            )
        return [float(number) for number in items if number is not None]


def _per_item(given: Any, items: int | None) -> list[float]:
    if items is None:
        fix = "Write weight= a callable of the micro-batch: weight=lambda x, y: len(y)."
        raise kit.explain(
            ArgumentTypeError,
            "weight",
            expected="a callable beside split=",
            found="one number per item",
            fix=fix,
        )
    # A tensor comes from its device in one transfer.
    return kit.require_item_weights(
        given.tolist() if isinstance(given, Tensor) and given.dim() == 1 else given,
        items,
    )


def _checked(weights: list[Any]) -> list[float]:
    tensors = [
        place for place, value in enumerate(weights) if isinstance(value, Tensor)
    ]
    for place in tensors:
        if weights[place].numel() != 1 or weights[place].is_complex():
            fix = (
                "Return one number per micro-batch: weight=lambda x, mask: mask.sum()."
            )
            found = (
                f"a tensor of shape {tuple(weights[place].shape)} and"
                f" {weights[place].dtype}"
            )
            raise kit.explain(
                ArgumentValueError,
                "weight",
                expected="a callable that returns a number",
                found=found,
                fix=fix,
            )
        if weights[place].requires_grad:
            raise kit.moving_weight_error(
                "Return weight.detach(), if the loss function divides by a detached"
                " number too."
            )
    if tensors:
        read = torch.stack(
            [weights[place].detach().double().reshape(()) for place in tensors]
        ).tolist()
        for place, value in zip(tensors, read, strict=True):
            weights[place] = value
    return [kit.require_weight(value) for value in weights]


def cat(path: str, parts: Sequence[Tensor]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        raise kit.concatenate_error(
            path, f"shapes {sorted({tuple(part.shape) for part in parts})}"
        )
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


# The loss of a micro-batch as it is returned, and that of the large batch as the core
# weighs it.


class Shares(NamedTuple):
    """The share of each micro-batch: the large batch's gradient is sum(contribution *
    gradient) / divisor.
    """

    contributions: list[float]
    """0 for a micro-batch of weight 0, which adds nothing."""
    divisor: float


def shares_of(weights: Sequence[float], options: kit.Options) -> Shares:
    fields: kit.Fields = kit.initial_state()
    contributions = []
    for weight in weights:
        contributions.append(
            float(kit.contribution(weight, options))
            if kit.usable(fields, weight, True)
            else 0.0
        )
        fields = kit.accumulate(fields, weight, True, kit.select)
    return Shares(contributions, float(kit.divisor(fields, options, kit.select)))


def evaluated(
    loss_fn: Callable[..., Any], micro_batch: MicroBatch, *, has_aux: bool
) -> tuple[Tensor, kit.Nest]:
    """Return the loss, a real tensor of shape ``()``, and the aux of one
    micro-batch.
    """
    returned = loss_fn(*micro_batch.arguments)
    if has_aux != (isinstance(returned, tuple) and len(returned) == 2):
        if isinstance(returned, tuple):
            shape = f"a tuple of {len(returned)}"
        else:
            shape = f"a {type(returned).__name__}"
        raise kit.aux_shape_error(shape, declared=has_aux)
    loss, aux = returned if has_aux else (returned, None)
    if not isinstance(loss, Tensor):
        raise kit.scalar_loss_error(f"a {type(loss).__name__}")
    if loss.dim() or not loss.is_floating_point():
        raise kit.scalar_loss_error(
            f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
        )
    if micro_batch.weight and not loss.requires_grad:
        fix = (
            "Compute it from parameters that require gradients, outside of"
            " torch.no_grad(); give weight 0 to what is to add nothing."
        )
        raise kit.explain(
            ArgumentValueError,
            "loss_fn",
            expected="a loss that can be differentiated",
            found="one without a graph",
            fix=fix,
        )
    return loss, aux


def large_batch_loss(losses: Sequence[Tensor], shares: Shares) -> Tensor:
    """Return the large batch's loss in the dtype of `losses`, summed in float32 at
    least; 0 if nothing counts.
    """
    dtype = losses[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    counted = [
        (loss.to(wide), factor / shares.divisor)
        for loss, factor in zip(losses, shares.contributions, strict=True)
        if factor
    ]
    if not counted:
        return torch.zeros_like(losses[0])
    values, factors = zip(*counted, strict=True)
    same = len(set(factors)) == 1
    if same:
        by = factors[0]
    else:
        by = torch.tensor(factors, dtype=wide, device=losses[0].device)
    total: Tensor = (
        torch.stack(values).sum() * by if same else (torch.stack(values) * by).sum()
    )
    return total.to(dtype)


# The other outputs of a loss function, merged as they come into those of the large
# batch. The core has the arithmetic.


class _Ops:
    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b)

    def widened(self, value: Tensor) -> Tensor:
        if value.dtype in HALF:
            return value.float()
        return value.long() if value.dtype is torch.bool else value


_OPS = _Ops()


class _Sums(NamedTuple):
    nest: kit.Nest
    paths: list[str]
    kinds: list[str]
    so_far: list[Any]
    weight: float = 0.0


class Merged:
    """The merged aux of the micro-batches so far."""

    def __init__(self, declared: kit.Nest) -> None:
        self._declared = declared
        self._sums: _Sums | None = None
        require_kinds(declared)

    def add(self, aux: kit.Nest, micro_batch: MicroBatch) -> None:
        """Merge one micro-batch's aux: tensors of any dtype, or Python numbers; all are
        detached.
        """
        leaves = kit.leaves_of(aux, "aux")
        paths = [leaf.path for leaf in leaves]
        sums = self._sums
        kinds = kit.kinds_of(self._declared, aux) if sums is None else sums.kinds
        if sums is not None and paths != sums.paths:
            fix = "Return the same structure for every micro-batch."
            raise kit.explain(
                ArgumentValueError,
                "aux",
                expected=f"the leaves {sums.paths}",
                found=f"{paths}",
                fix=fix,
            )
        values = [_value(leaf.path, leaf.value) for leaf in leaves]
        shares = [
            self._share(*each, micro_batch)
            for each in zip(kinds, paths, values, strict=True)
        ]
        if sums is None:
            so_far: list[Any] = [
                [given] if kind == "concatenate" else given
                for kind, given in zip(kinds, shares, strict=True)
            ]
            sums = _Sums(aux, paths, kinds, so_far)
        else:
            so_far = [
                _joined(*each)
                for each in zip(kinds, sums.so_far, shares, paths, strict=True)
            ]
        self._sums = sums._replace(
            so_far=so_far, weight=sums.weight + micro_batch.weight
        )

    def result(self) -> kit.Nest:
        """Return the large batch's aux. Means of half precision are in float32; a total
        weight of 0 gives 0.
        """
        assert self._sums is not None
        nest, paths, kinds, so_far, weight = self._sums
        made: list[Tensor] = [
            (
                cat(path, leaf)
                if kind == "concatenate"
                else kit.finished(kind, leaf, weight or 1.0)
            )
            for kind, leaf, path in zip(kinds, so_far, paths, strict=True)
        ]
        return kit.with_leaves(nest, iter(made))

    def _share(
        self, kind: str, path: str, value: Tensor, micro_batch: MicroBatch
    ) -> Tensor:
        if kind == "concatenate" and value.dim() == 0:
            raise kit.concatenate_error(path, "a scalar")
        # Adds nothing, even if it is NaN.
        if kind in kit.MEANS and micro_batch.weight == 0:
            value = torch.zeros_like(value)
        return kit.share(kind, value, micro_batch.weight, _OPS)


def require_kinds(declared: kit.Nest) -> None:
    inside: Sequence[tuple[object, Any]] | None
    if isinstance(declared, list | tuple):
        inside = list(enumerate(declared))
    else:
        inside = kit.children_of(declared)
    if inside is None:
        kit.require_kind(declared)
    for _, part in inside or ():
        require_kinds(part)


def _value(path: str, value: object) -> Tensor:
    """Return `value` as a tensor of its own without a graph; a Python float in
    float64.
    """
    if isinstance(value, Tensor):
        # The next micro-batch may write into it: a buffer, or what a CUDA graph
        # returns.
        return value.detach().clone()
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(
            value, dtype=torch.float64 if isinstance(value, float) else None
        )
    fix = "Return tensors and numbers."
    raise kit.explain(
        ArgumentTypeError, path, expected="a tensor or a number", got=value, fix=fix
    )


def _joined(kind: str, so_far: Any, given: Tensor, path: str) -> Any:
    if kind == "concatenate":
        so_far.append(given)
        return so_far
    if so_far.shape != given.shape:
        fix = "Reduce it to one shape in the loss function, or declare concatenate."
        raise kit.explain(
            ArgumentValueError,
            path,
            expected=f"the shape {tuple(so_far.shape)}",
            found=f"{tuple(given.shape)}",
            fix=fix,
        )
    return kit.merged(kind, so_far, given, _OPS)
