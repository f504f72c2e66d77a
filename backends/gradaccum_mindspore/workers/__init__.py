"""Several workers: one window over all of them, and a loss whose classes they share.

Each worker adds up its own micro-batches, and the end of a window adds up the workers, once.
"""

from gradaccum_mindspore.workers.cross_entropy import sharded_cross_entropy
from gradaccum_mindspore.workers.redistribution import redistributed

__all__ = ["redistributed", "sharded_cross_entropy"]
