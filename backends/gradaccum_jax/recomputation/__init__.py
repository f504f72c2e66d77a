"""Gradient checkpointing: a function keeps its inputs only, and its activations are computed again when the gradient needs them."""
