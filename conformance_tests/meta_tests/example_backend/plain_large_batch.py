"""The large batch in one call: a loss function gives its gradient with the loss."""

import numpy as np

from gradaccum.kit import (
    MEANS,
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
        self.options = make_options(None, reduction=reduction)
        self.machine = initial_state(1.0)
        self.loss, self.sums = 0.0, {}

    def add(self, loss, gradient, weight):
        factor = contribution(weight, self.options)
        self.loss += factor * loss if weight else 0
        for name, g in gradient.items():
            term = g.dtype.type(factor) * g if weight else np.zeros_like(g)
            self.sums[name] = self.sums.get(name, 0) + term
        self.machine = accumulate(self.machine, weight, True, select)

    def mean(self):
        by = divisor(self.machine, self.options, select)
        sums = {name: total / total.dtype.type(by) for name, total in self.sums.items()}
        return self.loss / by, sums


def micro_batches(batch, weight, axes=0, split=None, **how):
    """Each micro-batch with its weight."""
    division = make_division(**how, own_split=split is not None)
    batch, lists = mark_lists(batch, axes)
    if split is not None:
        for part in own_parts(split, batch, division.steps):
            yield part, weight_of(part, weight)
        return
    leaves = leaves_of(batch, "batch")
    placed = list(zip(leaves, spread(axes, batch, "axes"), strict=True))
    sizes = [
        (leaf.path, length_along(leaf.value, axis, leaf.path))
        for leaf, axis in placed
        if axis is not None
    ]
    items = require_one_size(sizes, lists)
    of_part = weight is None or callable(weight)
    each = None if of_part else require_item_weights(weight, items)
    for cut in divided(division, items, each):
        own = slice(cut.start, cut.stop)
        values = (
            leaf.value if axis is None else leaf.value[own] for leaf, axis in placed
        )
        part = with_leaves(batch, values)
        counted = weight_of(part[:2], weight) if of_part else sum(each[own])
        yield part, counted


def value_and_grad(loss_fn, batch, *, reduction="mean", weight=None, aux=None, **how):
    """Return the loss, gradient and aux of the large batch from those of its parts."""
    total, outputs = Total(reduction), Outputs(aux)
    for part, w in micro_batches(batch, weight, **how):
        loss, gradient, given = checked(loss_fn(part), aux)
        total.add(loss, gradient, w)
        outputs.add(given, w)
    return *total.mean(), outputs.whole()


class Outputs:
    """The other outputs of a loss function, merged by the declared kinds."""

    def __init__(self, declared):
        self.declared, self.kinds, self.values = declared or {}, [], []
        self.weight = 0.0

    def add(self, given, weight):
        given = {} if given is None else given
        self.kinds, self.like = kinds_of(self.declared, given), given
        values = [leaf.value for leaf in leaves_of(given)]
        if "concatenate" in self.kinds and not all(map(np.ndim, values)):
            raise concatenate_error("aux", "a scalar")
        shares = [
            self.share(kind, value, weight)
            for kind, value in zip(self.kinds, values, strict=True)
        ]
        if self.values:
            pairs = zip(self.kinds, self.values, shares, strict=True)
            shares = [self.joined(*pair) for pair in pairs]
        self.values = shares
        self.weight += weight

    def share(self, kind, value, weight):
        if kind in MEANS and not weight:
            value = np.zeros_like(value)
        return share(kind, value, weight, Ops)

    def joined(self, kind, so_far, more):
        if kind == "concatenate":
            return np.concatenate([so_far, more])
        return merged(kind, so_far, more, Ops)

    def whole(self):
        values = [
            finished(kind, value, self.weight or 1)
            for kind, value in zip(self.kinds, self.values, strict=True)
        ]
        return with_leaves(self.like, iter(values))


def update(optimizer, loss_fn, batch, *, weight=None, **how):
    """A whole window of a wrapped optimizer, and its loss."""
    require_closed_by_caller(optimizer.options)
    total = Total(optimizer.options.reduction)
    given = [
        (checked(loss_fn(part), None), w)
        for part, w in list(micro_batches(batch, weight, **how))
    ]
    for (loss, gradient, _), w in given:
        total.add(loss, {}, w)
        optimizer.step(gradient, w, loss)
    optimizer.flush()
    return total.mean()[0]


def coupled_value_and_grad(outputs_fn, loss_fn, batch, **how):
    """Compute all outputs, then send each micro-batch the gradient of its own.

    ``outputs_fn(micro_batch)`` gives the outputs and a map from their gradients to
    the parameters'. ``loss_fn(outputs)`` gives the loss, the outputs' gradients and
    those of its own parameters, which count once.
    """
    parts = [part for part, _ in micro_batches(batch, None, **how)]
    outputs = Outputs("concatenate")
    for part in parts:
        outputs.add(outputs_fn(part)[0], 1)
    loss, gradients, own = loss_fn(outputs.whole())
    require_scalar(loss)
    sums, start = Total("sum"), 0
    for part in parts:
        stop = start + len(leaves_of(part)[0].value)
        own_part = {name: g[start:stop] for name, g in gradients.items()}
        sums.add(0.0, outputs_fn(part)[1](own_part), 1)
        start = stop
    return loss, sums.mean()[1] | own
