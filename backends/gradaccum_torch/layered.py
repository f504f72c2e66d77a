"""``gradaccum_torch.layered_backward``: a window that runs backwards layer by layer,
all micro-batches through one layer before the next.

A layer's update is made, and its gradient freed, when the last micro-batch has passed
it: one layer's gradients are alive at a time. Between the layers stand the borders: the
activations that one layer returned and the next one takes, and later their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    AutoMicroBatchSize,
    UsageError,
    kit,
)
from gradaccum.kit import Division, explain
from gradaccum_torch.large_batch import batch, gradients
from gradaccum_torch.large_batch.replay import (
    Before,
    RandomState,
    reached_by,
    trained_by,
)
from gradaccum_torch.large_batch.surroundings import Surroundings
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import (
    Node,
    buffers_of,
    untraced_within,
    version,
)
from gradaccum_torch.workers.deferred import LayerShards

Layer = Callable[..., Any]
Borders = Literal["keep", "recompute", "host"]
Within = Literal["recompute", "keep"]

_HOLE = object()
"""In place of a leaf; None would make a list of leaves one leaf."""
_UPDATED = (
    "gradaccum: the updates of {names} were made before this error, the last one"
    " perhaps in part, and cannot be undone; the other layers have none. Load the last"
    " checkpoint of the model and of the optimizer."
)


@untraced_within
def layered_backward(
    layers: nn.Sequential | Sequence[Layer],
    loss_fn: Callable[[Any, Any], Any],
    inputs: Any,
    targets: Any,
    *,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    reduction: str | None = None,
    weight: batch.Weight = None,
    axes: kit.Nest = 0,
    aux: kit.Nest = None,
    optimizer: AccumulatingOptimizer | None = None,
    borders: Borders = "keep",
    within: Within = "recompute",
) -> Any:
    """Add the large batch's gradient to ``.grad``, or make its update, one layer at a
    time, and return its loss.

    The result is that of `gradaccum_torch.backward` with
    ``loss_fn(layers(inputs), targets)``, to the last bit where no parameter is in two
    layers. Dropout draws the same numbers, and a batch norm sees each micro-batch once,
    in order.

    With an `optimizer` that needs no norm of the whole window, as
    ``gradaccum.wrap(optimizer, steps=None, on_overflow="ignore")``, each layer's update
    is made as soon as its sum is complete, by a ``step`` of the inner optimizer that
    finds no other gradients, and its gradient is freed. A parameter of several layers
    waits for the first of them. With ``clip_norm``, ``skip_norm`` or an overflow that
    skips, the sums of all layers are kept until the end, and only there may the
    optimizer have step hooks.

    If something raises, everything is as it was before the call, except that the
    updates of layers cannot be undone: a note on the error names these layers, and the
    optimizer refuses to go on until ``load_state_dict``.

    Args:
        layers: an `nn.Sequential`, whose own forward hooks do not run, or a sequence of
            callables of one argument, any nest, which the one before has returned.
        loss_fn: ``loss_fn(outputs, targets)`` returns a scalar loss, shape ``()``, or
            ``(loss, aux)`` if `aux` is given.
        inputs: the first layer's argument for the large batch, any nest, cut as by
            `gradaccum_torch.backward`.
        targets: the second argument of `loss_fn` for it, any nest.
        steps: at most so many micro-batches, of ceil(items / steps) items.
        micro_batch_size: the items of a micro-batch, in place of `steps`.
        reduction: as for `gradaccum_torch.backward`.
        weight: a callable, ``weight(inputs, targets)``, or one number per item, shape
            ``(items,)``.
        axes: the batch axis of each leaf, a prefix nest of ``(inputs, targets)``; None
            for what is passed whole.
        aux: as for `gradaccum_torch.backward`.
        optimizer: wrapped with ``steps=None``; the call is its window, and closes it.
        borders: the activations between layers: ``"keep"`` them, move them to the
            ``"host"``, or ``"recompute"`` all but those of every n-th layer, n about
            the square root of the number of layers.
        within: the activations inside of a layer: ``"recompute"`` them from its border,
            or ``"keep"`` those of the large batch, without a second forward pass.

    Returns:
        The loss, detached, shape ``()``; or ``(loss, aux)``.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, or a function
            returns something else.
        UsageError: something writes into what a layer takes; `optimizer` cannot take a
            window in this order; or its inner optimizer's step moves what all
            parameters share, or parameters without a gradient.

    Examples:
        >>> import torch, gradaccum
        >>> from torch import nn
        >>> layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> inner = torch.optim.AdamW(layers.parameters())
        >>> optimizer = gradaccum.wrap(inner, steps=None, on_overflow="ignore")
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> mse = nn.functional.mse_loss
        >>> layered_backward(layers, mse, x, y, steps=4, optimizer=optimizer).shape
        torch.Size([])
        >>> optimizer.result.optimizer_step
        1
    """
    functions = _require_layers(layers)
    require_activations(borders, within)
    batch.require_function("loss_fn", loss_fn)
    merged = None if aux is None else batch.Merged(aux)
    division = kit.make_division(steps, micro_batch_size)
    require_fixed_size(division)
    reached = reached_by(*functions, loss_fn)
    if optimizer is None:
        batch.require_alone(reached.modules)
    else:
        gradients.require_layered_optimizer(optimizer, reduction)
    own = "mean" if optimizer is None else optimizer.whole_window().options.reduction
    options = kit.make_options(None, reduction=own if reduction is None else reduction)
    large = batch.LargeBatch((inputs, targets), axes, weight, None)
    micro_batches = large.micro_batches(division)
    shares = batch.shares_of([each.weight for each in micro_batches], options)
    collector: gradients.Collector = (
        gradients.LossesInGrad(shares)
        if optimizer is None
        else gradients.LossesInWindow(optimizer, shares)
    )
    run = _Run(functions, loss_fn, collector, borders, recomputes=within == "recompute")
    try:
        with gradients.delivering(collector, reached, large.devices()) as before:
            returned = batch.large_batch_loss(
                run.losses(before, micro_batches, shares, merged), shares
            )
            collector.close()
    except BaseException as error:
        if run.updated and optimizer is not None and not optimizer.result.applied:
            error.add_note(_UPDATED.format(names=", ".join(run.updated)))
        raise
    return returned if merged is None else (returned, merged.result())


class _Layer:
    def __init__(self, index: int, function: Layer, name: str) -> None:
        self.index = index
        self.function = function
        self.name = name
        reached = reached_by(function)
        self.modules = reached.modules
        self.is_trained = bool(trained_by(reached))
        stateful = [module for module in reached.modules if buffers_of(module)]
        self.stateful = (
            stateful if stateful or not isinstance(function, nn.Module) else None
        )
        """The modules whose buffers a second run must find as the first one did, and
        others that a function calls; None: there are none.
        """
        self.passes = list[_Pass]()
        self.nodes = set[Node]()


class _Border:
    """The activations of one micro-batch between two layers; later their gradients."""

    def __init__(self, nest: Any, name: str) -> None:
        values: list[Any] = [leaf.value for leaf in kit.leaves_of(nest, name)]
        self._nest = kit.with_leaves(nest, iter([_HOLE] * len(values)))
        self._places = [
            place
            for place, value in enumerate(values)
            if isinstance(value, Tensor) and value.requires_grad
        ]
        self.roots: list[Tensor] = [values[place] for place in self._places]
        """The activations with the graph that made them, for as long as the graph is
        kept.
        """
        self.gradients: list[Tensor | None] = [None] * len(self._places)
        """By root; None where the next layer did not use it."""
        self.values = list[Any]()
        self._noted = list[int]()
        self.hold(
            [value.detach() if isinstance(value, Tensor) else value for value in values]
        )
        self._devices = [
            value.device if isinstance(value, Tensor) else None for value in values
        ]

    def hold(self, values: list[Any]) -> None:
        """Take the leaves without a graph; `values` is empty while they are to be
        recomputed.
        """
        self.values[:], self._noted[:] = values, _versions(values)

    def entered(self, anchor: Tensor) -> Any:
        values = [
            value if place is None else value.to(place)
            for value, place in zip(self.values, self._devices, strict=True)
        ]
        for number, place in enumerate(self._places):
            values[place] = _Enter.apply(anchor, self.gradients, number, values[place])  # type: ignore[no-untyped-call]
        return kit.with_leaves(self._nest, iter(values))

    def require_unwritten(self, layer: _Layer) -> None:
        if _versions(self.values) != self._noted:
            raise written_input_error(layer.name)


def _versions(values: list[Any]) -> list[int]:
    return [
        version(value)
        for value in values
        if isinstance(value, Tensor) and not value.is_inference()
    ]


class _Enter(torch.autograd.Function):
    """The begin of a layer's graph, whose backward pass leaves the gradient in a list:
    no leaf keeps the activations.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, into: list[Tensor | None], number: int, value: Tensor
    ) -> Tensor:
        ctx.gradient_in = into, number
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        into, number = ctx.gradient_in
        into[number] = gradient
        return None, None, None, None


