"""The large batch in one call: split into micro-batches, with the memory of one."""

from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad

__all__ = ["value_and_grad"]
