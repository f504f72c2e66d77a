"""Models as torch functions over named parameters, and training loops as users write
them, for the conformance suite.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import SGD

import gradaccum
from gradaccum.kit import State
from gradaccum_conformance import (
    Array,
    Arrays,
    Batch,
    Captured,
    Dtype,
    GradientTree,
    Loss,
    Model,
    Optimizer,
    OptimizerSession,
    Session,
    Setup,
)
from gradaccum_conformance import Harness as BaseHarness
from gradaccum_conformance.specs import AvgPool, Conv, Dense, Flatten, Layer, Tanh

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class CaptureSGD(SGD):
    """Plain SGD that keeps its number of runs and its last gradients in its state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state["gradient"] = (
                    torch.zeros_like(parameter)
                    if parameter.grad is None
                    else parameter.grad.detach().clone()
                )
        loss: float | None = super().step(closure)
        return loss


class SpecModel(torch.nn.Module):
    """The layers of a spec over parameters with the spec's names."""

    def __init__(self, model: Model, weights: Arrays, dtype: Dtype) -> None:
        super().__init__()
        self.spec = model
        self.dtype = _DTYPES[dtype]
        self.named: dict[str, torch.nn.Parameter] = {}
        for name in model.parameter_shapes():
            self.named[name] = torch.nn.Parameter(
                torch.tensor(weights[name], dtype=self.dtype)
            )
            self.register_parameter(name.replace(".", "_"), self.named[name])

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.spec.layers):
            x = _apply(
                layer,
                {name: self.named[f"{index}.{name}"] for name in layer.shapes()},
                x,
            )
        return x

    def loss(
        self,
        batch: Batch,
        loss: Loss,
        forward: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        x = torch.tensor(batch.x, dtype=self.dtype)
        y = torch.tensor(batch.y)
        return functional.cross_entropy((forward or self)(x), y, reduction=loss)


def _apply(layer: Layer, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    match layer:
        case Dense():
            return functional.linear(x, p["weight"], p["bias"])
        case Conv():
            return functional.conv2d(x, p["weight"], p["bias"])
        case Tanh():
            return torch.tanh(x)
        case AvgPool(size):
            return functional.avg_pool2d(x, size)
        case Flatten():
            return x.flatten(1)


def make_optimizer(model: SpecModel, spec: Optimizer) -> torch.optim.Optimizer:
    parameters = list(model.named.values())
    rate = spec.learning_rate
    match spec.kind:
        case "capture":
            return CaptureSGD(parameters, lr=rate)
        case "sgd":
            return SGD(parameters, lr=rate)
        case "momentum":
            return SGD(parameters, lr=rate, momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, lr=rate)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)


def to_numpy(tensor: Tensor) -> Array:
    """Convert to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tensor.detach().cpu()
    return np.array(
        (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    )


class _GivenGradients(torch.autograd.Function):
    """A number with the gradients that it is given.

    It hands over their memory, which the caller may write over later, as the replay of
    a CUDA graph does. So a gradient is multiplied only where the loss was scaled.
    """

    @staticmethod
    def forward(
        ctx: Any, number: Tensor, gradients: Sequence[Tensor], *parameters: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        if scale == 1:
            return None, None, *ctx.gradients
        return None, None, *(scale * gradient for gradient in ctx.gradients)


class TorchSession(OptimizerSession):
    """A model and its optimizer, trained by the loop of torch's tutorials."""

    def __init__(
        self,
        model: SpecModel,
        inner: torch.optim.Optimizer,
        optimizer: Any,
        forward: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.inner = inner
        self.optimizer = optimizer
        self.forward = forward
        self.plain = False

    @property
    def wrapped(self) -> bool:
        return self.optimizer is not self.inner

    def micro_batch(
        self, batch: Batch, *, weight: float | None = None, loss: Loss = "mean"
    ) -> float:
        value = self.model.loss(batch, loss, self.forward)
        self._train(value, weight)
        return float(value.detach())

    def gradients(self, tree: GradientTree, *, weight: float | None = None) -> None:
        self.gradients_with_loss(tree, weight, 0.0)

    def gradients_with_loss(
        self, tree: GradientTree, weight: float | None, loss: float
    ) -> bool:
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        present = {name: g for name, g in tree.items() if g is not None}
        gradients = [torch.tensor(g, dtype=dtype) for g in present.values()]
        parameters = [self.model.named[name].to(dtype) for name in present]
        number = torch.tensor(loss, dtype=dtype)
        value = _GivenGradients.apply(number, gradients, *parameters)  # type: ignore[no-untyped-call]
        self._train(value, weight, plainly=self.plain)
        return True

    def gradients_in(self, tree: Arrays) -> None:
        parameters = [self.model.named[name] for name in tree]
        gradients = [torch.from_numpy(gradient) for gradient in tree.values()]
        number = torch.zeros((), dtype=torch.float64)
        loss = _GivenGradients.apply(number, gradients, *parameters)  # type: ignore[no-untyped-call]
        self._train(loss, None)

    def _train(self, loss: Tensor, weight: float | None, plainly: bool = False) -> None:
        """Make a micro-batch; `plainly`, one without a weight is a ``loss.backward()``
        alone, which does not tell its loss.
        """
        if not self.wrapped or (weight is None and plainly):
            loss.backward()  # type: ignore[no-untyped-call]
        elif weight is None:
            self.optimizer.scale(loss).backward()
        else:
            self.optimizer.backward(loss, weight=weight)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def flush(self, denominator: Any = None) -> None:
        self.optimizer.flush(denominator=denominator)

    def discard(self) -> None:
        self.optimizer.discard()

    def state(self) -> State:
        entry = self.optimizer.state_dict()["gradaccum"]
        return State(*(entry[name] for name in State._fields))

    def accumulator(self) -> Arrays:
        sums = self.optimizer.state_dict()["gradaccum"]["sums"]
        named = enumerate(self.model.named.items())
        return {
            name: to_numpy(sums.get(index, torch.zeros_like(parameter)))
            for index, (name, parameter) in named
        }

    def parameters(self) -> Arrays:
        return {
            name: to_numpy(parameter) for name, parameter in self.model.named.items()
        }

    def masters(self) -> Arrays:
        masters = self.optimizer.master_weights
        return {
            name: to_numpy(masters.get(index, parameter))
            for index, (name, parameter) in enumerate(self.model.named.items())
        }

    def optimizer_state(self) -> Arrays:
        state = self.inner.state_dict()["state"]
        return {
            f"{index}.{name}": to_numpy(value)
            if isinstance(value, Tensor)
            else np.asarray(value)
            for index, entries in state.items()
            for name, value in entries.items()
            if value is not None
        }

    def captured(self) -> Captured:
        entries = {
            name: self.inner.state.get(own, {})
            for name, own in self.model.named.items()
        }
        return Captured(
            max(entry.get("calls", 0) for entry in entries.values()),
            {
                name: to_numpy(entry["gradient"])
                for name, entry in entries.items()
                if entry
            },
        )

    def predict(self, x: Array) -> Array:
        with torch.no_grad():
            return to_numpy(self.model(torch.tensor(x, dtype=self.model.dtype)))

    def snapshot(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def restore(self, snapshot: Any) -> None:
        model, optimizer = copy.deepcopy(snapshot)
        self._load(model, optimizer)

    def save(self, directory: Path) -> None:
        torch.save(self.model.state_dict(), directory / "model.pt")
        torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")

    def load(self, directory: Path) -> None:
        model, optimizer = (
            torch.load(directory / name, weights_only=True)
            for name in ("model.pt", "optimizer.pt")
        )
        self._load(model, optimizer)

    def _load(self, model: Any, optimizer: Any) -> None:
        # The optimizer first: it is the one that refuses another model's state with
        # nothing changed.
        self.optimizer.load_state_dict(optimizer)
        self.model.load_state_dict(model)


class TorchHarness(BaseHarness):
    """The builder of torch sessions. Autograd refuses gradients of another shape."""

    name: ClassVar[str] = "torch"
    modes: ClassVar[tuple[str, ...]] = ("eager", "separate")
    """The second with ``separate_sums=True``."""
    gradient_shapes_reach_gradaccum: ClassVar[bool] = False

    def start(self, setup: Setup) -> Session:
        module = SpecModel(setup.model, setup.weights, setup.dtype)
        inner = make_optimizer(module, setup.optimizer)
        if setup.options is None:
            return TorchSession(module, inner, inner)
        own: dict[str, Any] = (
            {"separate_sums": True} if setup.mode == "separate" else {}
        )
        session = TorchSession(
            module, inner, gradaccum.wrap(inner, **own, **setup.options)
        )
        session.plain = (
            setup.options.get("loss_scale") is None
            and setup.options.get("reduction") != "sum_per_item"
        )
        return session

    def gradient(
        self,
        model: Model,
        weights: Arrays,
        batch: Batch,
        *,
        dtype: Dtype,
        loss: Loss = "mean",
    ) -> Arrays:
        module = SpecModel(model, weights, dtype)
        gradients = torch.autograd.grad(
            module.loss(batch, loss), list(module.named.values())
        )
        return {
            name: to_numpy(gradient)
            for name, gradient in zip(module.named, gradients, strict=True)
        }
