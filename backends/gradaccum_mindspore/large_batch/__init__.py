"""Process a large batch in one call. The call splits the batch into micro-batches, and
needs only the memory of one micro-batch.
"""
