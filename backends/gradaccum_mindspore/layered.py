"""``gradaccum_mindspore.layered_backward``: a window runs backwards layer by layer, all
micro-batches through one layer before the next.

When the last micro-batch has passed a layer, its gradient sum is complete: its update
is made, and its gradient freed. Between the layers stand the borders: the activations
that one layer returned and the next one takes. A layer runs once forwards, without
keeping its activations, and once more for its gradient, as a segment of `recompute`
does.

A MindSpore optimizer updates all its parameters in one call, and counts its steps by
its calls. So a part of a model is updated early where the part has an optimizer of its
own.

Python runs the layers. In one compiled program MindSpore 2.10 would copy each weight
that the passes of several layers read in turn, which takes more memory than the window
saves; a CPU copies float64 rounded to float32. `test_why_compiled_code_is_refused` is
the smallest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import _no_grad
from mindspore.experimental import optim

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError, kit
from gradaccum_mindspore import checks, sums
from gradaccum_mindspore.large_batch.batch import (
    SplitOptions,
    plain_reduction,
    require_function,
    split_options,
    with_constant_weight,
)
from gradaccum_mindspore.large_batch.gradients import (
    MergedOutputs,
    divisor_of,
    factor_of,
    loss_kind,
    require_outputs,
    unit_of,
    weighed,
)
from gradaccum_mindspore.large_batch.replay import DEPTH, Noted, named_by
from gradaccum_mindspore.large_batch.value_and_update import (
    loss_in,
    require_open_steps,
    undoing,
)
from gradaccum_mindspore.optimizer import AccumulatingOptimizer
from gradaccum_mindspore.private import COMPILED_AS, is_graph_mode, refuse_trace
from gradaccum_mindspore.recomputation.function import Call, buffers_of
from gradaccum_mindspore.saving import HALF_MADE
from gradaccum_mindspore.update import inner_scale
from gradaccum_mindspore.workers.group import (
    NoAnswerError,
    added_up,
    buckets,
    is_sharded,
    place,
    shares_windows,
)

Layer = Callable[..., Any]
_Found = tuple[float, Sequence[Tensor], Sequence[Tensor]]
"""Of one micro-batch: its weight, the gradients by the last border, and those by the
loss's own parameters.
"""
_UPDATED = (
    "gradaccum: the updates of {names} were made before this error, the last one"
    " perhaps in part, and cannot be undone; the other layers have none. Load the last"
    " checkpoint of the model and of its optimizers by"
    " gradaccum_mindspore.load_checkpoint_into."
)


def layered_backward(
    layers: nn.SequentialCell | nn.CellList | Sequence[Layer],
    loss_fn: Callable[[Any, Any], Any],
    inputs: kit.Nest,
    targets: kit.Nest,
    *,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    reduction: str | None = None,
    weight: Callable[..., Any] | Sequence[float] | Tensor | None = None,
    axes: kit.Nest = 0,
    aux: kit.Nest = None,
    optimizer: (
        AccumulatingOptimizer | Sequence[nn.Optimizer | optim.Optimizer] | None
    ) = None,
    data_parallel: bool | None = None,
) -> Any:
    """Return the large batch's loss and gradients, or make its update, one layer at a
    time; in PyNative mode.

    The result is that of `value_and_grad` with ``loss_fn(layers(inputs), targets)``, to
    the last bit where no parameter is in two layers and no weights are given. Dropout
    draws what a loop over micro-batches draws, and a batch norm sees each of them once,
    in order.

    With a list of MindSpore's own optimizers, one for each layer say, each makes its
    update as soon as the sums of all its parameters are complete, and their gradients
    are freed; nothing is clipped or skipped. A parameter of several layers waits for
    the first of them. A wrapped optimizer keeps all sums until the end, as its
    ``clip_norm``, ``skip_norm`` and overflows need.

    If something raises, everything is as it was before the call, except that the
    updates of layers cannot be undone: a note on the error names these layers, and the
    optimizers are refused until `load_checkpoint_into` has loaded them.

    Args:
        layers: a `SequentialCell`, a `CellList`, or a list of Cells and functions of
            one argument, any nest of Tensors, which the layer before has returned. A
            function names the Cells that it calls: by its closure, globals, defaults or
            `functools.partial`.
        loss_fn: ``loss_fn(outputs, targets)`` returns a scalar loss, or ``(loss, aux)``
            if `aux` is given.
        inputs: the argument of the first layer for the large batch.
        targets: the second argument of `loss_fn` for the large batch.
        steps: as for `value_and_grad`.
        micro_batch_size: the items of a micro-batch, in place of `steps`.
        reduction: "mean" unless given, "sum" or "item_mean", as for `value_and_grad`; a
            wrapped optimizer has its own.
        weight: the weight of a micro-batch: a callable, ``weight(inputs, targets)``, or
            one number per item.
        axes: the axis of the items, for each leaf of ``(inputs, targets)``; None for
            what is given whole.
        aux: as for `value_and_grad`.
        optimizer: optimizers of `mindspore.nn` or `mindspore.experimental.optim`, of
            which no two have one parameter, and whose own ``loss_scale`` does not
            count; or one wrapped with ``steps=None``, whose window the call is.
        data_parallel: beside a list of optimizers, as for `gradaccum.wrap`: True: the
            sums of all workers are added up, once for each optimizer. All workers start
            with equal parameters, and make the call together.

    Returns:
        The loss, with its `aux` if there is one. Without an optimizer the tuple of that
        and the gradients, in the order of the layers' trainable parameters, then those
        of `loss_fn`.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, or a function
            returns something else; a parameter of an optimizer is in no layer, or in
            two optimizers.
        UsageError: graph mode, or compiled code; a layer returned other values the
            second time; `optimizer` has an open window, or an option that looks at
            single micro-batches; its updates were made in part by a call that raised;
            or another worker did not answer.

    Examples:
        >>> from mindspore import Tensor, nn
        >>> layers = [nn.Dense(2, n, weight_init="ones", has_bias=False) for n in (2, 1)]
        >>> optimizers = [nn.SGD(layer.trainable_params(), 0.5) for layer in layers]
        >>> x, y = Tensor([[1.0, 2.0], [3.0, 4.0]]), Tensor([[0.0], [0.0]])
        >>> float(layered_backward(layers, nn.MAELoss(), x, y, steps=2, optimizer=optimizers))
        10.0
        >>> layers[1].weight.asnumpy().tolist()
        [[-1.5, -1.5]]
    """
    refuse_trace()
    if is_graph_mode():
        checks.refuse_compiled_layers("graph mode")
    parts = [
        _Layer(f"layers[{index}]", function)
        for index, function in enumerate(checks.require_layers(layers))
    ]
    parts.append(_Layer("loss_fn", loss_fn))
    target = _target(optimizer, parts, reduction, data_parallel)
    given = {
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "weight": weight,
        "axes": axes,
        "aux": aux,
    }
    options = with_constant_weight(
        split_options(aux is not None, target.options, **given), (), target.parameters
    )
    noted = [Noted(part.function) for part in parts]
    try:
        return _Run(parts, target, options).run((inputs, targets))
    except BaseException as error:
        lost = kit.explain(
            UsageError,
            "workers",
            expected="the call on each",
            found="no answer",
            fix="Load a checkpoint on all.",
        )
        told = lost if isinstance(error, NoAnswerError) else error
        for each in () if target.failed(told) else noted:
            each.after_error()
        if told is lost:
            raise told from error
        raise


COMPILED_AS[layered_backward] = checks.layers_in_compiled_code


class _Layer:
    """One layer, or the loss, and its passes in order."""

    def __init__(self, name: str, function: Layer) -> None:
        require_function(name, function)
        self.name, self.function = name, function
        self.named = list(named_by(function, DEPTH))
        found = [
            parameter
            for each in self.named
            for parameter in (
                each.get_parameters() if isinstance(each, nn.Cell) else [each]
            )
        ]
        self.parameters = list(
            {id(each): each for each in found if each.requires_grad}.values()
        )
        self.passes: list[tuple[Call, kit.Nest]] = []
        """And what the layer took."""

    def buffers(self) -> list[Tensor]:
        return [
            buffer
            for cell in self.named
            if isinstance(cell, nn.Cell)
            for buffer in buffers_of(cell)
        ]


class _Run:
    def __init__(
        self, parts: Sequence[_Layer], target: _Own | _Window, options: SplitOptions
    ) -> None:
        (*self.layers, self.loss), self.target, self.options = parts, target, options
        self.held = {id(parameter) for parameter in target.parameters}
        for part in parts:
            part.parameters = [
                parameter for parameter in part.parameters if id(parameter) in self.held
            ]
        self.first = next(
            (index for index, layer in enumerate(self.layers) if layer.parameters),
            len(self.layers),
        )
        """The first layer with something to train: what stands before it needs no
        gradient.
        """

    def run(self, batch: tuple[kit.Nest, kit.Nest]) -> Any:
        outputs, has_aux = (
            MergedOutputs(
                self.options.aux, loss_kind(self.options.reduction.reduction)
            ),
            self.options.aux is not None,
        )
        found = list[_Found]()
        taken = list[tuple[float, Tensor]]()
        unit = None
        for part, weight in weighed(self.loss.function, batch, self.options):
            unit = unit or (
                unit_of(weight, self.options) if self.target.by_unit else 1.0
            )
            value, cotangents, own = self._forward(*part.arguments)
            outputs.add(value, weight / unit)
            found.append((weight / unit, cotangents, own))
            taken.append((weight, loss_in(value, has_aux)))
        total = sum(amount for amount, *_ in found)
        self.target.open(total)
        self._backward(found)
        return self.target.close(
            taken, outputs.finished(total, divisor_of(total, self.options))
        )

    def _forward(
        self, inputs: kit.Nest, targets: kit.Nest
    ) -> tuple[Any, Sequence[Tensor], Sequence[Tensor]]:
        """Return what the loss returned of one micro-batch, and its gradients: by the
        last border, and by its own parameters.
        """
        border: Any = inputs
        for layer in self.layers:
            call = Call(layer)
            with (
                _no_grad(),
                self._watching(layer),
                # Where MindSpore records, for an outer gradient, it would keep the
                # activations.
            ):
                taken, border = border, call(border)
            layer.passes.append((call, taken))
        returned: list[Any] = []

        def loss(outputs: kit.Nest) -> Tensor:
            with self._watching(self.loss):
                returned[:] = [self.loss.function(outputs, targets)]
            require_outputs(returned[0], self.options.aux is not None)
            return self.target.scaled(
                loss_in(returned[0], self.options.aux is not None)
            )

        cotangents, own = _differentiated(
            loss, border, None, self.loss.parameters, self.first < len(self.layers)
        )
        return (
            kit.mapped(
                lambda leaf: (
                    ops.stop_gradient(leaf) if isinstance(leaf, Tensor) else leaf
                ),
                returned[0],
            ),
            cotangents,
            own,
        )

    @contextmanager
    def _watching(self, layer: _Layer) -> Iterator[None]:
        """Raise if a Cell runs of whose parameters the layer has no name: their
        gradients would be missing.
        """
        known, called = {id(each) for each in layer.parameters}, nn.Cell.__call__
        wanted = (
            self.held
            if self.target.optimizers or isinstance(layer.function, nn.Cell)
            else None
        )

        def call(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
            for each in cell.get_parameters(expand=False):
                if (
                    each.requires_grad
                    and id(each) not in known
                    and (wanted is None or id(each) in wanted)
                ):
                    expected, found = (
                        "a function whose closure or globals name its Cells",
                        f"one that hides {each.name!r} elsewhere",
                    )
                    raise kit.explain(
                        ArgumentValueError,
                        layer.name,
                        expected=expected,
                        found=found,
                        fix="Pass the Cell itself.",
                    )
            return called(cell, *args, **kwargs)

        nn.Cell.__call__ = call
        try:
            yield
        finally:
            nn.Cell.__call__ = called

    def _backward(self, found: list[_Found]) -> None:
        for number, (amount, cotangents, own) in enumerate(found):
            self._add(self.loss, own, amount)
            found[number] = amount, cotangents, ()
        self.target.complete(len(self.layers))
        while len(self.layers) > self.first:
            layer, index = self.layers.pop(), len(self.layers)
            for number, (amount, cotangents, _) in enumerate(found):
                call, taken = layer.passes.pop(0)
                if factor_of(amount, self.options) and cotangents:
                    by_border, own = _differentiated(
                        call, taken, cotangents, layer.parameters, index > self.first
                    )
                    self._add(layer, own, amount)
                    found[number] = amount, by_border, ()
                    del own, by_border
                del call, taken, cotangents
            self.target.complete(index)

    def _add(self, layer: _Layer, gradients: Sequence[Tensor], amount: float) -> None:
        factor = factor_of(amount, self.options)
        for parameter, gradient in (
            zip(layer.parameters, gradients, strict=True) if factor else ()
        ):
            total = self.target.sum_of(parameter)
            sums.add_into(total, sums.scaled(gradient, factor, total.dtype))


def _differentiated(
    function: Callable[..., Any],
    nest: kit.Nest,
    cotangents: Sequence[Tensor] | None,
    parameters: Sequence[Parameter],
    by_inputs: bool,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the gradients by the floating leaves of `nest`, if they are wanted, and by
    `parameters`.

    `cotangents`: of the floating leaves that `function` returns; None: it returns a
    loss.
    """
    leaves: list[Any] = [leaf.value for leaf in kit.leaves_of(nest)]
    places = (
        [at for at, leaf in enumerate(leaves) if _is_floating(leaf)]
        if by_inputs
        else []
    )

    def of_leaves(*given: Tensor) -> Any:
        for at, leaf in zip(places, given, strict=True):
            leaves[at] = leaf
        returned = function(kit.with_leaves(nest, iter(leaves)))
        return (
            returned
            if cotangents is None
            else tuple(
                leaf.value
                for leaf in kit.leaves_of(returned)
                if _is_floating(leaf.value)
            )
        )

    given = list[Tensor]()
    for leaf in (
        leaves[at]
        for at in places
        # MindSpore tells Tensors apart by identity, and would add up one's gradients in
        # each place.
    ):
        given.append(
            leaf.copy()
            if isinstance(leaf, Parameter) or any(leaf is other for other in given)
            else leaf
        )
    backward = ops.GradOperation(
        get_all=True, get_by_list=True, sens_param=cotangents is not None
    )(of_leaves, ParameterTuple(parameters))
    return backward(*given, *(() if cotangents is None else (tuple(cotangents),)))  # type: ignore[no-any-return]


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in sums.FLOATS.values()


