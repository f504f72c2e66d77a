"""Recognises and wraps torch's optimizers and schedulers for the gradaccum package."""

from __future__ import annotations

from typing import Literal, Unpack, cast

import torch
from torch.amp import GradScaler

from gradaccum import LossScale
from gradaccum.kit import (
    Options,
    ScaleRule,
    Steps,
    WrapOptions,
    optimizer_error,
    require_bool,
    wrap_with,
    wrapped_twice_error,
)
from gradaccum_torch.checks import require_accumulate_dtype
from gradaccum_torch.grad_scaler import scaler_rule
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.recording import recording
from gradaccum_torch.scheduler import GatedScheduler, is_scheduler
from gradaccum_torch.verification import TorchSubject
from gradaccum_torch.workers.deferred import GradientSync
from gradaccum_torch.workers.workers import workers_of


class TorchBackend:
    """The torch backend, which ``gradaccum.wrap`` and ``gradaccum.verify`` use."""

    name = "torch"
    subject_type = TorchSubject
    scaler_kind = "a torch.amp.GradScaler"
    is_scheduler = staticmethod(is_scheduler)
    recording = staticmethod(recording)

    def scaler_rule(self, scaler: object) -> ScaleRule | None:
        return scaler_rule(scaler) if isinstance(scaler, GradScaler) else None

    def wrap(
        self,
        optimizer: object,
        options: Options,
        *,
        separate_sums: bool = False,
        module: object = None,
        gradient_sync: object = "micro_batch",
        process_group: object = None,
        norm_group: object = None,
    ) -> AccumulatingOptimizer:
        """Wrap a `torch.optim.Optimizer`.

        Args:
            optimizer: the optimizer.
            options: the checked options.
            separate_sums: if True, ``step`` moves the micro-batch's gradients from
                ``.grad`` into separate buffers. Between two steps you may then clear,
                assign, reduce or clip ``.grad`` yourself. ``opt.backward`` multiplies
                the gradient by the loss scale and, with ``reduction="mean"``, by the
                weight, so multiply a clipping limit by the same numbers. If you do not
                call ``opt.backward``, differentiate ``opt.scale(loss)``. This option
                costs one buffer per parameter, and one more pass over each
                micro-batch's gradients.
            module: the parallel module that several workers train together. It is
                either a `torch.nn.parallel.DistributedDataParallel`, or a module to
                which `torch.distributed.fsdp.fully_shard` was applied. The gradients of
                a `DistributedDataParallel` are reduced only once, at the end of the
                window. All workers share each window. This call, the end of a window
                and ``flush`` are collective.
            gradient_sync: when FSDP2 reduces gradients. With ``"micro_batch"``, it
                reduces them in each micro-batch, so that each worker stores only its
                shard of the sum. With ``"window"``, it reduces them once per window.
                Until then each worker keeps gradients of the whole model, as with
                ``set_requires_gradient_sync(False)``.
            process_group: the `torch.distributed.ProcessGroup` of workers that train
                equal copies of one model without a parallel module. The window's sum is
                reduced as with ``module=``. If the optimizer also averages gradients
                over the workers itself, this average changes nothing, because all
                workers already have the same gradients. With ``"alone"``, this process
                does not share its windows, even if several processes are running. If
                several processes are running and you pass neither `module` nor
                `process_group`, a `GradAccumWarning` is issued.
            norm_group: the `torch.distributed.ProcessGroup` of the stages of a
                pipeline, each of which has its own optimizer. The gradient norm, the
                clipping and the check for overflow cover all stages. The end of a
                window is collective: if only one stage reaches the end of its window,
                that stage waits until the group's timeout, and then raises an error.

        Raises:
            ArgumentTypeError: `optimizer` is not an optimizer, or is already wrapped;
                or `module` is not a supported module.
            ArgumentValueError: `module` does not contain all parameters of the
                optimizer, or ignores some of them; another worker passed different
                options, or the parameters in a different order; or FSDP2's reduction
                cannot be deferred to the end of the window with these options.
            UsageError: ``.grad`` of a parameter already contains a gradient.
        """
        if isinstance(optimizer, AccumulatingOptimizer):
            raise wrapped_twice_error(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            fix = (
                "Write for example"
                " gradaccum.wrap(torch.optim.AdamW(model.parameters()), steps=4)."
            )
            raise optimizer_error("a torch.optim.Optimizer", optimizer, fix)
        checked_options = options._replace(
            separate_sums=require_bool("separate_sums", separate_sums),
            accumulate_dtype=require_accumulate_dtype(options.accumulate_dtype),
        )
        workers = workers_of(
            optimizer, module, checked_options, gradient_sync, process_group, norm_group
        )
        return AccumulatingOptimizer(optimizer, checked_options, workers)

    def gate(self, scheduler: object) -> GatedScheduler:
        """Wrap a learning-rate scheduler that was created for a wrapped optimizer, so
        that the scheduler steps once per update.

        Raises:
            ArgumentTypeError: the scheduler's optimizer is not wrapped, or the
                scheduler is already wrapped.
        """
        if isinstance(scheduler, GatedScheduler):
            raise wrapped_twice_error(scheduler)
        return GatedScheduler(scheduler)

    def verifies(self, model: object) -> bool:
        return isinstance(model, torch.nn.Module)


backend = TorchBackend()


class TorchOptions(WrapOptions, total=False):
    """The keyword arguments that `gradaccum.wrap` accepts for a torch optimizer."""

    loss_scale: float | LossScale | torch.amp.GradScaler | None
    separate_sums: bool
    module: torch.nn.Module | None
    gradient_sync: GradientSync
    process_group: torch.distributed.ProcessGroup | Literal["alone"] | None
    norm_group: torch.distributed.ProcessGroup | None


def wrap(
    optimizer: torch.optim.Optimizer, steps: Steps, **options: Unpack[TorchOptions]
) -> AccumulatingOptimizer:
    """Wrap a torch optimizer as `gradaccum.wrap` does, with precise type annotations
    for the options and the return value.
    """
    return cast(AccumulatingOptimizer, wrap_with(backend, optimizer, steps, **options))
