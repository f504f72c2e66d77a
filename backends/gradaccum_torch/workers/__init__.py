"""Several workers: one window over all of them, and a loss whose classes they share."""

from gradaccum_torch.workers.cross_entropy import sharded_cross_entropy

__all__ = ["sharded_cross_entropy"]
