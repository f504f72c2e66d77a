"""The adapter as the conformance suite drives it: models of neutral specs, sessions over them, and the second door to their results."""

from gradaccum_jax.harness.large_batch import harness

__all__ = ["harness"]
