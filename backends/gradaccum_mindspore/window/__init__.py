"""Add micro-batches to the open window, and close, flush or discard it."""
