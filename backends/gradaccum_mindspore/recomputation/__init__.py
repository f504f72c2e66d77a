"""Recomputation, also called gradient checkpointing: activations are freed, and
computed again for the backward pass.
"""
