"""Records the gradients that a torch optimizer uses while a training loop runs. The
record shows whether the loop accumulates gradients correctly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum import UsageError, kit
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import parameters_of, processes

ELEMENTS = 1 << 20
"""The approximate maximum number of gradient elements that are recorded. If there are
more, only evenly spaced elements are recorded. The least-squares fit needs only a few
elements per micro-batch.
"""


class LoopRecord:
    """The gradients that an optimizer has used, as one vector per update."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: Any) -> None:
        self._optimizer = optimizer
        self._model = model
        self._parameters = parameters_of(optimizer)
        elements = sum(parameter.numel() for parameter in self._parameters)
        self._stride = max(1, elements // ELEMENTS)
        self._before: list[Tensor] = []
        """The parameters' values before the current step."""
        self._steps_under_way = 0
        """The number of nested ``step`` calls. It exceeds one if an optimizer's
        ``step`` calls the ``step`` of its base class.
        """
        self._updates: list[Tensor] = []
        self._norms: list[float] = []
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def before_step(
        self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Record the gradients that the optimizer is about to use. If there is a
        closure, record the gradients after its first run, because Lightning runs the
        last micro-batch in the closure.
        """
        self._steps_under_way += 1
        if self._steps_under_way > 1:
            return None
        # During a step of a wrapped optimizer, the groups contain the master weights.
        parameters = parameters_of(self._optimizer)
        self._before = [parameter.detach().clone() for parameter in parameters]
        updates_before = len(self._updates)
        closure = keywords.get("closure", *arguments[1:2])
        if closure is None:
            self._note_gradients(parameters)
            return None

        def noted_closure() -> Any:
            loss = closure()
            if len(self._updates) == updates_before:
                self._note_gradients(parameters)
            return loss

        return arguments[:1], {**keywords, "closure": noted_closure}

    def _note_gradients(self, parameters: Sequence[Tensor]) -> None:
        gradients = self._dense([parameter.grad for parameter in parameters])
        # A fused optimizer may store a loss scale, by which it divides the gradients.
        scale = float(getattr(self._optimizer, "grad_scale", None) or 1.0)
        self._updates.append(self._vector(gradients) / scale)
        norms = [float(torch.linalg.vector_norm(each.double())) for each in gradients]
        self._norms.append(math.hypot(*norms) / scale)

    @torch.no_grad()
    def restore_parameters(self, *_: Any) -> None:
        """Undo the update, so that all gradients are computed with the same
        parameters.
        """
        self._steps_under_way -= 1
        if self._steps_under_way:
            return
        parameters = parameters_of(self._optimizer)
        for parameter, before in zip(parameters, self._before, strict=True):
            parameter.copy_(before)

    def note_call(
        self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """Record the arguments of a model call that returned a loss."""
        if torch.is_grad_enabled() and _loss_of(output) is not None:
            # Leave out the trainer's own divisor, which is not part of the
            # micro-batch's loss.
            kept_keywords = {
                k: v for k, v in keywords.items() if k != "num_items_in_batch"
            }
            self._calls.append((arguments, kept_keywords))

    def report(
        self,
        loss_fn: Callable[..., Any] | None = None,
        micro_batches: Sequence[Any] | None = None,
        *,
        weight: Callable[..., float] | None = None,
        **options: Any,
    ) -> kit.LoopReport:
        """Report which micro-batches each update contained, and with what weight. This
        is a collective call if several processes are running.

        Args:
            loss_fn: ``loss_fn(*micro_batch)`` returns the loss, neither divided nor
                weighted. Default: the loss that `model` returned.
            micro_batches: this worker's micro-batches, in the order of the loop.
                Default: the calls of `model`, whose arguments are then passed to
                `loss_fn` and `weight`.
            weight: ``weight(*micro_batch)``. Default: the number of items.
            options: ``reduction``, ``steps`` and ``clip_norm``, as in
                `gradaccum.check_loop`.

        Raises:
            UsageError: workers have different numbers of micro-batches.
        """
        calls = self._calls
        if micro_batches is not None:
            calls = [(kit.as_arguments(each), {}) for each in micro_batches]
        loss_fn = loss_fn or self._loss_of_model
        count = weight or _items_of
        losses = [partial(loss_fn, *batch, **keywords) for batch, keywords in calls]
        weights = [float(count(*batch, **keywords)) for batch, keywords in calls]
        gradients = [self._gradient_of(loss) for loss in losses]
        workers = processes()
        if workers > 1:
            gradients, weights = _gathered(gradients, weights, workers)
        return kit.loop_report(
            gradients,
            self._updates,
            weights,
            max(torch.finfo(each.dtype).eps for each in self._parameters),
            norms=self._norms,
            workers=workers,
            **options,
        )

    def _loss_of_model(self, *arguments: Any, **keywords: Any) -> Any:
        return _loss_of(self._model(*arguments, **keywords))

    def _gradient_of(self, loss: Callable[[], Tensor]) -> Tensor:
        trained_parameters = [each for each in self._parameters if each.requires_grad]
        with torch.enable_grad():
            value = loss()
        gradients = torch.autograd.grad(value, trained_parameters, allow_unused=True)
        by_parameter = dict(zip(trained_parameters, gradients, strict=True))
        return self._vector(
            self._dense([by_parameter.get(each) for each in self._parameters])
        )

    def _dense(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return each gradient as a dense tensor that is not sharded. A missing
        gradient becomes zeros.
        """
        dense = []
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            full = torch.zeros_like(parameter) if gradient is None else gradient
            if full.is_sparse:
                full = full.to_dense()
            if hasattr(full, "full_tensor"):
                full = full.full_tensor()
            dense.append(full.detach())
        return dense

    def _vector(self, gradients: Sequence[Tensor]) -> Tensor:
        parts = [
            gradient.reshape(-1)[:: self._stride].double().cpu()
            for gradient in gradients
        ]
        return torch.cat(parts)


def _loss_of(output: Any) -> Any:
    """Return the loss in a model's output, which may be an object or a dictionary."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def _items_of(*arguments: Any, **keywords: Any) -> float:
    return kit.items_of(*arguments, *keywords.values())


def _gathered(
    gradients: list[Tensor], weights: list[float], workers: int
) -> tuple[list[Tensor], list[float]]:
    """Return the gradients and weights of all workers' micro-batches, in the order of
    the ranks.
    """
    parts: list[Any] = [None] * workers
    dist.all_gather_object(parts, (gradients, weights))
    lengths = [len(part_weights) for _, part_weights in parts]
    if len(set(lengths)) > 1:
        raise UsageError(
            "micro_batches: expected the same number of micro-batches on each worker;"
            f" got {lengths}. Check a loop in which every worker has the same number of"
            " micro-batches."
        )
    all_gradients = [gradient for part, _ in parts for gradient in part]
    all_weights = [weight for _, part in parts for weight in part]
    return all_gradients, all_weights


@contextmanager
def recording(optimizer: Any, model: Any) -> Iterator[LoopRecord]:
    """Record the updates of `optimizer`; see `gradaccum.recording`."""
    if isinstance(optimizer, AccumulatingOptimizer):
        optimizer = optimizer._inner
    record = LoopRecord(optimizer, model)
    handles = [
        optimizer.register_step_pre_hook(record.before_step),
        optimizer.register_step_post_hook(record.restore_parameters),
    ]
    if model is not None:
        handles.append(model.register_forward_hook(record.note_call, with_kwargs=True))
    with ExitStack() as ending:
        for handle in handles:
            ending.enter_context(handle)
        yield record
