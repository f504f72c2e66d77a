"""Support for windows that several devices share inside `jax.shard_map`."""
