"""Several workers: one window over all of them, and a loss whose classes they share.

Each worker adds up its own micro-batches, and the end of a window adds up the workers, once.
"""

from gradaccum_torch.workers.cross_entropy import sharded_cross_entropy
from gradaccum_torch.workers.found import workers_of
from gradaccum_torch.workers.resuming import redistributed
from gradaccum_torch.workers.workers import Workers

__all__ = ["Workers", "redistributed", "sharded_cross_entropy", "workers_of"]
