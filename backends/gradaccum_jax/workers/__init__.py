"""Several devices: calls that they make together, inside `jax.shard_map`."""

from gradaccum_jax.workers.cross_entropy import sharded_cross_entropy
from gradaccum_jax.workers.data_parallel import data_parallel
from gradaccum_jax.workers.layout import redistributed

__all__ = ["data_parallel", "redistributed", "sharded_cross_entropy"]
