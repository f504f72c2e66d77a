"""Process a large batch in one call. The call splits the batch into micro-batches, and
needs only as much memory as one micro-batch.
"""
