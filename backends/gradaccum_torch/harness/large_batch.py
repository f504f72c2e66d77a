"""The calls that take the large batch, as the conformance suite makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gradaccum_conformance import TEMPERATURE, Batch, Coupling, LargeBatchCall, LargeBatchHarness, Loss, Option, Outcome, Session
from gradaccum_torch.harness.session import SpecModel, TorchHarness, TorchSession, to_numpy
from gradaccum_torch.large_batch import backward, coupled_backward

Pair = tuple[Tensor, Tensor]
"""The inputs and the labels of a micro-batch."""


class TorchLargeBatch(TorchHarness, LargeBatchHarness):
    """The harness, with the large batch in one call."""

    large_batch_modes: ClassVar[tuple[str, ...]] = ("eager",)

    def value_and_grad(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        model = SpecModel(call.model, call.weights, call.dtype)
        declared: Any = call.options.get("aux")

        def loss_fn(pair: Pair) -> Any:
            logits = model(pair[0])
            loss = functional.cross_entropy(logits, pair[1], reduction=call.loss)
            return loss if declared is None else (loss, {kind: _aux(kind, logits) for kind in declared})

        options: dict[str, Any] = dict(call.options)
        returned = backward(loss_fn, _tensors(model, batch), **options)
        loss, aux = (returned, {}) if declared is None else returned
        return Outcome(float(loss), _gradients(model.named), {name: to_numpy(value) for name, value in aux.items()})

    def update(self, session: Session, batch: Batch, *, loss: Loss = "mean", options: Mapping[str, Option]) -> float:
        assert isinstance(session, TorchSession)
        model, optimizer = session.model, session.optimizer

        def loss_fn(pair: Pair) -> Tensor:
            return functional.cross_entropy(model(pair[0]), pair[1], reduction=loss)

        own: dict[str, Any] = {"reduction": optimizer.state_dict()["gradaccum"]["terms"]["reduction"], **options}
        return float(backward(loss_fn, _tensors(model, batch), optimizer=optimizer, **own))

    def coupled(self, call: LargeBatchCall, coupling: Coupling, batch: Batch) -> Outcome:
        model = SpecModel(call.model, call.weights, call.dtype)
        temperature = torch.nn.Parameter(torch.tensor(TEMPERATURE, dtype=model.dtype))

        def outputs_fn(pair: Pair) -> dict[str, Tensor]:
            return {"left": model(pair[0]), "right": model(pair[0].flip(-1))}

        options: dict[str, Any] = dict(call.options)
        loss_fn = _Coupled(coupling, temperature)
        loss = coupled_backward(outputs_fn, loss_fn, _tensors(model, batch), **options)
        return Outcome(float(loss), _gradients({**model.named, "temperature": temperature}), {})


class _Coupled:
    """A loss that couples the items, as the suite's `couplings` define it."""

    def __init__(self, coupling: Coupling, temperature: Tensor) -> None:
        self._coupling, self._temperature = coupling, temperature

    def __call__(self, outputs: dict[str, Tensor]) -> Tensor:
        left, factor = outputs["left"], self._temperature.exp()
        match self._coupling:
            case "contrast":
                return functional.cross_entropy(factor * left @ outputs["right"].T, torch.arange(len(left)))
            case "covariance":
                covariance = torch.cov(left.T)
                off = covariance - covariance.diagonal().diag()
                return factor * off.square().sum() / left.shape[1]
            case "balance":
                experts = left.shape[1]
                fraction = functional.one_hot(left.argmax(1), experts).to(left.dtype).mean(0)
                return factor * experts * (fraction * left.softmax(1).mean(0)).sum()


def _aux(kind: str, logits: Tensor) -> Tensor:
    match kind:
        case "sum":
            return logits.sum(0)
        case "max":
            return logits.amax(0)
        case "min":
            return logits.amin(0)
        case "concatenate":
            return logits
    return logits.mean(0)


def _tensors(model: SpecModel, batch: Batch) -> Pair:
    return torch.tensor(batch.x, dtype=model.dtype), torch.tensor(batch.y)


def _gradients(named: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: to_numpy(torch.zeros_like(own) if own.grad is None else own.grad) for name, own in named.items()}
