"""The large batch in one call, for the framework in plain.py: a loss function gives its gradient along with the loss."""

import numpy as np

from gradaccum.kit import (
    accumulate,
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


class Ops:
    """What merging asks of the framework."""

    maximum, minimum, widened = np.maximum, np.minimum, np.asarray


class Total:
    """The sum over micro-batches, by a reduction, of the loss and the gradient."""

    def __init__(self, reduction):
        self.options, self.machine, self.loss, self.sums = make_options(None, reduction=reduction), initial_state(1.0), 0.0, {}

    def add(self, loss, gradient, weight):
        factor = contribution(weight, self.options)
        self.loss += factor * loss
        for name, g in gradient.items():
            self.sums[name] = self.sums.get(name, 0) + g.dtype.type(factor) * g
        self.machine = accumulate(self.machine, weight, True, select)

    def mean(self):
        by = divisor(self.machine, self.options, select)
        return self.loss / by, {name: total / total.dtype.type(by) for name, total in self.sums.items()}


def micro_batches(batch, weight, axes=0, **how):
    """Each micro-batch with its number of items and its weight."""
    division, (batch, lists) = make_division(**how), mark_lists(batch, axes)
    leaves = leaves_of(batch, "batch")
    cut_up = [axis is not None and hasattr(leaf.value, "__len__") for leaf, axis in zip(leaves, spread(axes, batch, "axes"), strict=True)]
    items = require_one_size([(leaf.path, len(leaf.value)) for leaf, is_cut in zip(leaves, cut_up, strict=True) if is_cut], lists)
    each = None if weight is None else require_item_weights(weight, items)
    for cut in divided(division, items, each):
        values = [leaf.value[cut.start : cut.stop] if is_cut else leaf.value for leaf, is_cut in zip(leaves, cut_up, strict=True)]
        part = with_leaves(batch, iter(values))
        yield part, cut.items, cut.items if each is None else sum(each[cut.start : cut.stop])


def value_and_grad(loss_fn, batch, *, reduction="mean", weight=None, aux=None, **how):
    """Of ``loss_fn(micro_batch)``, which gives (loss, gradient, aux): those of the large batch."""
    total, outputs = Total(reduction), Outputs(aux)
    for part, items, w in micro_batches(batch, weight, **how):
        loss, gradient, given = loss_fn(part)
        total.add(loss, gradient, w)
        outputs.add(given, items, w)
    return *total.mean(), outputs.whole()


class Outputs:
    """The other outputs of a loss function, merged by the kinds that the user declares."""

    def __init__(self, declared):
        self.declared, self.kinds, self.values, self.items, self.weight = declared or {}, [], [], 0, 0.0

    def add(self, given, items, weight):
        self.kinds, self.like = kinds_of(self.declared, given), given
        shares = [share(kind, leaf.value, items, weight, Ops) for kind, leaf in zip(self.kinds, leaves_of(given), strict=True)]
        self.values = [self.joined(*pair) for pair in zip(self.kinds, self.values, shares, strict=True)] if self.items else shares
        self.items, self.weight = self.items + items, self.weight + weight

    def joined(self, kind, so_far, more):
        return np.concatenate([so_far, more]) if kind == "concatenate" else merged(kind, so_far, more, Ops)

    def whole(self):
        values = [finished(kind, value, self.items, self.weight) for kind, value in zip(self.kinds, self.values, strict=True)]
        return with_leaves(self.like, iter(values))


def update(optimizer, loss_fn, batch, *, weight=None, **how):
    """A whole window of a wrapped optimizer, and its loss."""
    total = Total(optimizer.options.reduction)
    for part, _, w in list(micro_batches(batch, weight, **how)):
        loss, gradient, _ = loss_fn(part)
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
    sums, start = Total("sum"), 0
    for part in parts:
        stop = start + len(leaves_of(part)[0].value)
        sums.add(0.0, outputs_fn(part)[1]({name: gradient[start:stop] for name, gradient in gradients.items()}), 1)
        start = stop
    return loss, sums.mean()[1] | own
