"""The calls that take the large batch, as the conformance suite makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

import gradaccum
from gradaccum.kit import mapped
from gradaccum_conformance import (
    TEMPERATURE,
    Arrays,
    Batch,
    Coupling,
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
from gradaccum_harnesses.torch.couplings import COUPLINGS
from gradaccum_harnesses.torch.session import (
    SpecModel,
    TorchSession,
    to_numpy,
)
from gradaccum_harnesses.torch.workers import TorchWorkers
from gradaccum_torch.large_batch import backward, coupled_backward


class TorchLargeBatch(TorchWorkers, VerifyingHarness, LargeBatchHarness):
    """The harness, with the calls that split a batch."""

    large_batch_modes: ClassVar[tuple[str, ...]] = ("eager",)

    def value_and_grad(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        module, declared = (
            SpecModel(call.model, call.weights, call.dtype),
            call.options.get("aux"),
        )

        def loss_fn(x: Tensor, y: Tensor, *_: Any) -> Any:
            logits = module(x)
            loss = functional.cross_entropy(logits, y, reduction=call.loss)
            if call.returns is not None:
                return call.returns(loss, logits)
            return (loss, _aux(logits, declared)) if declared else loss

        done = backward(
            loss_fn, *_tensors(batch, module), *_extra(call), **_options(call.options)
        )
        loss, aux = done if declared else (done, {})
        return Outcome(
            float(loss),
            _gradients(module),
            {name: to_numpy(value) for name, value in aux.items()},
        )

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
        model = session.model

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            logits = model(x)
            value = functional.cross_entropy(logits, y, reduction=loss)
            made: Tensor = value if returns is None else returns(value, logits)
            return made

        return float(
            backward(
                loss_fn,
                *_tensors(batch, model),
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

    def coupled(
        self, call: LargeBatchCall, coupling: Coupling, batch: Batch
    ) -> Outcome:
        module = SpecModel(call.model, call.weights, call.dtype)
        temperature = torch.tensor(TEMPERATURE, dtype=module.dtype, requires_grad=True)
        views = [
            torch.tensor(x, dtype=module.dtype) for x in (batch.x, mirrored(batch.x))
        ]

        def outputs_fn(left: Tensor, right: Tensor, *_: Any) -> dict[str, Tensor]:
            made = {"left": module(left), "right": module(right)}
            return (
                made
                if call.outputs is None
                else {name: call.outputs(value) for name, value in made.items()}
            )

        def loss_fn(outputs: dict[str, Tensor]) -> Any:
            loss = COUPLINGS[coupling](outputs["left"], outputs["right"], temperature)
            return loss if call.returns is None else call.returns(loss, outputs["left"])

        loss = coupled_backward(
            outputs_fn, loss_fn, *views, *_extra(call), **_options(call.options)
        )
        assert temperature.grad is not None
        return Outcome(
            float(loss),
            {**_gradients(module), "temperature": to_numpy(temperature.grad)},
            {},
        )


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


def _aux(logits: Tensor, declared: Mapping[str, str]) -> dict[str, Tensor]:
    made = {
        "sum": logits.sum(0),
        "mean": logits.mean(0),
        "weighted_mean": logits.mean(0),
        "max": logits.amax(0),
        "min": logits.amin(0),
        "concatenate": logits,
    }
    return {name: made[name] for name in declared}


harness = TorchLargeBatch()