class _Pass(NamedTuple):
    taken: _Border
    returned: _Border
    random: RandomState | None
    """The random state before it; None if it drew no numbers."""
    surroundings: Surroundings | None


class _Run:
    def __init__(
        self,
        functions: list[Layer],
        loss_fn: Layer,
        collector: gradients.Collector,
        borders: Borders,
        *,
        recomputes: bool,
    ) -> None:
        self._layers = [
            _Layer(index, function, f"layers[{index}]")
            for index, function in enumerate(functions)
        ]
        self._loss = _Layer(len(functions), loss_fn, "loss_fn")
        self._collector = collector
        self.updated: list[str] = []
        self._on_host = borders == "host"
        self._recomputes = recomputes
        self._every = (
            math.ceil(math.sqrt(len(functions))) if borders == "recompute" else 1
        )
        """The borders before each layer of that multiple are kept."""
        self._anchor = torch.empty(0, requires_grad=True)
        collector.pass_by([id(self._anchor)])
        self._inputs: list[_Border] = []
        self._shards = LayerShards(
            [layer.modules for layer in (*self._layers, self._loss)]
        )
        self._first = dict(self._shards.first)
        """The first layer that uses a leaf, by the leaf's id: there its sum is
        complete.
        """
        self._random = RandomState()
        """As it is before the next pass."""
        stateful = [
            id(module)
            for layer in (*self._layers, self._loss)
            for module in layer.stateful or ()
        ]
        self._shares_buffers = len(set(stateful)) < len(stateful)

    def losses(
        self,
        before: Before,
        micro_batches: Sequence[batch.MicroBatch],
        shares: batch.Shares,
        merged: batch.Merged | None,
    ) -> list[Tensor]:
        self._random = before.random_state()
        with self._shards:
            forwards = self._run_forwards([each.arguments[0] for each in micro_batches])
            borders = list(forwards) if self._shards else forwards
            with self._shards.gathered(self._loss.index):
                losses = [
                    self._loss_of(*each, merged)
                    for each in zip(
                        borders, micro_batches, shares.contributions, strict=True
                    )
                ]
            with self._collector.adding():
                self._run_backwards()
            self._random.put_back()
        return losses

    def _run_forwards(self, inputs: Sequence[Any]) -> Iterator[_Border]:
        """Yield each micro-batch's last border.

        One micro-batch follows the other where the first one draws random numbers or
        two layers have one buffer, so that all draw and find what they do without
        layers. Otherwise, and where layers are gathered, one layer follows the other.
        """
        self._inputs.extend(_Border(each, "inputs") for each in inputs)
        self._reach(
            self._layers[0], [root for border in self._inputs for root in border.roots]
        )
        waiting = list(self._inputs)
        random = self._random
        while (
            waiting
            and not self._shards
            and (
                self._shares_buffers
                or len(waiting) == len(inputs)
                or self._random is not random
            )
        ):
            border = waiting.pop(0)
            for layer in self._layers:
                border = self._pass(layer, border)
            yield border
        for layer in self._layers:
            with self._shards.gathered(layer.index):
                waiting = [self._pass(layer, border) for border in waiting]
        yield from waiting

    def _note_random(self) -> RandomState | None:
        """Return the random state before what ran since the last call; None if that
        drew no numbers.
        """
        before = self._random
        self._random = before.again() if before.moved() else before
        return None if self._random is before else before

    def _run_backwards(self) -> None:
        self._end(self._loss)
        while self._layers:
            layer = self._layers.pop()
            if layer.passes and not layer.passes[0].taken.values:
                self._recompute_borders(layer.index)
            with self._shards.gathered(layer.index):
                for each in layer.passes:
                    self._back(layer, each)
                self._end(layer)
        for border in self._inputs:
            self._differentiate(border, border.roots)

    def _end(self, layer: _Layer) -> None:
        self._shards.reduce(layer.index)
        if self._collector.by_parts and layer.is_trained and layer.index:
            self.updated.append(layer.name)
            self._collector.part(
                layer.index,
                lambda parameter: self._first.get(id(parameter), 0) >= layer.index,
            )

    def _loss_of(
        self,
        border: _Border,
        micro_batch: batch.MicroBatch,
        contribution: float,
        merged: batch.Merged | None,
    ) -> Tensor:
        entered = micro_batch._replace(
            arguments=(border.entered(self._anchor), micro_batch.arguments[1])
        )
        loss, aux = batch.evaluated(
            self._loss.function, entered, has_aux=merged is not None
        )
        self._note_random()
        self._collector.require_untouched()
        if merged is not None:
            merged.add(aux, micro_batch)
        self._reach(self._loss, [loss] if loss.requires_grad else [])
        self._collector.add(loss, micro_batch.weight, contribution)
        border.values.clear()
        if not contribution:
            border.gradients[:] = [None] * len(border.gradients)
        return loss.detach().clone()

    def _pass(self, layer: _Layer, taken: _Border) -> _Border:
        if self._recomputes and layer.stateful is not None:
            surroundings = Surroundings(layer.stateful)
        else:
            surroundings = None
        with nullcontext() if surroundings is None else surroundings.first_run():
            returned = self._called(layer, taken)
        self._reach(layer, returned.roots)
        if self._recomputes:
            taken.require_unwritten(layer)
            returned.roots.clear()
        if layer.index % self._every:
            taken.values.clear()
        elif self._on_host:
            taken.hold(
                [
                    value.cpu() if isinstance(value, Tensor) else value
                    for value in taken.values
                ]
            )
        layer.passes.append(
            _Pass(
                taken,
                returned,
                self._note_random() if self._recomputes else None,
                surroundings,
            )
        )
        return returned

    def _called(self, layer: _Layer, taken: _Border) -> _Border:
        return _Border(
            layer.function(taken.entered(self._anchor)), f"the output of {layer.name}"
        )

    def _back(self, layer: _Layer, each: _Pass) -> None:
        returned = each.returned
        if any(gradient is not None for gradient in returned.gradients):
            self._differentiate(
                returned, returned.roots or self._again(layer, each).roots
            )
        for held in (returned.roots, returned.gradients, each.taken.values):
            held.clear()

    def _again(self, layer: _Layer, each: _Pass) -> _Border:
        """Run a pass a second time: it draws the numbers and finds the buffers of the
        first.
        """
        each.taken.require_unwritten(layer)
        if each.random is not None:
            each.random.put_back()
        with (
            nullcontext()
            if each.surroundings is None
            else each.surroundings.second_run()
        ):
            return self._called(layer, each.taken)

    def _recompute_borders(self, index: int) -> None:
        """Recompute the borders from the last kept one to that before layer `index`."""
        for layer in self._layers[index - index % self._every : index]:
            with self._shards.gathered(layer.index):
                for each in layer.passes:
                    each.returned.hold(self._again(layer, each).values)

    def _differentiate(self, border: _Border, roots: Sequence[Tensor]) -> None:
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, border.gradients, strict=True)
            if gradient is not None
        ]
        if pairs:
            self._collector.backward(*zip(*pairs, strict=True))

    def _reach(self, layer: _Layer, roots: Sequence[Tensor]) -> None:
        leaves = gradients.leaves_of_graph(roots, layer.nodes)
        self._collector.take(leaves)
        for leaf in leaves:
            self._first[id(leaf)] = min(
                self._first.get(id(leaf), layer.index), layer.index
            )


