"""`verify`: a check whether accumulation is right for a user's loss."""
