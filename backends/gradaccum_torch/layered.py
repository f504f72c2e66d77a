"""``gradaccum_torch.layered_backward``: the backward pass of a whole window, one layer
at a time. The gradients of all micro-batches are computed for one layer before the pass
continues with the preceding layer.

If no option of the optimizer needs the norm of the window's gradient, each layer is
updated as soon as its gradient sum is complete, and its gradients are then freed. In
this case only one layer's gradients are in memory at a time.

In this module, a border is the boundary between two layers. A `Border` contains the
activations that the first layer returns and the second layer receives, and later the
gradients of these activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum import ArgumentTypeError, UsageError, kit
from gradaccum_torch.large_batch.backward import run_micro_batches
from gradaccum_torch.large_batch.batch import MergeAux, Weight, map_tensors, tensors_of
from gradaccum_torch.large_batch.gradients import (
    GradientsInGrad,
    collecting,
    options_of_call,
)
from gradaccum_torch.large_batch.replay import Before, Buffers, RandomState
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import (
    Node,
    is_sharded,
    untraced_within,
    version,
)
from gradaccum_torch.update import hooks_of

Layer = Callable[[Any], Any]


@untraced_within
def layered_backward(
    layers: Sequence[Layer] | nn.Sequential,
    loss_fn: Callable[[Any, Any], Any],
    inputs: Any,
    targets: Any,
    *,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    reduction: str | None = None,
    weight: Weight = None,
    axes: kit.Nest = 0,
    has_aux: bool = False,
    merge_aux: MergeAux = None,
    optimizer: AccumulatingOptimizer | None = None,
    borders: Literal["keep", "host"] = "keep",
    within: Literal["recompute", "keep"] = "recompute",
) -> Any:
    """Run the backward pass of a large batch one layer at a time, and return the large
    batch's loss. Without `optimizer`, the gradient is added to ``.grad``. With
    `optimizer`, the gradient is used for one update.

    The result is the same as from `gradaccum_torch.backward` with
    ``loss_fn(layers(inputs), targets)``, and bit for bit the same if no parameter
    belongs to two layers. Dropout draws the same random numbers, and a batch norm sees
    each micro-batch once, in order.

    With ``gradaccum.wrap(optimizer, steps=None, on_overflow="ignore")``, no option
    needs the norm of the whole window's gradient. Each layer is then updated as soon as
    its gradient sum is complete: the inner optimizer performs one ``step`` per layer,
    in which only this layer has gradients, and these gradients are then freed. A
    parameter that several layers share is updated together with the first of these
    layers.

    With ``clip_norm``, ``skip_norm`` or skipping on overflow, the sums of all layers
    are kept until the end, and the optimizer performs a single step. Step hooks, and
    optimizers that count their steps in their parameter groups, are allowed only in
    this case.

    If the call raises an error, everything is restored to its state before the call,
    except for layers that were already updated. A note on the error names these layers,
    and the optimizer cannot be used until ``load_state_dict`` or ``discard`` is called.

    Args:
        layers: an `nn.Sequential`, whose own forward hooks do not run, or a sequence of
            functions and modules. Each layer is called with the return value of the
            previous layer, which may be any nested structure of tensors. Layers that
            FSDP2 shards are rejected.
        loss_fn: ``loss_fn(outputs, targets)`` returns a loss, a tensor of shape ``()``,
            or ``(loss, aux)`` if `has_aux` is True.
        inputs: the first layer's argument for the large batch. It may be any nested
            structure of tensors, and is split as in `gradaccum_torch.backward`.
        targets: the second argument of `loss_fn` for the large batch, as any nested
            structure of tensors.
        steps: the maximum number of micro-batches, each of ceil(items / steps) items.
        micro_batch_size: the number of items in a micro-batch, instead of `steps`.
        reduction: as for `gradaccum_torch.backward`.
        weight: either a function ``weight(inputs, targets)`` that returns a
            micro-batch's weight, or one number per item, shape ``(items,)``.
        axes: the batch axis of each leaf of ``(inputs, targets)``. This is either one
            number for all leaves, or a nested structure of numbers, in which a number
            may stand for a whole substructure. None means that a leaf is not split.
        has_aux: as for `gradaccum_torch.backward`.
        merge_aux: as for `gradaccum_torch.backward`.
        optimizer: an optimizer wrapped with ``steps=None``. The call opens and closes
            one window of this optimizer.
        borders: ``"keep"`` keeps the activations between layers on the device.
            ``"host"`` moves them to the host's memory, which frees device memory only
            with ``within="recompute"``.
        within: ``"recompute"`` recomputes the activations inside each layer from the
            layer's input. ``"keep"`` keeps these activations for the whole large batch,
            and needs no second forward pass.

    Returns:
        The detached loss, shape ``()``, or ``(loss, aux)`` if `has_aux` is True.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, or `loss_fn` or
            `weight` returns an invalid value.
        UsageError: the input of a layer was modified in place; `optimizer` cannot
            update one layer at a time; or a step of the inner optimizer changes
            parameters without a gradient, or state that all parameters share.

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
    functions: list[Layer] = list(layers)
    candidates: list[Any] = [*functions, loss_fn]
    modules = [layer for layer in candidates if isinstance(layer, nn.Module)]
    division = kit.make_division(steps, micro_batch_size)
    options = options_of_call(optimizer, reduction)
    require_plain_layers(layers, modules)
    if optimizer is not None:
        require_layered_optimizer(optimizer)
    large = kit.LargeBatch((inputs, targets), axes, weight)
    micro_batches = list(large.micro_batches(division, options))
    parameters = [p for module in modules for p in module.parameters()]
    are_modules = all(isinstance(layer, nn.Module) for layer in functions)
    before = Before(parameters, modules, notes_calls=not are_modules, copies_host=True)
    with collecting(optimizer, options, micro_batches, before) as destination:
        run = LayeredRun(
            functions,
            destination,
            is_on_host=borders == "host",
            recomputes=within != "keep",
        )
        loss, aux = run_micro_batches(
            lambda inputs, targets: loss_fn(run.forward(inputs), targets),
            micro_batches,
            destination,
            has_aux,
            merge_aux,
        )
        run.backward([micro_batch.factor for micro_batch in micro_batches])
    return (loss, aux) if has_aux else loss