def _require_layers(layers: object) -> list[Layer]:
    fix = (
        "Write layers=model, an nn.Sequential, or layers=[prelude, *model.blocks,"
        " head]."
    )
    if not isinstance(layers, nn.Sequential | nn.ModuleList | list | tuple):
        raise kit.explain(
            ArgumentTypeError,
            "layers",
            expected="an nn.Sequential or a list of callables",
            got=layers,
            fix=fix,
        )
    if (
        isinstance(layers, nn.Sequential)
        and type(layers).forward is not nn.Sequential.forward
    ):
        found = f"a {type(layers).__name__} with a forward of its own"
        raise kit.explain(
            ArgumentTypeError,
            "layers",
            expected="layers that run one after the other",
            found=found,
            fix=fix,
        )
    functions: list[Layer] = list(layers)
    for function in functions:
        batch.require_function("layers", function)
    if not functions:
        raise kit.explain(
            ArgumentValueError,
            "layers",
            expected="at least one layer",
            found="none",
            fix=fix,
        )
    return functions


# What a layered window refuses.


def require_activations(borders: object, within: object) -> None:
    for name, given, kind in (
        ("borders", borders, Borders),
        ("within", within, Within),
    ):
        if given not in get_args(kind):
            fix = f"Write {name}={get_args(kind)[0]!r}, or leave it out."
            raise explain(
                ArgumentValueError,
                name,
                expected=f"one of {get_args(kind)}",
                got=given,
                fix=fix,
            )
    if within == "keep" and borders != "keep":
        fix = 'Leave within= out, or write borders="keep".'
        found = f"borders={borders!r} beside kept activations, which hold the borders"
        raise explain(
            ArgumentValueError,
            "borders",
            expected="'keep' beside within=\"keep\"",
            found=found,
            fix=fix,
        )


def require_fixed_size(division: Division) -> None:
    """Raise unless a micro-batch has a size: after an update of a layer no smaller one
    can be tried.
    """
    size = division.micro_batch_size
    if isinstance(size, AutoMicroBatchSize):
        fix = "Write steps=4, or find a size by gradaccum_torch.backward."
        raise explain(
            ArgumentTypeError,
            "micro_batch_size",
            expected="a number of items",
            got=size,
            fix=fix,
        )


def written_input_error(name: str) -> UsageError:
    fix = (
        "Give its first operation inplace=False, or join it with the layer before:"
        " nn.Sequential(nn.Conv2d(...), nn.ReLU(inplace=True)). "
    )
    fix += (
        "If another layer or loss_fn writes into the same memory, as into a buffer that"
        " a layer returned, return a clone()."
    )
    return explain(
        UsageError,
        name,
        expected="an input that stays as it is",
        found="one that something wrote into",
        fix=fix,
    )