class _Own:
    """The sums of the call itself: of gradients that are returned, or of optimizers,
    each of which updates when its sums are complete.
    """

    def __init__(
        self,
        parts: Sequence[_Layer],
        reduction: str | None,
        optimizers: Sequence[Any] = (),
        shares: object = None,
    ) -> None:
        self.options, self.optimizers, self.names = (
            plain_reduction(reduction or "mean"),
            optimizers,
            [part.name for part in parts],
        )
        firsts = {
            id(each): index
            for index, part in reversed(list(enumerate(parts)))
            for each in part.parameters
        }
        self.parameters = list(
            {id(each): each for part in parts for each in part.parameters}.values()
        )
        if optimizers:
            self.parameters = [
                parameter for each in optimizers for parameter in each.parameters
            ]
            checks.require_held(self.parameters, firsts)
        self.waiting = {
            k: min(firsts[id(each)] for each in one.parameters)
            for k, one in enumerate(optimizers)
        }
        """By optimizer, the layer with which its sums are complete."""
        self.by_unit = not optimizers
        """True if the weights are divided by the first one, as `value_and_grad` has it.
        """
        self.workers = place()[1] if optimizers and shares_windows(shares) else 1
        if self.workers > 1 and any(map(is_sharded, self.parameters)):
            expected, fix = (
                "a copy of each parameter on each worker",
                "Pass one optimizer wrapped with data_parallel=True.",
            )
            raise kit.explain(
                ArgumentValueError,
                "data_parallel",
                expected=expected,
                found="shards: layerwise_parallel",
                fix=fix,
            )
        self.sums, self.weight, self.updated = dict[int, Parameter](), 0.0, list[str]()
        self.scaled: Callable[[Tensor], Tensor] = lambda loss: loss

    def open(self, weight: float) -> None:
        self.weight = (
            weight if self.workers == 1 else float(added_up(np.array([weight]))[0])
        )

    def sum_of(self, parameter: Parameter) -> Parameter:
        if id(parameter) not in self.sums:
            zeros = ops.zeros(parameter.shape, sums.sum_dtype(parameter.dtype, None))
            self.sums[id(parameter)] = sums.hidden_parameter(
                zeros, f"{parameter.name}.layered_sum"
            )
        return self.sums[id(parameter)]

    def complete(self, index: int) -> None:
        """Make the updates for which no gradient of an earlier layer than `index` is
        needed.
        """
        for k in [k for k, first in self.waiting.items() if first >= index]:
            name, parameters = (
                self.names[self.waiting.pop(k)],
                self.optimizers[k].parameters,
            )
            for bucket in (
                buckets([self.sum_of(each) for each in parameters], self.workers)
                if self.workers > 1
                else ()
            ):
                bucket.unpack(bucket.total())
            gradients = ms.mutable(
                self.divided(parameters, inner_scale(self.optimizers[k]))
            )
            if self.weight > 0:
                self.updated.append(name)
                self.optimizers[k](gradients)

    def divided(
        self, parameters: Sequence[Parameter], scale: float = 1.0
    ) -> tuple[Tensor, ...]:
        """Return the gradients of some parameters, times what their optimizer divides
        by, and free their sums one by one.
        """
        divisor = (
            float(
                kit.divisor(
                    kit.initial_state(1.0)._replace(weight=self.weight),
                    self.options,
                    kit.select,
                )
            )
            / scale
        )
        gradients = list[Tensor]()
        for each in parameters:
            gradients += sums.divided(
                (self.sum_of(each),), divisor, (each.dtype,), ms.float64
            )
            del self.sums[id(each)]
        return tuple(gradients)

    def close(self, taken: Sequence[tuple[float, Tensor]], outputs: Any) -> Any:
        return outputs if self.optimizers else (outputs, self.divided(self.parameters))

    def failed(self, error: BaseException) -> bool:
        """Return True if the update stays."""
        if self.updated:
            error.add_note(_UPDATED.format(names=", ".join(self.updated)))
            for each in self.optimizers:
                vars(each)[HALF_MADE] = True
        return False