class Border:
    """The activations of one micro-batch between two layers, and later the gradients of
    these activations.
    """

    def __init__(self, nest: Any) -> None:
        tensors = tensors_of(nest)
        self.roots = [tensor for tensor in tensors if tensor.requires_grad]
        """The activations that require a gradient. The layer that computed these
        activations starts its backward pass from them. The list is emptied when the
        layer's graph is no longer needed, because the activations keep the graph alive.

        With ``within="recompute"``, the list is emptied right after the layer's forward
        pass, because the layer's backward pass starts from recomputed activations.
        """
        self.gradients: list[Tensor | None] = [None] * len(self.roots)
        """For each activation that requires a gradient, the gradient that the backward
        pass of the next layer has computed. An entry is None before this backward pass,
        and also if the next layer did not use the activation.
        """
        self._origins = [(tensor.device, tensor.requires_grad) for tensor in tensors]
        """For each activation, the device on which it was computed, and whether it
        requires a gradient.
        """
        self.nest: Any = None
        self._versions: list[int] = []
        self._keep(map_tensors(Tensor.detach, nest))

    def _keep(self, nest: Any) -> None:
        self.nest = nest
        self._versions = [version(tensor) for tensor in tensors_of(nest)]

    def move_to_host(self) -> None:
        self._keep(map_tensors(Tensor.cpu, self.nest))

    def free(self) -> None:
        self.nest = None
        self.roots = []
        self.gradients = []

    def enter(self, anchor: Tensor) -> Any:
        """Return the activations as the inputs of a new graph. The graph's backward
        pass stores the gradients of the activations in `gradients`.
        """
        origins = iter(self._origins)
        numbers = count()

        def enter_tensor(tensor: Tensor) -> Any:
            device, requires_grad = next(origins)
            tensor = tensor.to(device)
            if requires_grad:
                return Enter.apply(anchor, self.gradients, next(numbers), tensor)  # type: ignore[no-untyped-call]
            return tensor

        return map_tensors(enter_tensor, self.nest)

    def require_unwritten(self, index: int) -> None:
        versions = [version(tensor) for tensor in tensors_of(self.nest)]
        if versions != self._versions:
            raise UsageError(
                f"layers[{index}]: expected the layer's input to remain unmodified; got"
                " an input that was modified in place. Set inplace=False in the layer's"
                " first operation, or combine the layer with the previous layer:"
                " nn.Sequential(nn.Conv2d(...), nn.ReLU(inplace=True)). If a layer"
                " returns a buffer that another layer or loss_fn later modifies, make"
                " the layer return buffer.clone()."
            )


