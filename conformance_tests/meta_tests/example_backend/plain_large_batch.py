"""The large batch in one call, for the framework in plain.py: a loss function gives its gradient along with the loss."""

import numpy as np

from gradaccum.kit import (
    accumulate,
    concatenate_error,
    contribution,
    divided,
    divisor,
    finished,
    initial_state,
    kinds_of,
    leaves_of,
    make_division,
    make_options,
    mark_lists,
    merged,
    require_item_weights,
    require_one_size,
    select,
    share,
    spread,
    with_leaves,
)
from gradaccum_conformance.reference.large_batch import (
    checked,
    length_along,
    own_parts,
    require_closed_by_caller,
    require_scalar,
    weight_of,
)


class Ops:
    """What merging asks of the framework."""

    maximum, minimum, widened = np.maximum, np.minimum, np.asarray


class Total:
    """The sum over micro-batches, by a reduction, of the loss and the gradient."""

    def __init__(self, reduction):
        self.options, self.machine, self.loss, self.sums = make_options(None, reduction=reduction), initial_state(1.0), 0.0, {}

    def add(self, loss, gradient, weight):
        factor = contribution(weight, self.options)
        self.loss += factor * loss if weight else 0
        for name, g in gradient.items():
            self.sums[name] = self.sums.get(name, 0) + (g.dtype.type(factor) * g if weight else np.zeros_like(g))
        self.machine = accumulate(self.machine, weight, True, select)

    def mean(self):
        by = divisor(self.machine, self.options, select)
        return self.loss / by, {name: total / total.dtype.type(by) for name, total in self.sums.items()}


def micro_batches(batch, weight, axes=0, split=None, **how):
    """Each micro-batch with its number of items and its weight."""
    division, (batch, lists) = make_division(**how, own_split=split is not None), mark_lists(batch, axes)
    if split is not None:
        for part in own_parts(split, batch, division.steps):
            yield part, len(part[0]), weight_of(part, weight)
        return
    leaves = leaves_of(batch, "batch")
    placed = zip(leaves, spread(axes, batch, "axes"), strict=True)
    sizes = [None if axis is None else length_along(leaf.value, axis, leaf.path) for leaf, axis in placed]
    items = require_one_size([(leaf.path, size) for leaf, size in zip(leaves, sizes, strict=True) if size is not None], lists)
    each = None if weight is None or callable(weight) else require_item_weights(weight, items)
    for cut in divided(division, items, each):
        values = [leaf.value if size is None else leaf.value[cut.start : cut.stop] for leaf, size in zip(leaves, sizes, strict=True)]
        part = with_leaves(batch, iter(values))
        yield part, cut.items, weight_of(part[:2], weight) if each is None else sum(each[cut.start : cut.stop])


def value_and_grad(loss_fn, batch, *, reduction="mean", weight=None, aux=None, **how):
    """Of ``loss_fn(micro_batch)``, which gives (loss, gradient, aux): those of the large batch."""
    total, outputs = Total(reduction), Outputs(aux)
    for part, items, w in micro_batches(batch, weight, **how):
        loss, gradient, given = checked(loss_fn(part), aux)
        total.add(loss, gradient, w)
        outputs.add(given, items, w)
    return *total.mean(), outputs.whole()


class Outputs:
    """The other outputs of a loss function, merged by the kinds that the user declares."""

    def __init__(self, declared):
        self.declared, self.kinds, self.values, self.items, self.weight = declared or {}, [], [], 0, 0.0

    def add(self, given, items, weight):
        given = {} if given is None else given
        self.kinds, self.like = kinds_of(self.declared, given), given
        if "concatenate" in self.kinds and not all(np.ndim(leaf.value) for leaf in leaves_of(given)):
            raise concatenate_error("aux", "a scalar")
        values = [np.zeros_like(leaf.value) if kind == "weighted_mean" and not weight else leaf.value for kind, leaf in self.placed(given)]
        shares = [share(kind, value, items, weight, Ops) for kind, value in zip(self.kinds, values, strict=True)]
        self.values = [self.joined(*pair) for pair in zip(self.kinds, self.values, shares, strict=True)] if self.items else shares
        self.items, self.weight = self.items + items, self.weight + weight

    def placed(self, given):
        return zip(self.kinds, leaves_of(given), strict=True)

    def joined(self, kind, so_far, more):
        return np.concatenate([so_far, more]) if kind == "concatenate" else merged(kind, so_far, more, Ops)

    def whole(self):
        values = [finished(kind, value, self.items, self.weight or 1) for kind, value in zip(self.kinds, self.values, strict=True)]
        return with_leaves(self.like, iter(values))


def update(optimizer, loss_fn, batch, *, weight=None, **how):
    """A whole window of a wrapped optimizer, and its loss."""
    require_closed_by_caller(optimizer.options)
    total = Total(optimizer.options.reduction)
    given = [(checked(loss_fn(part), None), w) for part, _, w in list(micro_batches(batch, weight, **how))]
    for (loss, gradient, _), w in given:
        total.add(loss, {}, w)
        optimizer.step(gradient, w, loss)
    optimizer.flush()
    return total.mean()[0]


def coupled_value_and_grad(outputs_fn, loss_fn, batch, **how):
    """Two passes: all outputs first; then their gradients, made at once, go back one micro-batch at a time.

    ``outputs_fn(micro_batch)`` gives the outputs and what maps their gradients to the parameters'. ``loss_fn(outputs)`` gives the loss,
    the gradients of the outputs and that of its own parameters, which is there once.
    """
    parts = [part for part, *_ in micro_batches(batch, None, **how)]
    outputs = Outputs("concatenate")
    for part in parts:
        outputs.add(outputs_fn(part)[0], len(leaves_of(part)[0].value), 1)
    loss, gradients, own = loss_fn(outputs.whole())
    require_scalar(loss)
    sums, start = Total("sum"), 0
    for part in parts:
        stop = start + len(leaves_of(part)[0].value)
        sums.add(0.0, outputs_fn(part)[1]({name: gradient[start:stop] for name, gradient in gradients.items()}), 1)
        start = stop
    return loss, sums.mean()[1] | own
