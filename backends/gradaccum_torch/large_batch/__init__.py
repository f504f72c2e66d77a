"""Functions that process a large batch in one call, micro-batch by micro-batch."""
