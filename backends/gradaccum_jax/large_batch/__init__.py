"""For users who have the large batch in hand: one call divides it, runs the micro-batches and returns what the large batch would give.

`value_and_grad` stands in for `jax.value_and_grad`; `value_and_update` makes a whole window of a wrapped optimizer;
`coupled_value_and_grad` is for losses that compare items across the batch.
"""