class _Window:
    def __init__(
        self,
        optimizer: AccumulatingOptimizer,
        parts: Sequence[_Layer],
        reduction: str | None,
    ) -> None:
        self.optimizer, self.options, self.parameters = (
            optimizer,
            optimizer.options,
            list(optimizer.parameters),
        )
        self.by_unit, self.scaled, self.optimizers = False, optimizer.scale, [optimizer]
        checks.require_held(
            self.parameters, {id(each): 0 for part in parts for each in part.parameters}
        )
        require_open_steps(optimizer)
        self.failed = undoing(optimizer)
        if reduction not in (None, self.options.reduction):
            expected, fix = (
                f"the optimizer's, {self.options.reduction!r}",
                "Leave reduction out here.",
            )
            raise kit.explain(
                ArgumentValueError,
                "reduction",
                expected=expected,
                got=reduction,
                fix=fix,
            )
        for name, wrong in (
            ("on_overflow", self.options.on_overflow == "drop_micro_batch"),
            ("noise_scale", self.options.noise_decay),
        ):
            if wrong:
                found, fix = (
                    f"one with {name}=",
                    f"Leave {name} out, or call gradaccum_mindspore.value_and_update.",
                )
                raise kit.explain(
                    UsageError,
                    "optimizer",
                    expected="one that looks at no single micro-batch",
                    found=found,
                    fix=fix,
                )
        self.sums = dict(
            zip(map(id, self.parameters), optimizer.storage.sums, strict=True)
        )

    def open(self, weight: float) -> None:
        """Leave all to the optimizer, whose own sums are there."""

    complete = open

    def sum_of(self, parameter: Parameter) -> Parameter:
        return self.sums[id(parameter)]

    def close(self, taken: Sequence[tuple[float, Tensor]], outputs: Any) -> Any:
        for amount, loss in taken:  # The sums are there already.
            self.optimizer((None,) * len(self.parameters), amount, loss)
        self.optimizer.flush()
        return outputs


