"""Several workers that share each window. Each worker adds up its own micro-batches,
and the end of a window adds up the sums of all workers, once.
"""
