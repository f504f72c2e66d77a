"""The large batch in one call: it is split, its micro-batches run one after the other, and the gradient is that of the whole."""

from gradaccum_torch.large_batch.backward import backward
from gradaccum_torch.large_batch.coupled import coupled_backward

__all__ = ["backward", "coupled_backward"]
