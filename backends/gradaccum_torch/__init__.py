"""The PyTorch adapter of gradaccum. You do not need to import this package to call
``gradaccum.wrap(optimizer, steps=4)``.
"""

from gradaccum_torch.backend import TorchBackend, backend, wrap
from gradaccum_torch.large_batch.backward import backward
from gradaccum_torch.large_batch.coupled import coupled_backward
from gradaccum_torch.layered import layered_backward
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.saving import redistributed
from gradaccum_torch.scheduler import GatedScheduler

__all__ = [
    "AccumulatingOptimizer",
    "GatedScheduler",
    "TorchBackend",
    "backend",
    "backward",
    "coupled_backward",
    "layered_backward",
    "redistributed",
    "wrap",
]
