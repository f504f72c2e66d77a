"""The large batch in one call. A loss function returns the loss and its gradient."""

import numpy as np

from gradaccum.kit import (
    accumulate,
    contribution,
    divided,
    divisor,
    initial_state,
    leaves_of,
    lists_of_one_kind,
    make_division,
    make_options,
    require_item_weights,
    require_one_size,
    select,
    spread,
    with_leaves,
)
from gradaccum_conformance.reference.large_batch import (
    checked,
    concatenated,
    length_along,
    merged,
    require_closed_by_caller,
    require_scalar,
    weight_of,
)


class Total:
    """The sums of the loss and of the gradient over the micro-batches."""

    def __init__(self, reduction):
        self.options = make_options(None, reduction=reduction)
        self.machine = initial_state(1.0)
        self.loss = 0.0
        self.sums = {}

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


def micro_batches(batch, weight, axes=0, **how):
    """Yield each micro-batch and its weight."""
    division = make_division(**how)
    leaves = leaves_of(batch, "batch")
    placed = list(zip(leaves, spread(axes, batch, "axes"), strict=True))
    sizes = [
        (leaf.path, length_along(leaf.value, axis, leaf.path))
        for leaf, axis in placed
        if axis is not None
    ]
    items = require_one_size(sizes, lists_of_one_kind(batch, axes))
    if weight is not None and not callable(weight):
        weight = require_item_weights(weight, items)
    for cut in divided(division, items):
        rows = slice(cut.start, cut.stop)
        values = (
            leaf.value if axis is None else leaf.value[rows] for leaf, axis in placed
        )
        part = with_leaves(batch, values)
        if isinstance(weight, list):
            yield part, sum(weight[rows])
        else:
            yield part, weight_of(part[:2], weight)


def value_and_grad(
    loss_fn,
    batch,
    *,
    reduction="mean",
    weight=None,
    has_aux=False,
    merge_aux=None,
    **how,
):
    """Return the loss, the gradient and the aux of the large batch."""
    total = Total(reduction)
    auxes = []
    weights = []
    for part, w in micro_batches(batch, weight, **how):
        loss, gradient, aux = checked(loss_fn(part), has_aux)
        total.add(loss, gradient, w)
        auxes.append(aux)
        weights.append(w)
    return *total.mean(), merged(auxes, weights, merge_aux) if has_aux else None


def update(optimizer, loss_fn, batch, *, weight=None, **how):
    """Run a whole window of a wrapped optimizer, and return its loss."""
    require_closed_by_caller(optimizer.options)
    total = Total(optimizer.options.reduction)
    given = [
        (checked(loss_fn(part), False), w)
        for part, w in list(micro_batches(batch, weight, **how))
    ]
    for (loss, gradient, _), w in given:
        total.add(loss, {}, w)
        optimizer.step(gradient, w, loss)
    optimizer.flush()
    return total.mean()[0]


def coupled_value_and_grad(outputs_fn, loss_fn, batch, **how):
    """Compute all outputs, and then pass each micro-batch the gradient with respect
    to its own outputs.

    ``outputs_fn(micro_batch)`` returns the outputs, and a function from the gradients
    of the outputs to the gradients of the parameters. ``loss_fn(outputs)`` returns the
    loss, the gradients of the outputs, and the gradients of its own parameters, which
    count once.
    """
    parts = [part for part, _ in micro_batches(batch, None, **how)]
    outputs = concatenated([outputs_fn(part)[0] for part in parts])
    loss, gradients, own = loss_fn(outputs)
    require_scalar(loss)
    sums = Total("sum")
    start = 0
    for part in parts:
        stop = start + len(leaves_of(part)[0].value)
        own_part = {name: g[start:stop] for name, g in gradients.items()}
        sums.add(0.0, outputs_fn(part)[1](own_part), 1)
        start = stop
    return loss, sums.mean()[1] | own
