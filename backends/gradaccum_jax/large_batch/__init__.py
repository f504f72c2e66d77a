"""The large batch in one call, run micro-batch by micro-batch."""
