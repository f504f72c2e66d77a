"""`gradaccum.verify` checks whether accumulation is right for a user's loss."""
