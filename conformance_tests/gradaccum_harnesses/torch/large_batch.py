"""The calls that take the large batch, as the conformance suite makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import gradaccum
from gradaccum.kit import mapped
from gradaccum_conformance import (
    TEMPERATURE,
    Arrays,
    Batch,
    LargeBatchCall,
    LargeBatchHarness,
    Loss,
    Model,
    Option,
    Outcome,
    Returns,
    Session,
    VerifyCall,
    VerifyingHarness,
    mirrored,
)
from gradaccum_harnesses.torch.session import SpecModel, TorchSession, to_numpy
from gradaccum_harnesses.torch.workers import TorchWorkers
from gradaccum_torch import backward, coupled_backward


class TorchLargeBatch(TorchWorkers, VerifyingHarness, LargeBatchHarness):
    """The harness, with the calls that split a batch."""

    large_batch_modes: ClassVar[tuple[str, ...]] = ("eager",)

    def value_and_grad(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        module = SpecModel(call.model, call.weights, call.dtype)
        returned = backward(
            _loss_fn(module, call.loss, call.returns),
            *_tensors(batch, module),
            *_extra(call),
            **_options(call.options),
        )
        loss, aux = returned if call.options.get("has_aux") else (returned, {})
        return Outcome(float(loss), _gradients(module), _arrays(aux))

    def update(
        self,
        session: Session,
        batch: Batch,
        *,
        loss: Loss = "mean",
        options: Mapping[str, Option],
        returns: Returns | None = None,
    ) -> float:
        assert isinstance(session, TorchSession)
        return float(
            backward(
                _loss_fn(session.model, loss, returns),
                *_tensors(batch, session.model),
                optimizer=session.optimizer,
                **_options(options),
            )
        )

    def verify(
        self, model: Model, weights: Arrays, call: VerifyCall
    ) -> gradaccum.VerificationReport:
        module = SpecModel(model, weights, call.dtype)

        def loss_fn(module: SpecModel, *batch: Tensor) -> Any:
            return call.loss(module(batch[0]), module.named, *batch)

        batch = tuple(
            torch.tensor(each, dtype=module.dtype if each.dtype.kind == "f" else None)
            for each in call.batch
        )
        return gradaccum.verify(module, loss_fn, batch, **call.options)

    def coupled(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        module = SpecModel(call.model, call.weights, call.dtype)
        temperature = torch.tensor(TEMPERATURE, dtype=module.dtype, requires_grad=True)
        views = [
            torch.tensor(x, dtype=module.dtype) for x in (batch.x, mirrored(batch.x))
        ]

        def outputs_fn(left: Tensor, right: Tensor, *_: Any) -> dict[str, Tensor]:
            return {"left": module(left), "right": module(right)}

        def loss_fn(outputs: dict[str, Tensor]) -> Any:
            """The suite's `contrast`."""
            left = outputs["left"]
            scores = temperature.exp() * left @ outputs["right"].T
            loss = functional.cross_entropy(scores, torch.arange(len(left)))
            return loss if call.returns is None else call.returns(loss, left)

        loss = coupled_backward(
            outputs_fn, loss_fn, *views, *_extra(call), **_options(call.options)
        )
        assert temperature.grad is not None
        return Outcome(
            float(loss),
            {**_gradients(module), "temperature": to_numpy(temperature.grad)},
            {},
        )


def _loss_fn(
    model: SpecModel, loss: Loss, returns: Returns | None
) -> Callable[..., Any]:
    def loss_fn(x: Tensor, y: Tensor, *_: Any) -> Any:
        logits = model(x)
        value = functional.cross_entropy(logits, y, reduction=loss)
        return value if returns is None else returns(value, logits)

    return loss_fn


def _tensors(batch: Batch, module: SpecModel) -> tuple[Tensor, Tensor]:
    return torch.tensor(batch.x, dtype=module.dtype), torch.tensor(batch.y)


def _extra(call: LargeBatchCall) -> list[Any]:
    tensors = mapped(
        lambda leaf: torch.tensor(leaf) if hasattr(leaf, "dtype") else leaf, call.extra
    )
    return [] if call.extra is None else [tensors]


def _options(options: Mapping[str, Option]) -> dict[str, Option]:
    return {
        name: torch.tensor(value) if name == "weight" and not callable(value) else value
        for name, value in options.items()
    }


def _gradients(module: SpecModel) -> Arrays:
    return {
        name: to_numpy(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in module.named.items()
    }


def _arrays(aux: Any) -> Arrays:
    """The aux in NumPy's arrays: with a row for each micro-batch, if it is a list."""
    if isinstance(aux, list):
        return {
            name: np.stack([to_numpy(part[name]) for part in aux]) for name in aux[0]
        }
    return {name: to_numpy(value) for name, value in aux.items()}


harness = TorchLargeBatch()
