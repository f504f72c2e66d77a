"""Several workers: one window over all of them. Each worker adds up its own
micro-batches, and the end of a window adds up the workers, once.
"""
