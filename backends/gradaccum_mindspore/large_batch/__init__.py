"""The large batch in one call, split into micro-batches, with the memory of one
micro-batch.
"""
