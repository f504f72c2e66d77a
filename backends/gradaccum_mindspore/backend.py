"""The MindSpore backend, which gradaccum looks up under the name ``mindspore``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Unpack, cast

from mindspore import nn
from mindspore.experimental import optim

from gradaccum import LossScale
from gradaccum.kit import (
    Options,
    Steps,
    WrapOptions,
    optimizer_error,
    wrap_with,
    wrapped_twice_error,
)
from gradaccum_mindspore.optimizer import (
    AccumulatingExperimentalOptimizer,
    AccumulatingOptimizer,
)
from gradaccum_mindspore.recording import LoopRecorder, recording
from gradaccum_mindspore.scheduler import SCHEDULERS, GatedScheduler
from gradaccum_mindspore.verification import MindSporeSubject
from gradaccum_mindspore.workers.agreement import shares_windows


class MindSporeBackend:
    """The implementation of `gradaccum.kit.Backend` for the optimizers in
    `mindspore.nn` and `mindspore.experimental`.
    """

    name = "mindspore"
    subject_type = MindSporeSubject

    def is_scheduler(self, candidate: object) -> bool:
        return isinstance(candidate, SCHEDULERS)

    def gate(self, scheduler: object) -> GatedScheduler:
        return GatedScheduler(scheduler)

    def verifies(self, model: object) -> bool:
        return isinstance(model, nn.Cell)

    def recording(
        self, optimizer: object, model: object
    ) -> AbstractContextManager[LoopRecorder]:
        return recording(optimizer)

    def wrap(
        self,
        optimizer: object,
        options: Options,
        *,
        name: str = "gradaccum",
        data_parallel: bool | None = None,
    ) -> AccumulatingOptimizer:
        """Wrap a MindSpore optimizer so that it runs once per window.

        Args:
            optimizer: the optimizer to run once per window.
            options: the validated options.
            name: a string that is included in the names of the Parameters that store
                the state.
            data_parallel: True means that all workers share each window, and the
                gradient sums are all-reduced once, when the window ends. In that case
                this call, the end of each window and ``flush`` are collective
                operations, in which every worker must take part. A Parameter that you
                marked as ``layerwise_parallel`` belongs to one worker, so its gradient
                sum is not all-reduced. This call marks all other Parameters as
                ``layerwise_parallel`` too, so that MindSpore's own reducer skips them.
                False means that this worker does not share its windows. None is allowed
                only with a single worker.

        Raises:
            ArgumentTypeError: `optimizer` is not a MindSpore optimizer, or is already
                wrapped.
            ArgumentValueError: `optimizer` has its own loss scale; or, with
                ``data_parallel=True``, another worker has different options or
                parameters, or ``layerwise_parallel`` Parameters are combined with the
                reduction "mean" or with ``on_overflow="drop_micro_batch"``.
            UsageError: there are several workers, but `data_parallel` was not passed;
                or, with ``data_parallel=True``, communication is not initialised,
                MindSpore itself reduces the gradients, or ``steps`` is
                ``until_weight(...)``.
        """
        if isinstance(optimizer, AccumulatingOptimizer):
            raise wrapped_twice_error(optimizer)
        if not isinstance(optimizer, (nn.Optimizer, optim.Optimizer)):
            raise optimizer_error(
                "a mindspore.nn or mindspore.experimental optimizer",
                optimizer,
                "Write for example gradaccum.wrap(nn.Adam(net.trainable_params()),"
                " steps=4).",
            )
        is_shared = shares_windows(data_parallel)
        kind = AccumulatingOptimizer
        if isinstance(optimizer, optim.Optimizer):
            kind = AccumulatingExperimentalOptimizer
        return kind(optimizer, options, name, data_parallel=is_shared)


backend = MindSporeBackend()


class MindSporeOptions(WrapOptions, total=False):
    """The keyword arguments of `wrap`: the options of `gradaccum.wrap` and of
    `MindSporeBackend.wrap`.
    """

    loss_scale: float | LossScale | None
    name: str
    data_parallel: bool | None


def wrap(
    optimizer: nn.Optimizer | optim.Optimizer,
    steps: Steps,
    **options: Unpack[MindSporeOptions],
) -> AccumulatingOptimizer:
    """Wrap a MindSpore optimizer, like `gradaccum.wrap` but with precise type
    annotations for the options and the return value.
    """
    return cast(AccumulatingOptimizer, wrap_with(backend, optimizer, steps, **options))
