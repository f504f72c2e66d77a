"""What several workers compute together, each on its own part of an array: the softmax cross-entropy of logits sharded by class."""

from gradaccum_jax.workers.cross_entropy import sharded_cross_entropy

__all__ = ["sharded_cross_entropy"]