class Enter(torch.autograd.Function):
    """The first operation of a layer's graph. Its backward pass stores the gradient of
    the layer's input in a list, so that the input need not be a leaf of the graph. This
    saves memory, because the graph would keep a leaf, and so the activations, alive.
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


class Pass(NamedTuple):
    """The forward pass of one micro-batch through one layer."""

    inputs: Border
    outputs: Border
    random_state: RandomState
    buffers: Buffers
    """The values of the module's buffers before this pass. They are needed to repeat
    the forward pass.
    """


class LayeredRun:
    """The forward and backward passes of one call to `layered_backward`.

    In the forward pass, each micro-batch runs through all layers before the next
    micro-batch starts. The random numbers and the module buffers are therefore the same
    as in `gradaccum_torch.backward`.
    """

    def __init__(
        self,
        layers: list[Layer],
        destination: GradientsInGrad,
        *,
        is_on_host: bool,
        recomputes: bool,
    ) -> None:
        self._layers = layers
        self._destination = destination
        self._window: Any = destination.window
        self._updates_layers = False
        """Whether each layer is updated as soon as its gradient is complete. This is
        possible if no option needs the norm of the window's gradient.
        """
        if destination.window is not None:
            self._updates_layers = not kit.measures(destination.window.options)
        self._before = destination.before
        self._is_on_host = is_on_host
        self._recomputes = recomputes
        self._anchor = torch.empty(0, requires_grad=True)
        destination.ignore([id(self._anchor)])
        self._inputs: list[Border] = []
        self._passes: list[list[Pass]] = [[] for _ in layers]
        self._leaf_nodes: list[set[Node]] = [set() for _ in layers]
        self._first_layers: dict[int, int] = {}
        """Maps the id of each leaf of the graph, such as a parameter, to the first
        layer that uses the leaf. The leaf's gradient sum is complete after that layer's
        backward pass.
        """

    def forward(self, inputs: Any) -> Any:
        """Run a micro-batch through all layers, and return the last layer's output."""
        border = Border(inputs)
        self._inputs.append(border)
        self._reach(0, border.roots)
        for index in range(len(self._layers)):
            border = self._forward_layer(index, border)
        outputs = border.enter(self._anchor)
        border.nest = None
        return outputs

    def _forward_layer(self, index: int, inputs: Border) -> Border:
        layer = self._layers[index]
        random_state = self._before.random_state()
        buffers = Buffers()
        noting: AbstractContextManager[None] = nullcontext()
        if self._recomputes and isinstance(layer, nn.Module):
            buffers.note(layer)
        elif self._recomputes:
            noting = buffers.noting_calls()
        with noting:
            outputs = self._call(index, inputs)
        self._reach(index, outputs.roots)
        if self._recomputes:
            buffers.free_unwritten()
            inputs.require_unwritten(index)
            outputs.roots = []
        if self._is_on_host:
            inputs.move_to_host()
        self._passes[index].append(Pass(inputs, outputs, random_state, buffers))
        return outputs

    def _call(self, index: int, inputs: Border) -> Border:
        return Border(self._layers[index](inputs.enter(self._anchor)))

    def backward(self, factors: Sequence[float]) -> None:
        """Run the backward passes of all micro-batches, one layer after the other."""
        random_state_after = self._before.random_state()
        buffers_after = Buffers(self._before.buffers.modules.values())
        with nullcontext() if self._window is None else self._window.adding():
            for index in reversed(range(len(self._layers))):
                for layer_pass, factor in zip(
                    self._passes[index], factors, strict=True
                ):
                    if factor:
                        self._backward_layer(index, layer_pass)
                    layer_pass.outputs.free()
                self._update(index)
            for border, factor in zip(self._inputs, factors, strict=True):
                if factor:
                    self._differentiate(border.roots, border.gradients)
        random_state_after.put_back()
        buffers_after.put_back()

    def _backward_layer(self, index: int, layer_pass: Pass) -> None:
        gradients = layer_pass.outputs.gradients
        if all(gradient is None for gradient in gradients):
            return
        roots = layer_pass.outputs.roots
        if self._recomputes:
            layer_pass.inputs.require_unwritten(index)
            layer_pass.random_state.put_back()
            layer_pass.buffers.put_back()
            roots = self._call(index, layer_pass.inputs).roots
        self._differentiate(roots, gradients)

    def _differentiate(
        self, roots: list[Tensor], gradients: list[Tensor | None]
    ) -> None:
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, gradients, strict=True)
            if gradient is not None
        ]
        if pairs:
            self._destination.backward(*zip(*pairs, strict=True))

    def _update(self, index: int) -> None:
        """Update the parameters of a layer, except parameters that an earlier layer
        also uses. The parameters of the first layer are updated later, when the window
        closes.
        """
        is_trained = index in self._first_layers.values()
        if index and is_trained and self._updates_layers:
            self._window.update_part(
                index, lambda p: self._first_layers.get(id(p), 0) >= index
            )

    def _reach(self, index: int, tensors: list[Tensor]) -> None:
        leaves = self._destination.reach(tensors, self._leaf_nodes[index])
        for leaf in leaves:
            first = self._first_layers.get(id(leaf), index)
            self._first_layers[id(leaf)] = min(first, index)


