"""`verify`: whether accumulation is right for a loss, found by experiment on one batch. Accumulation needs nothing of it."""
