"""Gradient accumulation for MindSpore. `gradaccum.wrap` uses this package to wrap a
MindSpore optimizer.
"""

from gradaccum_mindspore.backend import backend, wrap
from gradaccum_mindspore.large_batch.coupled import coupled_value_and_grad
from gradaccum_mindspore.large_batch.value_and_grad import (
    value_and_grad,
    value_and_update,
)
from gradaccum_mindspore.optimizer import AccumulatingOptimizer
from gradaccum_mindspore.recording import LoopRecorder
from gradaccum_mindspore.saving import load_checkpoint_into
from gradaccum_mindspore.training import FlushAtEpochEnd, TrainOneStepCell
from gradaccum_mindspore.workers.layout import redistributed

__all__ = [
    "AccumulatingOptimizer",
    "FlushAtEpochEnd",
    "LoopRecorder",
    "TrainOneStepCell",
    "backend",
    "coupled_value_and_grad",
    "load_checkpoint_into",
    "redistributed",
    "value_and_grad",
    "value_and_update",
    "wrap",
]
