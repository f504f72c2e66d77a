"""The large batch in one call, run micro-batch by micro-batch.

`value_and_grad` replaces `jax.value_and_grad`; `value_and_update` makes a whole window of a wrapped optimizer; `coupled_value_and_grad` is
for losses that compare items across the batch.
"""
