"""Several workers: one window over all of them."""
