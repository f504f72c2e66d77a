"""Gradient checkpointing: a function keeps its inputs only, and its activations are computed again when the gradient needs them."""

from gradaccum_jax.recomputation.function import recompute

__all__ = ["recompute"]
