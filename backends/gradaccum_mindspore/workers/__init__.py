"""Windows that several workers share. Each worker adds up the gradients of its own
micro-batches, and these sums are all-reduced once, at the end of the window.
"""
