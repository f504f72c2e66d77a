"""The PyTorch adapter of gradaccum. ``gradaccum.wrap(optimizer, steps=4)`` finds it; nothing here needs to be imported for that."""

from gradaccum_torch.backend import TorchBackend, backend
from gradaccum_torch.linearity import verify_loss_scaling
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.scheduler import GatedScheduler

__all__ = ["AccumulatingOptimizer", "GatedScheduler", "TorchBackend", "backend", "verify_loss_scaling"]
