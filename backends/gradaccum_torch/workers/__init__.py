"""Several workers with one window: each adds up its own micro-batches, and the window's end adds up the workers, once."""

from gradaccum_torch.workers.joining import Joined, Workers
from gradaccum_torch.workers.module import workers_of

__all__ = ["Joined", "Workers", "workers_of"]
