"""Functions that process a large batch in one call, micro-batch by micro-batch."""

from gradaccum_torch.large_batch.backward import backward
from gradaccum_torch.large_batch.coupled import coupled_backward

__all__ = ["backward", "coupled_backward"]
