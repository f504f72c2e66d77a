"""Recomputation, also called gradient checkpointing: activations are freed, and computed again for the backward pass."""

from gradaccum_mindspore.recomputation.function import recompute

__all__ = ["recompute"]
