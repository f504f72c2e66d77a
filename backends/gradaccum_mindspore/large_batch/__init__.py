"""Process a large batch in one call, which splits it into micro-batches and needs only
the memory of one micro-batch.
"""
