"""Records the gradients that a torch optimizer uses while a training loop runs. The
record shows whether the loop accumulates gradients correctly.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradaccum import UsageError, kit
from gradaccum_torch.large_batch.batch import require_scalar
from gradaccum_torch.large_batch.gradients import (
    REENTRANT_NODE,
    leaves_of_graph,
    result_and_dtypes,
)
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.fsdp import units_holding
from gradaccum_torch.torch_private.names import (
    local,
    parameters_of,
    processes,
    reduced_parameters,
    untraced_within,
)
from gradaccum_torch.workers.checks import refuse_fully_shard

T = TypeVar("T")
IGNORED_LABEL = -100
"""The label that `torch.nn.functional.cross_entropy` ignores by default."""
ELEMENTS = 1 << 20
"""The approximate maximum number of gradient elements that are recorded per update. If
there are more, only evenly spaced elements are recorded. A few elements per micro-batch
suffice to identify the micro-batches of an update.
"""
LEAST_DIFFERENCE = 1e-5
"""Two workers count as having the same micro-batches if the relative difference between
their gradients is smaller than this number.
"""


class Restoration:
    """Undoes each step of one optimizer, so that all gradients are computed with the
    same parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[tuple[Tensor, Tensor]] = []
        """Each parameter, and its value before the current step."""
        self.steps_under_way = 0
        """The number of nested ``step`` calls. It exceeds one if an optimizer's
        ``step`` calls the ``step`` of its base class.
        """

    def step_begins(self) -> None:
        """Copy the parameters, unless this is a nested step."""
        self.steps_under_way += 1
        if self.steps_under_way > 1:
            return
        # Read the groups anew in each step, because a wrapped optimizer puts its master
        # weights into them during its step.
        parameters = parameters_of(self._optimizer)
        self._before = [(each, each.detach().clone()) for each in parameters]

    @torch.no_grad()
    def step_ended(self) -> None:
        self.steps_under_way -= 1
        if not self.steps_under_way:
            for parameter, before in self._before:
                # Do not write to an unchanged parameter, because autograd may have
                # saved it for a backward pass.
                if not torch.equal(local(parameter), local(before)):
                    parameter.copy_(before)
            self._before = []


