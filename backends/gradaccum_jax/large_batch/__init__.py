"""Functions that take a large batch in one call and process it micro-batch by
micro-batch.
"""
