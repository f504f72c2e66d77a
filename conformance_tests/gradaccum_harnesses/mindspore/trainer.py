"""The model, optimizer and step of a session, built from neutral specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim

import gradaccum
from gradaccum_conformance.harness import Dtype
from gradaccum_conformance.specs import (
    Array,
    Arrays,
    AvgPool,
    Conv,
    Dense,
    Flatten,
    Layer,
    Model,
    Optimizer,
)
from gradaccum_harnesses.mindspore import layers
from gradaccum_mindspore.gradient_sum import write

MASTER = ".gradaccum.master"


class Step(nn.Cell):  # type: ignore[misc]
    """Forward, backward and the optimizer's call, as one cell."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(auto_prefix=False)
        self.network = trainer.network
        self.optimizer = trainer.optimizer
        self.wrapped = trainer.wrapped
        self.backward = ms.value_and_grad(
            self.forward, None, trainer.parameters, has_aux=True
        )

    def forward(self, x: Any, labels: Any, divisor: Any) -> Any:
        loss = self.network.loss(x, labels) / divisor
        if self.wrapped:
            return self.optimizer.scale(loss), loss
        return loss, loss

    def construct(self, x: Any, labels: Any, divisor: Any, weight: Any) -> Any:
        (_, loss), gradients = self.backward(x, labels, divisor)
        if self.wrapped:
            self.optimizer(gradients, weight, loss)
        else:
            self.optimizer(gradients)
        return loss


class Trainer:
    """A model, its optimizer and the step over both."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        dtype: Dtype,
        mode: str,
        options: Mapping[str, Any] | None,
    ) -> None:
        self.dtype = ms_dtype(dtype)
        self.mode = mode
        self.wrapped = options is not None
        shapes = model.parameter_shapes()
        self.parameters = ms.ParameterTuple(
            [
                Parameter(Tensor(np.zeros(s), self.dtype), name=name)
                for name, s in shapes.items()
            ]
        )
        self.network = build_network(
            model, dict(zip(shapes, self.parameters, strict=True)), self.dtype
        )
        self.inner = build_optimizer(optimizer, list(self.parameters))
        self.optimizer = (
            self.inner if options is None else gradaccum.wrap(self.inner, **options)
        )
        cell = Step(self)
        self.step = ms.jit(cell.construct) if mode == "jit" else cell
        self.apply = self._jitted_apply() if mode == "jit" else self.optimizer
        self.initial = self.arrays()

    def _jitted_apply(self) -> Any:
        optimizer = self.optimizer
        wrapped = self.wrapped

        @ms.jit  # type: ignore[untyped-decorator]
        def apply(weight: Any, *gradients: Any) -> Any:
            if wrapped:
                return optimizer(gradients, weight=weight)
            return optimizer(gradients)

        # One by one, because a tuple is a constant of the compiled function: other
        # values would compile it anew.
        return lambda gradients, weight=None: apply(weight, *gradients)

    def entries(self) -> dict[str, Any]:
        found = {p.name: p for p in self.optimizer.get_parameters()}
        return found | {p.name: p for p in self.parameters}

    def arrays(self) -> Arrays:
        return {name: plain(p) for name, p in self.entries().items()}

    def reset(self, weights: Arrays) -> None:
        for name, p in self.entries().items():
            write(p, Tensor(self.start_of(name, weights), p.dtype))

    def start_of(self, name: str, weights: Arrays) -> Array:
        """Return the first value of a Parameter; a master's is the model's rounded
        weight.
        """
        own = name.removesuffix(MASTER)
        if own != name and own in weights:
            return plain(Tensor(weights[own], self.dtype))
        return weights.get(name, self.initial[name])


def ms_dtype(dtype: Dtype) -> Any:
    return getattr(ms, dtype)


def plain(tensor: Any) -> Array:
    """Return a copy in NumPy, bfloat16 as float32."""
    wide = tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor
    array: Array = wide.asnumpy().copy()
    return array


def build_network(
    model: Model, parameters: Mapping[str, Any], dtype: Any
) -> layers.Network:
    cells = []
    for index, layer in enumerate(model.layers):
        cells.append(
            build_layer(
                layer, [parameters[f"{index}.{name}"] for name in layer.shapes()], dtype
            )
        )
    return layers.Network(cells)


def build_layer(layer: Layer, parameters: list[Any], dtype: Any) -> Any:
    match layer:
        case Dense():
            return layers.Affine(*parameters)
        case Conv():
            return layers.Convolution(*parameters)
        case AvgPool():
            return layers.SquareMean(layer.size, dtype)
        case Flatten():
            return nn.Flatten()
        case _:
            return nn.Tanh()


def build_optimizer(spec: Optimizer, parameters: list[Any]) -> Any:
    """Return the optimizer of a spec; AdamW is the experimental one, so that both
    families are driven.
    """
    rate = spec.learning_rate
    match spec.kind:
        case "capture":
            return layers.Capture(parameters, rate)
        case "sgd":
            return nn.SGD(parameters, rate)
        case "momentum":
            return nn.Momentum(parameters, rate, 0.9)
        case "adam":
            return nn.Adam(parameters, rate)
        case _:
            return optim.AdamW(parameters, rate, weight_decay=0.01)