class LoopRecord:
    """The gradients that an optimizer has used, as one vector per update."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: Any, is_alone: bool
    ) -> None:
        self._optimizer = optimizer
        self._model = model
        self._is_alone = is_alone
        """Whether the optimizer was wrapped with ``process_group="alone"``."""
        self._parameters = parameters_of(optimizer)
        elements = sum(parameter.numel() for parameter in self._parameters)
        self._stride = max(1, elements // ELEMENTS)
        optimizers = {optimizer, *instances_of(torch.optim.Optimizer)}
        self.restorations = {each: Restoration(each) for each in optimizers}
        """Maps every optimizer to the `Restoration` that undoes its steps. The steps of
        the other optimizers are undone too, because they may train the same model. The
        steps of optimizers created later, for example by an adversarial attack in the
        loss, are not undone.
        """
        self._are_trained = [True] * len(self._parameters)
        """For each parameter, whether the recorded updates train it."""
        self._modes: list[tuple[nn.Module, bool]] = []
        """The modules, and whether each was in training mode in the first update."""
        self._updates: list[Tensor] = []
        self._norms: list[float] = []
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @untraced_within
    def before_step(
        self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Record the gradients that the optimizer is about to use. If there is a
        closure, record the gradients after its first run, because Lightning runs the
        last micro-batch in the closure.
        """
        # torch calls its global hooks first, so `before_any_step` has already counted
        # this step.
        if self.restorations[self._optimizer].steps_under_way > 1:
            return None
        parameters = parameters_of(self._optimizer)
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
        """Record the gradients in ``.grad``. If there are none, the step changes
        nothing, and is not recorded.
        """
        received = [parameter.grad for parameter in parameters]
        if all(gradient is None for gradient in received):
            return
        # A parameter with a gradient was trained, even if the loop has frozen it since.
        are_trained = [
            parameter.requires_grad or gradient is not None
            for parameter, gradient in zip(self._parameters, received, strict=False)
        ]
        if not self._updates:
            self._are_trained = are_trained
            self._modes = [
                (module, module.training)
                for module in instances_of(nn.Module)
                if hasattr(module, "training")  # Not if its `__init__` has failed.
            ]
        is_changed = len(received) != len(self._parameters)
        if is_changed or are_trained != self._are_trained:
            raise UsageError(
                "optimizer: expected an optimizer that trains the same parameters in"
                " every recorded update; got different parameters, because some were"
                f" added, frozen or unfrozen before update {len(self._updates) + 1}."
                " Check the updates before and after this change in two separate"
                " recordings."
            )
        gradients = self._dense(received)
        # A fused optimizer may store a loss scale, by which it divides the gradients.
        scale = float(getattr(self._optimizer, "grad_scale", None) or 1.0)
        self._updates.append(self._vector(gradients) / scale)
        norms = [float(torch.linalg.vector_norm(each.double())) for each in gradients]
        self._norms.append(math.hypot(*norms) / scale)

    @untraced_within
    def before_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self.restorations:
            self.restorations[optimizer].step_begins()

    def after_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self.restorations:
            self.restorations[optimizer].step_ended()

    def note_call(
        self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """Record the arguments of a model call that returned a loss."""
        if torch.is_grad_enabled() and _loss_of(output) is not None:
            # Leave out a trainer's `num_items_in_batch`, by which the model would
            # divide the loss.
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
        is a collective call if several processes are running, unless the process trains
        alone. All workers return the same report. If any worker's updates are not
        right, the report shows the updates of the first such worker. The recorded model
        is the `model` that was passed to `gradaccum.recording`.

        Args:
            loss_fn: ``loss_fn(*micro_batch)`` returns the loss, neither divided nor
                weighted. Default: the loss that the recorded model returns.
            micro_batches: this worker's micro-batches, in the order of the loop.
                Default: one micro-batch for each call to the recorded model that
                returned a loss. The arguments of the call are then passed to `loss_fn`
                and `weight`.
            weight: ``weight(*micro_batch)`` returns the weight of a micro-batch.
                Default: the number of items. If `micro_batches` is not passed, and
                every call to the recorded model has the keyword argument ``labels``,
                the default is the number of labels that are not -100.
            options: ``reduction``, ``steps`` and ``clip_norm``, as in
                `gradaccum.check_loop`.

        Raises:
            UsageError: workers have different numbers of micro-batches, different
                parameters or the same micro-batches; a loss contains a reentrant
                checkpoint; or `weight` is needed, because leaving out each sequence's
                first label changes the ratios between the numbers of labels.
            ArgumentValueError: a loss is not a scalar tensor; there are no
                micro-batches; `micro_batches` yields other micro-batches when it is
                iterated again; or `weight` is needed, because the number of items
                cannot be read from a micro-batch.
        """
        if micro_batches is None:
            calls = kit.recorded_batches(self._calls)
        else:
            calls = [(batch, {}) for batch in kit.recorded_batches(micro_batches)]
        loss_fn = loss_fn or self._loss_of_model
        losses = [partial(loss_fn, *batch, **keywords) for batch, keywords in calls]
        if weight is None:
            counts = _counts_of(calls)
        else:
            weights = [float(weight(*batch, **keywords)) for batch, keywords in calls]
            counts = [(each, each) for each in weights]
        gradients = [self._gradient_of(loss) for loss in losses]

        def rounding() -> float:
            with torch.enable_grad(), self._as_in_the_loop():
                _, dtypes = result_and_dtypes(losses[0])
            return kit.rounding_of(
                gradients,
                lambda number, factor: self._gradient_of(losses[number], factor),
                is_float16=torch.float16 in dtypes,
            )

        workers = 1 if self._trains_alone() else processes()
        measurement = Measurement(
            gradients,
            counts,
            self._updates,
            self._norms,
            # Measure on every worker now, because a forward pass may be collective.
            rounding() if workers > 1 else 0.0,
        )
        parts = _gathered(measurement, workers) if workers > 1 else [measurement]
        all_gradients = [each for part in parts for each in part.gradients]
        all_weights = weights_of([each for part in parts for each in part.counts])
        largest_rounding = max(part.rounding for part in parts)
        epsilon = max(torch.finfo(each.dtype).eps for each in self._parameters)

        def report_of(part: Measurement) -> kit.LoopReport:
            return kit.loop_report(
                all_gradients,
                part.updates,
                all_weights,
                epsilon,
                measure_rounding=rounding if workers == 1 else lambda: largest_rounding,
                norms=part.norms,
                workers=workers,
                **options,
            )

        report = report_of(parts[0])
        for worker, part in enumerate(parts):
            if report.right and not part.has_updates_of(parts[0]):
                report = report_of(part)
                if not report.right:
                    note = f"This report shows the updates of worker {worker}."
                    report.notes.append(note)
        return report

    def _trains_alone(self) -> bool:
        """True if the optimizer was wrapped with ``process_group="alone"``, and no
        `DistributedDataParallel` module averages its gradients over the processes.
        Other code that averages the gradients is not detected.
        """
        ids = set(map(id, self._parameters))
        return self._is_alone and all(
            ids.isdisjoint(map(id, reduced_parameters(module)))
            for module in instances_of(nn.parallel.DistributedDataParallel)
        )

    def _loss_of_model(self, *arguments: Any, **keywords: Any) -> Any:
        return _loss_of(self._model(*arguments, **keywords))

    def _gradient_of(self, loss: Callable[[], Tensor], factor: float = 1.0) -> Tensor:
        trained_parameters = self._trained_parameters()
        with torch.enable_grad(), self._as_in_the_loop():
            value = require_scalar(loss())
            if factor != 1:
                value = value * factor
            # Raise for a reentrant checkpoint, because `torch.autograd.grad` cannot
            # compute the gradients inside it.
            leaves_of_graph([value], set(), {REENTRANT_NODE})
            gradients = torch.autograd.grad(
                value, trained_parameters, allow_unused=True
            )
        by_parameter = dict(zip(trained_parameters, gradients, strict=True))
        return self._vector(
            self._dense([by_parameter.get(each) for each in self._parameters])
        )

    def _trained_parameters(self) -> list[Tensor]:
        pairs = zip(self._parameters, self._are_trained, strict=True)
        return [each for each, is_trained in pairs if is_trained]

    @contextmanager
    def _as_in_the_loop(self) -> Iterator[None]:
        """Inside the block, the trained parameters require gradients, and each module
        has the mode that it had in the first update.
        """
        frozen_parameters = [
            each for each in self._trained_parameters() if not each.requires_grad
        ]
        switched_modules = [
            (each, mode) for each, mode in self._modes if each.training != mode
        ]
        try:
            for parameter in frozen_parameters:
                parameter.requires_grad_()
            for module, mode in switched_modules:
                module.training = mode
            yield
        finally:
            for parameter in frozen_parameters:
                parameter.requires_grad_(False)
            for module, mode in switched_modules:
                module.training = not mode

    def _dense(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return each gradient as a dense tensor that is not sharded, in which a
        complex number becomes two real numbers. A missing gradient becomes zeros.
        """
        dense = []
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            full = torch.zeros_like(parameter) if gradient is None else gradient
            if full.is_sparse:
                full = full.to_dense()
            if hasattr(full, "full_tensor"):
                full = full.full_tensor()
            if full.is_complex():
                full = torch.view_as_real(full.resolve_conj())
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


def instances_of(kind: type[T]) -> list[T]:
    """Return all instances of a class. They are found through the garbage collector,
    because torch keeps no list of its optimizers or modules.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


Calls = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
"""For each micro-batch, the positional and keyword arguments of the loss function."""


def _counts_of(calls: Calls) -> list[tuple[float, float]]:
    """Return two weights for each micro-batch: its number of labels other than
    `IGNORED_LABEL`, with and without the first label of each sequence. If any
    micro-batch has no labels, both weights of each micro-batch are its number of items.
    """
    values = [keywords.get("labels") for _, keywords in calls]
    labels = [each for each in values if isinstance(each, Tensor)]
    if len(labels) < len(calls):
        items = [kit.items_of(*args, *keywords.values()) for args, keywords in calls]
        return [(each, each) for each in items]
    counts = [float((each != IGNORED_LABEL).sum()) for each in labels]
    if any(each.ndim < 2 for each in labels):
        return [(each, each) for each in counts]
    later_counts = [float((each[:, 1:] != IGNORED_LABEL).sum()) for each in labels]
    return [*zip(counts, later_counts, strict=True)]


def weights_of(counts: Sequence[tuple[float, float]]) -> list[float]:
    """Return the weight of each micro-batch of all workers.

    The weight counts the first label of each sequence. A causal language model leaves
    this label out of its loss, but other models do not. The weights are right for both
    kinds of models if leaving out the first labels does not change the ratios between
    the weights.

    Raises:
        UsageError: leaving out the first labels changes these ratios.
    """
    largest, later_largest = max(counts)
    for count, later_count in counts:
        if count * later_largest != later_count * largest:
            raise UsageError(
                "weight: expected a function, because some models leave each sequence's"
                " first label out of the loss; got None. For a causal language model,"
                " pass weight=lambda *_, labels, **__: (labels[:, 1:] != -100).sum()."
                " For a model that predicts every label, leave out [:, 1:]."
            )
    return [count for count, _ in counts]


class Measurement(NamedTuple):
    """What one worker has recorded and measured."""

    gradients: list[Tensor]
    """The gradient of each micro-batch."""
    counts: list[tuple[float, float]]
    """Two weights for each micro-batch, as `_counts_of` returns them."""
    updates: list[Tensor]
    norms: list[float]
    rounding: float
    """The relative rounding error of `gradients`."""

    def has_updates_of(self, other: Measurement) -> bool:
        return self.norms == other.norms and all(
            map(torch.equal, self.updates, other.updates)
        )


def _gathered(measurement: Measurement, workers: int) -> list[Measurement]:
    """Return the measurements of all workers, in the order of the ranks. `measurement`
    is the measurement of this worker. This is a collective call.
    """
    parts: list[Any] = [None] * workers
    dist.all_gather_object(parts, measurement)
    lengths = [len(part.counts) for part in parts]
    if len(set(lengths)) > 1:
        raise UsageError(
            "micro_batches: expected the same number of micro-batches on each worker;"
            f" got {lengths}. Run the check on a loop in which every worker has the"
            " same number of micro-batches."
        )
    first = parts[0]
    for rank, part in enumerate(parts[1:], 1):
        if len(part.gradients[0]) != len(first.gradients[0]):
            raise UsageError(
                "optimizer: expected the same parameters on each worker; got different"
                f" parameters on workers 0 and {rank}. If each worker trains a part of"
                " the model, check a small copy of the whole model in one process."
            )
        gradient = torch.cat(part.gradients)
        difference = gradient - torch.cat(first.gradients)
        if difference.norm() < LEAST_DIFFERENCE * gradient.norm():
            raise UsageError(
                "micro_batches: expected different micro-batches on each worker; got"
                f" the same gradients on worker {rank} as on worker 0. Pass each worker"
                " its own part of the data, as a DistributedSampler does. If the"
                " workers share the same data, as in tensor parallelism, check a small"
                " copy of the model in one process."
            )
    return parts


@contextmanager
def recording(optimizer: Any, model: Any) -> Iterator[LoopRecord]:
    """Record the updates of `optimizer`; see `gradaccum.recording`.

    Raises:
        UsageError: FSDP2 shards the optimizer's parameters.
    """
    is_alone = False
    if isinstance(optimizer, AccumulatingOptimizer):
        is_alone = optimizer._window.workers.is_alone
        optimizer = optimizer._inner
    refuse_fully_shard("optimizer", units_holding(parameters_of(optimizer)))
    record = LoopRecord(optimizer, model, is_alone)
    handles = [
        optimizer.register_step_pre_hook(record.before_step),
        register_optimizer_step_pre_hook(record.before_any_step),
        register_optimizer_step_post_hook(record.after_any_step),
    ]
    if model is not None:
        handles.append(model.register_forward_hook(record.note_call, with_kwargs=True))
    with ExitStack() as ending:
        for handle in handles:
            ending.enter_context(handle)
        # Do not keep the other optimizers alive.
        ending.callback(record.restorations.clear)
        yield record
