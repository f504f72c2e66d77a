"""The large batch in one call: split into micro-batches, with the memory of one."""

from gradaccum_mindspore.large_batch.coupled import coupled_value_and_grad
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad
from gradaccum_mindspore.large_batch.value_and_update import value_and_update

__all__ = ["coupled_value_and_grad", "value_and_grad", "value_and_update"]
