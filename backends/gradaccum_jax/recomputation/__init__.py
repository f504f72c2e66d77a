"""Gradient checkpointing: a function keeps its inputs only, and computes its
activations again when the gradient needs them.
"""
