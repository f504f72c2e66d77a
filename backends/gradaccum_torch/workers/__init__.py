"""Several workers with one window: each adds up its own micro-batches, and the end of the window adds up the workers, once."""

from gradaccum_torch.workers.module import workers_of
from gradaccum_torch.workers.workers import Alone, Workers

__all__ = ["Alone", "Workers", "workers_of"]
