"""Record the gradients that a training loop passes to a MindSpore optimizer, for
`gradaccum.check_loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gradaccum import ArgumentValueError, kit
from gradaccum_mindspore.gradient_sum import LIMITS, hidden_parameter
from gradaccum_mindspore.mindspore_private import context
from gradaccum_mindspore.optimizer import AccumulatingOptimizer
from gradaccum_mindspore.verification import wide


class LoopRecorder(nn.Optimizer):  # type: ignore[misc]
    """An optimizer that records the gradients passed to it and does not change the
    parameters. Use it instead of the inner optimizer to check a training loop. It works
    in PyNative mode, inside `mindspore.jit` and in graph mode.

        recorder = gradaccum_mindspore.LoopRecorder(net.trainable_params(), updates=4)
        train(recorder)
        print(recorder.report(loss_fn, micro_batches))

    Args:
        parameters: the trained parameters.
        updates: the maximum number of updates to record. Each recorded update needs as
            much memory as the parameters.
        loss_scale: the number by which the recorder divides the gradients, as
            MindSpore's optimizers do. Pass the scale of a `FixedLossScaleManager` with
            ``drop_overflow_update=False``, or the ``sens`` of an `nn.TrainOneStepCell`.
    """

    def __init__(
        self, parameters: Sequence[Any], updates: int = 8, loss_scale: float = 1.0
    ) -> None:
        super().__init__(0.0, parameters, loss_scale=loss_scale)
        self.kept_updates = updates
        self.updates_made = hidden_parameter(
            Tensor([0], ms.int32), "loop_recorder.updates"
        )
        records = []
        for number, parameter in enumerate(self.parameters):
            shape = (updates + 1, *parameter.shape)
            dtype = ms.float64 if parameter.dtype == ms.float64 else ms.float32
            zeros = Tensor(np.zeros(shape), dtype)
            records.append(hidden_parameter(zeros, f"loop_recorder.record.{number}"))
        self.records = ms.ParameterTuple(records)

    def construct(self, gradients: Any) -> Any:
        # When all rows are used, each further update overwrites one extra row, which is
        # never read.
        row = ops.minimum(self.updates_made, Tensor([self.kept_updates], ms.int32))
        gradients = self.scale_grad(gradients)
        for record, gradient in zip(self.records, gradients):  # noqa: B905
            ops.scatter_update(record, row, gradient.astype(record.dtype)[None])
        ops.assign_add(self.updates_made, Tensor([1], ms.int32))
        return True

    def report(
        self,
        loss_fn: Callable[..., Any],
        micro_batches: Sequence[Any],
        *,
        weight: Callable[..., float] | None = None,
        **options: Any,
    ) -> kit.LoopReport:
        """Report which micro-batches each update contained, and with what weight.

        Args:
            loss_fn: ``loss_fn(*micro_batch)`` returns the scalar loss of a micro-batch,
                not divided or weighted, or a tuple whose first element is this loss.
            micro_batches: the micro-batches that the loop trained on, in the same
                order.
            weight: ``weight(*micro_batch)`` returns the weight of a micro-batch; by
                default, the number of its items.
            options: ``reduction``, ``steps`` and ``clip_norm``, as in
                `gradaccum.check_loop`.

        Raises:
            ArgumentValueError: the loop applied more updates than the recorder keeps.
        """
        update_count = int(self.updates_made.asnumpy()[0])
        if update_count > self.kept_updates:
            raise ArgumentValueError(
                f"updates: expected at least {update_count}, the number of updates that"
                f" the loop applied; got {self.kept_updates}. Create the recorder with"
                f" LoopRecorder(..., updates={update_count})."
            )
        batches = kit.recorded_batches(micro_batches)
        count = weight or kit.items_of

        def gradient_of(number: int, factor: float = 1.0) -> Any:
            def scaled_loss(*batch: Any) -> Any:
                loss = loss_fn(*batch)
                if isinstance(loss, tuple):  # It is (loss, aux).
                    loss = loss[0]
                return loss * factor

            # In graph mode, MindSpore cannot parse some functions, such as lambdas.
            with context(mode=ms.PYNATIVE_MODE):
                differentiate = ms.value_and_grad(scaled_loss, None, self.parameters)
                return _vector(differentiate(*batches[number])[1])

        gradients = [gradient_of(number) for number in range(len(batches))]
        updates = [
            _vector(record[number] for record in self.records)
            for number in range(update_count)
        ]
        return kit.loop_report(
            gradients,
            updates,
            [float(count(*batch)) for batch in batches],
            max(LIMITS[parameter.dtype][0] for parameter in self.parameters),
            measure_rounding=lambda: kit.rounding_of(gradients, gradient_of),
            **options,
        )


def recording(optimizer: Any) -> AbstractContextManager[LoopRecorder]:
    """Start recording with the `LoopRecorder` that the loop uses as its optimizer. The
    recorder may be wrapped by gradaccum.

    MindSpore compiles an optimizer together with the training step, so calls to any
    other optimizer cannot be observed.
    """
    recorder = optimizer
    if isinstance(optimizer, AccumulatingOptimizer):
        recorder = optimizer.inner
    ops.assign(recorder.updates_made, Tensor([0], ms.int32))
    return nullcontext(recorder)


def _vector(tensors: Iterable[Any]) -> Any:
    """Return the tensors flattened into one float64 NumPy vector."""
    return np.concatenate([wide(tensor).reshape(-1) for tensor in tensors])
