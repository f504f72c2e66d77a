"""The calls that take the large batch, as the conformance suite makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from gradaccum.kit import mapped
from gradaccum_conformance import (
    TEMPERATURE,
    Array,
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
from gradaccum_harnesses.mindspore.layers import cross_entropy
from gradaccum_harnesses.mindspore.session import (
    MindSporeHarness,
    MindSporeSession,
    context_mode,
)
from gradaccum_harnesses.mindspore.trainer import build_network, ms_dtype, plain
from gradaccum_harnesses.mindspore.workers import MindSporeWorkers
from gradaccum_mindspore.gradient_sum import write
from gradaccum_mindspore.large_batch.coupled import coupled_value_and_grad
from gradaccum_mindspore.large_batch.value_and_grad import (
    value_and_grad,
    value_and_update,
)


class Network(nn.Cell):  # type: ignore[misc]
    """The model of a call, with its loss and its outputs as functions of a
    micro-batch.
    """

    def __init__(self, call: LargeBatchCall) -> None:
        super().__init__(auto_prefix=False)
        self.dtype = ms_dtype(call.dtype)
        shapes = call.model.parameter_shapes()
        self.named = {
            name: Parameter(Tensor(np.zeros(shape), self.dtype), name=name)
            for name, shape in shapes.items()
        }
        self.weights = ms.ParameterTuple(self.named.values())
        self.temperature = Parameter(
            Tensor(TEMPERATURE, self.dtype), name="temperature"
        )
        self.network = build_network(call.model, self.named, self.dtype)
        self.mean = call.loss == "mean"
        self.returns = call.returns

    def loss(self, x: Any, labels: Any, extra: Any = None) -> Any:
        loss = self.network.loss(x, labels)
        if self.mean:
            loss = loss / ops.full((), x.shape[0], dtype=loss.dtype)
        if self.returns is not None:
            return self.returns(loss, self.network(x))
        return loss

    def outputs(self, left: Any, right: Any, extra: Any = None) -> Any:
        return self.network(left), self.network(right)

    def begin(self, call: LargeBatchCall) -> None:
        for name, p in self.named.items():
            write(p, Tensor(call.weights[name], self.dtype))


class MindSporeLargeBatch(MindSporeWorkers, VerifyingHarness, LargeBatchHarness):
    """The harness, with the calls that split a batch."""

    large_batch_modes = MindSporeHarness.modes
    half_dtypes = ()
    """MindSpore has no matrix product of half precision on a CPU."""

    def value_and_grad(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        network = Network(call)
        has_aux = bool(call.options.get("has_aux"))
        network.begin(call)
        with context_mode(call.mode or self.modes[0]):
            if has_aux:
                take = value_and_grad(
                    _from_python(network.loss, call.mode),
                    None,
                    network.weights,
                    **call.options,
                )
            else:
                take = _in_mode(
                    value_and_grad(network.loss, None, network.weights, **call.options),
                    call.mode,
                )
            value, gradients = take(*_tensors(call, batch), *_extra(call))
            loss, aux = value if has_aux else (value, {})
            return Outcome(
                float(loss.asnumpy()), _by_name(network.weights, gradients), _rows(aux)
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
        assert isinstance(session, MindSporeSession)
        trainer = session.trainer
        mean = loss == "mean"

        def loss_fn(x: Any, labels: Any) -> Any:
            value = trainer.network.loss(x, labels)
            if mean:
                value = value / ops.full((), x.shape[0], dtype=value.dtype)
            if returns is not None:
                return returns(value, trainer.network(x))
            return value

        with context_mode(trainer.mode):
            take = _in_mode(
                value_and_update(loss_fn, session.optimizer, **options), trainer.mode
            )
            classes = int(trainer.parameters[-1].shape[0])
            return float(
                take(
                    Tensor(batch.x, trainer.dtype),
                    Tensor(np.eye(classes)[batch.y], trainer.dtype),
                ).asnumpy()
            )

    def verify(
        self, model: Model, weights: Arrays, call: VerifyCall
    ) -> gradaccum.VerificationReport:
        dtype = ms_dtype(call.dtype)
        named = {
            name: Parameter(Tensor(value, dtype), name=name)
            for name, value in weights.items()
        }

        def loss_fn(network: Any, *batch: Any) -> Any:
            return call.loss(network(batch[0]), named, *batch)

        batch = tuple(
            Tensor(each, dtype if each.dtype.kind == "f" else None)
            for each in call.batch
        )
        with context_mode("pynative"):
            return gradaccum.verify(
                build_network(model, named, dtype), loss_fn, batch, **call.options
            )

    def coupled(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        network = Network(call)
        network.begin(call)
        weights = ms.ParameterTuple([*network.weights, network.temperature])

        def loss_fn(outputs: Any) -> Any:
            loss = contrast(outputs[0], outputs[1], network.temperature)
            if network.returns is not None:
                return network.returns(loss, outputs[0])
            return loss

        with context_mode(call.mode or self.modes[0]):
            outputs_fn = _from_python(network.outputs, call.mode)
            take = coupled_value_and_grad(
                outputs_fn, loss_fn, weights, modules=(network,), **call.options
            )
            loss, gradients = take(
                *(Tensor(x, network.dtype) for x in (batch.x, mirrored(batch.x))),
                *_extra(call),
            )
            return Outcome(float(loss.asnumpy()), _by_name(weights, gradients), {})


def contrast(left: Any, right: Any, temperature: Any) -> Any:
    """The suite's loss of the same name."""
    scores = ops.exp(temperature) * ops.matmul(left, right.T)
    labels = ops.eye(left.shape[0], left.shape[0], left.dtype)
    items = ops.full((), left.shape[0], dtype=left.dtype)
    return cross_entropy(scores, labels) / items


class Graph(nn.Cell):  # type: ignore[misc]
    """A call inside a cell."""

    def __init__(self, take: Any) -> None:
        super().__init__(auto_prefix=False)
        self.take = take

    def construct(self, *batch: Any) -> Any:
        return self.take(*batch)


def _in_mode(take: Any, mode: str | None) -> Any:
    if mode == "graph":
        return Graph(take)
    return ms.jit(Graph(take).construct) if mode == "jit" else take


def _from_python(function: Any, mode: str | None) -> Any:
    """Return a call that only Python makes, compiled in the mode "jit"."""
    return ms.jit(function) if mode == "jit" else function


def _tensors(call: LargeBatchCall, batch: Batch) -> tuple[Tensor, Tensor]:
    classes = list(call.weights.values())[-1].shape[0]
    dtype = ms_dtype(call.dtype)
    return Tensor(batch.x, dtype), Tensor(np.eye(classes)[batch.y], dtype)


def _extra(call: LargeBatchCall) -> list[Any]:
    tensors = mapped(
        lambda leaf: Tensor(leaf) if hasattr(leaf, "dtype") else leaf, call.extra
    )
    return [] if call.extra is None else [tensors]


def _by_name(weights: Any, gradients: Any) -> dict[str, Array]:
    return {
        p.name: plain(gradient) for p, gradient in zip(weights, gradients, strict=True)
    }


def _rows(aux: Any) -> dict[str, Array]:
    """Return arrays by name, with a row per micro-batch where there is a list of one
    aux per micro-batch.
    """
    if isinstance(aux, list):
        return {name: np.stack([plain(each[name]) for each in aux]) for name in aux[0]}
    return {name: plain(value) for name, value in aux.items()}


harness = MindSporeLargeBatch()