def _target(
    optimizer: Any,
    parts: Sequence[_Layer],
    reduction: str | None,
    data_parallel: object,
) -> _Own | _Window:
    if isinstance(optimizer, list | tuple) and optimizer:
        return _Own(parts, reduction, list(_own(optimizer)), data_parallel)
    if data_parallel is None and (
        optimizer is None or isinstance(optimizer, AccumulatingOptimizer)
    ):
        return (
            _Own(parts, reduction)
            if optimizer is None
            else _Window(optimizer, parts, reduction)
        )
    expected = (
        "a list of optimizers; or, without data_parallel=, a wrapped one, or None"
    )
    fix = (
        "Write optimizer=[nn.Adam(layer.trainable_params()) for layer in layers], or"
        " wrap one: gradaccum.wrap(optimizer, steps=None)."
    )
    raise kit.explain(
        ArgumentTypeError, "optimizer", expected=expected, got=optimizer, fix=fix
    )


def _own(optimizers: Sequence[object]) -> Iterator[Any]:
    for each in optimizers:
        if isinstance(each, AccumulatingOptimizer) or not isinstance(
            each, nn.Optimizer | optim.Optimizer
        ):
            fix = (
                "Leave gradaccum.wrap out, or pass one wrapped optimizer of all layers."
            )
            raise kit.explain(
                ArgumentTypeError,
                "optimizer",
                expected="MindSpore's own optimizers in the list",
                got=each,
                fix=fix,
            )
        if vars(each).get(HALF_MADE):
            found = (
                f"a {type(each).__name__} of layers of which some were updated, and"
                " others not, as a call raised"
            )
            fix = (
                "Load the last checkpoint by"
                " gradaccum_mindspore.load_checkpoint_into(cell, ...), of a cell that"
                " holds this optimizer."
            )
            raise kit.explain(
                UsageError,
                "optimizer",
                expected="an update that was made or was not",
                found=found,
                fix=fix,
            )
        yield each
