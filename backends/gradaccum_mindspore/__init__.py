"""Gradient accumulation for MindSpore; `gradaccum.wrap` of a MindSpore optimizer comes here."""

from gradaccum_mindspore.accumulator import Accumulator
from gradaccum_mindspore.backend import backend
from gradaccum_mindspore.callbacks import FlushAtEpochEnd, WatchWindows
from gradaccum_mindspore.checkpoint import load_checkpoint_into
from gradaccum_mindspore.large_batch import coupled_value_and_grad, value_and_grad, value_and_update
from gradaccum_mindspore.linearity import verify_loss_scaling
from gradaccum_mindspore.optimizer import AccumulatingExperimentalOptimizer, AccumulatingOptimizer
from gradaccum_mindspore.recomputation import recompute
from gradaccum_mindspore.training import TrainOneStepCell
from gradaccum_mindspore.verification import verify
from gradaccum_mindspore.workers import redistributed, sharded_cross_entropy

__all__ = [
    "AccumulatingExperimentalOptimizer",
    "AccumulatingOptimizer",
    "Accumulator",
    "FlushAtEpochEnd",
    "TrainOneStepCell",
    "WatchWindows",
    "backend",
    "coupled_value_and_grad",
    "load_checkpoint_into",
    "recompute",
    "redistributed",
    "sharded_cross_entropy",
    "value_and_grad",
    "value_and_update",
    "verify",
    "verify_loss_scaling",
]
