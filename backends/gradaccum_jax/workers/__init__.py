"""Several devices: calls that they make together, inside `jax.shard_map`."""
