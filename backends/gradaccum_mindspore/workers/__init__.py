"""What several workers compute together, each on its own part of a tensor: the softmax cross-entropy of logits sharded by class."""

from gradaccum_mindspore.workers.cross_entropy import sharded_cross_entropy

__all__ = ["sharded_cross_entropy"]