def require_plain_layers(layers: object, modules: Sequence[nn.Module]) -> None:
    problem = ""
    forward = nn.Sequential.forward
    if isinstance(layers, nn.Sequential) and type(layers).forward is not forward:
        problem = f"a {type(layers).__name__} with its own forward method"
    if any(is_sharded(p) for module in modules for p in module.parameters()):
        problem = "a layer that FSDP2 has sharded"
    if problem:
        raise ArgumentTypeError(
            "layers: expected layers that run one after the other in this process; got"
            f" {problem}. Write layers=[*model.blocks, head], or call"
            " gradaccum_torch.backward."
        )


def require_layered_optimizer(optimizer: AccumulatingOptimizer) -> None:
    """Raise unless `optimizer` can be used for a backward pass that runs layer by
    layer.
    """
    options = optimizer.whole_window().options
    problem = ""
    if options.separate_sums or options.on_overflow == "drop_micro_batch":
        problem = 'separate_sums=True or on_overflow="drop_micro_batch"'
    hooks = [*hooks_of(optimizer, "step_pre"), *hooks_of(optimizer, "step_post")]
    if hooks and not kit.measures(options):
        problem = "a step hook"
    if problem:
        raise UsageError(
            "optimizer: expected an optimizer that allows a layer-by-layer backward"
            f" pass; got an optimizer with {problem}. Remove this option or hook, or"
            " call gradaccum_torch.backward."
        )
