"""Recomputation (gradient checkpointing): the backward pass runs a part of the forward
pass again in place of keeping its activations.
"""

from gradaccum_torch.recomputation.module import recompute

__all__ = ["recompute"]
